import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")

import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from safetensors.numpy import load_file

from d2pfed.errors import ConfigError
from d2pfed.learning import LocalTraining, build_model, load_task
from d2pfed.ledger import RowKind, read_rows
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, PrivacyTarget, calibrate
from d2pfed.round import Attempt, session_of
from d2pfed.runs import RoundRecord
from d2pfed.runs.json_files import from_json
from d2pfed.simulation import Dropouts, Fidelity, SerialBackend, SimulatedFederation, ray_backend
from d2pfed.simulation.backend import pieces
from d2pfed.simulation.ray_backend import RayBackend
from d2pfed.training import ServerOptimizer
from reproduction.job import Settings, execute, task_job

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
DIMENSION, SEED = 24, 11
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have the tests on their path
PARAMS = np.linspace(-1, 1, DIMENSION).astype(np.float32)


def known(params, clients, seed):
    """Updates that depend on nothing but their client and the seed."""
    for client in clients:
        yield (np.cos(np.arange(DIMENSION) * (client + 1) + seed) / 8).astype(np.float32)


def deadly(params, clients, seed):
    """The same, by a worker that dies with client 7."""
    if 7 in clients:
        os.kill(os.getpid(), signal.SIGKILL)
    return known(params, clients, seed)


@dataclass(frozen=True)
class Without:
    """A backend in this process that loses these clients."""

    lost: set[int]

    def train(self, params, clients, seed):
        for client, update in zip(clients, known(params, clients, seed), strict=True):
            yield None if client in self.lost else update

    def encode(self, encoder, params, clients, seed):
        left = tuple(client for client in clients if client not in self.lost)
        return SerialBackend(known).encode(encoder, params, left, seed)

    def close(self):
        pass


def make_plan(cohort_size=40, **changes):
    target = {
        "dimension": DIMENSION,
        "population": 4 * cohort_size,
        "cohort_size": cohort_size,
        "rounds": 2,
        "epsilon": 20.0,
        "dropouts": 0.4,
    }
    return calibrate(PrivacyTarget(**(target | changes)))


def simulate(plan, backend, fidelity, participations=None):
    session = session_of(plan, Attempt("ray", 0, 0), tuple(range(plan.cohort_size)))
    return SimulatedFederation(
        plan=plan,
        backend=backend,
        entropy=Entropy.replay(b"ray"),
        fidelity=fidelity,
    ).collect(session, PARAMS, participations or {})


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_sums_are_those_of_the_in_process_backend(cluster):
    with closing(RayBackend(known, 2, None)) as backend:
        for mechanism, fidelity in product((MechanismName.CENTERED, MechanismName.SHARED), Fidelity):
            plan = make_plan(mechanism=mechanism, dropouts=0.0 if mechanism is MechanismName.SHARED else 0.4)
            participations = {3: plan.max_participations}  # at its cap: zero and its noise, wherever it is encoded
            here = simulate(plan, SerialBackend(known), fidelity, participations)
            there = simulate(plan, backend, fidelity, participations)
            assert there.survivors == here.survivors == tuple(range(40))
            total = there.unmask().vector
            assert np.array_equal(total, here.unmask().vector)
            other = SerialBackend(lambda params, clients, seed: known(params, clients, seed + 1))
            assert not np.array_equal(total, simulate(plan, other, fidelity, participations).unmask().vector)


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_clients_of_a_dead_worker_drop_out(cluster, monkeypatch, fidelity):
    monkeypatch.setattr(ray_backend, "_LEAST_PIECE", 5)
    plan = make_plan()
    with closing(RayBackend(deadly, 2, None)) as backend:
        collected = simulate(plan, backend, fidelity)
        lost = set(range(40)) - set(collected.survivors)
        assert 7 in lost
        assert len(lost) == 5  # one piece of eight
        total = collected.unmask().vector
    alone = Without(lost)
    assert np.array_equal(simulate(plan, alone, fidelity).unmask().vector, total)


@pytest.mark.parametrize(
    ("clients", "workers", "sizes"),
    [
        (1000, 2, {125}),
        (100, 2, {50}),
        (160, 2, {53, 54}),
        (40, 2, {20}),
        (100, 4, {25}),
        (3, 4, {1}),
        (0, 2, set()),
    ],
)
def test_pieces_have_fifty_clients_unless_workers_would_be_idle(clients, workers, sizes):
    found = pieces(range(clients), workers, ray_backend._LEAST_PIECE)
    assert {len(piece) for piece in found} == sizes
    assert [client for piece in found for client in piece] == list(range(clients))


def test_a_dead_worker_is_replaced(cluster):
    plan = make_plan(cohort_size=200)
    with closing(RayBackend(known, 2, None)) as backend:
        before = set(backend.processes())
        os.kill(min(before), signal.SIGKILL)
        collected = simulate(plan, backend, Fidelity.SUM)
        assert len(collected.survivors) == 150  # one piece of four is lost with its worker
        alone = simulate(plan, Without(set(range(200)) - set(collected.survivors)), Fidelity.SUM)
        assert np.array_equal(alone.unmask().vector, collected.unmask().vector)
        until = time.monotonic() + 60
        while len(backend.processes()) < 2:
            assert time.monotonic() < until
            assert simulate(plan, backend, Fidelity.SUM).survivors == tuple(range(200))
        assert min(before) not in backend.processes()


def test_rounds_in_which_every_worker_dies_are_errors(cluster):
    def always(params, clients, seed):
        os.kill(os.getpid(), signal.SIGKILL)

    with closing(RayBackend(always, 2, None)) as backend:
        for fidelity in Fidelity:
            with pytest.raises(
                ConfigError, match="no Ray worker is left to train clients: the last one ended with"
            ):
                simulate(make_plan(), backend, fidelity)


def test_more_workers_than_a_cluster_has_room_for_are_refused(cluster, monkeypatch):
    monkeypatch.setattr(ray_backend, "_START_SECONDS", 5.0)
    with pytest.raises(ConfigError, match="room for 3 workers within 5 seconds: ask for fewer"):
        RayBackend(known, 3, None)


def test_an_error_in_training_is_no_dropout(cluster):
    def broken(params, clients, seed):
        raise ArithmeticError("a bug")

    with closing(RayBackend(broken, 1, None)) as backend, pytest.raises(ArithmeticError, match="a bug"):
        simulate(make_plan(), backend, Fidelity.SUM)


def test_a_run_goes_on_with_another_backend_and_the_same_ledger(cluster, tmp_path):
    task = load_task("digits", population=40)
    model = build_model("logistic", task, seed=0)
    settings = Settings(
        task="digits",
        data="digits",
        model="logistic",
        target=PrivacyTarget(
            dimension=model.dimension, population=40, cohort_size=20, rounds=3, epsilon=30.0, delta=1e-3
        ),
        local=LocalTraining(lr=0.5, epochs=1, batch_size=10),
        server=ServerOptimizer(),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=7,
    )
    job = task_job(settings, task, model, calibrate(settings.target))
    paths = tmp_path / "mixed" / "run", tmp_path / "alone" / "run"
    first = execute(job, paths[0], None, lambda progress: progress.round < 2, RayBackend(job.trainer(), 1, None))
    assert (first.rounds, first.stopped) == (2, "interrupted")
    execute(job, paths[0], None, lambda progress: True)
    execute(job, paths[1], None, lambda progress: True)
    records = [
        from_json(RoundRecord, line, "metrics.jsonl")
        for line in (paths[0] / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(record.round, record.survivors) for record in records] == [(1, 20), (2, 20), (3, 20)]
    bodies = [[row.body for row in read_rows(path / "ledger.sqlite") if row.key is not None] for path in paths]
    assert bodies[0] == bodies[1]
    mixed, alone = (
        np.concatenate([a.ravel() for a in load_file(path / "model.safetensors").values()]) for path in paths
    )
    # Updates that differ by rounding may round to another lattice point now and then.
    assert np.abs(mixed - alone).max() < 5 * job.plan.codec.granularity


@pytest.mark.slow
def test_a_run_whose_driver_is_killed_goes_on_after_its_last_round(tmp_path):
    source = str(Path(ray_backend.__file__).parents[2])
    program = [sys.executable, "-c", "import d2pfed.cli; d2pfed.cli.main()"]
    options = "--task digits --backend ray --workers 2 --population 40 --cohort-size 20 --rounds 40 --epsilon 300"
    command = [*program, "train", *options.split(), "--sampling", "fixed", "--name", "killed"]
    place = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": source}}
    metrics = tmp_path / "runs" / "killed" / "metrics.jsonl"

    def rounds():
        return [json.loads(line)["round"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    driver = subprocess.Popen(command, **place, stdout=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 300
    while len(rounds()) < 3:
        assert driver.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(driver.pid, signal.SIGKILL)  # with its workers, as when a machine fails
    driver.wait()
    before = rounds()
    assert len(before) < 40
    again = subprocess.run(command, **place, check=False, timeout=600, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert rounds() == list(range(1, 41))
    charged = [row for row in read_rows(metrics.parent / "ledger.sqlite") if row.kind is RowKind.RESERVE]
    assert 40 <= len(charged) <= 41  # the attempt in which it was killed stays charged


def test_there_must_be_a_worker():
    with pytest.raises(ConfigError, match="workers must be at least 1, got 0"):
        RayBackend(known, 0, None)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1:9", "there is no Ray cluster at 127.0.0.1:9"),
        ("127.0.0.1:99999", "there is no Ray cluster at 127.0.0.1:99999"),
        ("here", "HOST:PORT or auto, got here"),
        ("auto", "there is no Ray cluster found by auto"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address, complaint):
    ray.shutdown()
    with pytest.raises(ConfigError, match=complaint):
        RayBackend(known, 1, address)


@pytest.fixture
def two_nodes():
    ray.shutdown()
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
        yield nodes, second
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.slow
def test_rounds_go_on_when_a_node_of_a_cluster_goes_and_comes(two_nodes, monkeypatch):
    nodes, second = two_nodes
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    monkeypatch.setattr(ray_backend, "_LEAST_PIECE", 5)
    plan = make_plan()
    with closing(RayBackend(known, 2, "auto")) as backend:
        assert len(set(backend.processes().values())) == 2
        total = simulate(plan, backend, Fidelity.SUM).unmask().vector
        assert np.array_equal(total, simulate(plan, SerialBackend(known), Fidelity.SUM).unmask().vector)
        nodes.remove_node(second)
        assert len(simulate(plan, backend, Fidelity.SUM).survivors) in (
            35,
            40,
        )  # a piece was lost, unless it was seen before
        assert simulate(plan, backend, Fidelity.SUM).survivors == tuple(range(40))  # by the one that is left
        assert len(backend.processes()) == 1
        nodes.add_node(num_cpus=1)
        until = time.monotonic() + 60
        while len(backend.processes()) < 2:
            assert time.monotonic() < until
            assert simulate(plan, backend, Fidelity.SUM).survivors == tuple(range(40))
