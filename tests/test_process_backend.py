"""Worker processes give the sums of this process, and what dies with a worker has dropped out."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from d2pfed.accounting import RELEASED, Sampling
from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, PrivacyTarget, calibrate
from d2pfed.round import Attempt, Participant, session_of
from d2pfed.simulation import Fidelity, SerialBackend, SimulatedFederation, process_backend, warm_up
from d2pfed.simulation import backend as backends
from d2pfed.simulation.backend import simulated_participant
from d2pfed.simulation.process_backend import ProcessBackend, _Stage
from d2pfed.training import shuffle_seed

DIMENSION, CLIENTS = 60, 80
PARAMS = np.linspace(-1, 1, DIMENSION).astype(np.float32)


@pytest.fixture(autouse=True)
def threads_of_other_tests(monkeypatch):
    """What is trained here needs no thread, so those that other tests have left in this process do not matter."""
    monkeypatch.setattr(process_backend, "can_fork", lambda: True)


def known(params, clients, seed):
    for client in clients:
        yield (np.sin(np.arange(DIMENSION) * (client + seed % 7)) / 10).astype(np.float32) + 0 * params


def deadly(params, clients, seed):
    if 7 in clients:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from known(params, clients, seed)


def prepared(params, clients, seed):
    for _ in clients:
        yield np.full(params.size, int(os.environ["PREPARED"]), np.float32)


def broken(params, clients, seed):
    raise ArithmeticError("a mistake in the training")


def make_plan(mechanism=MechanismName.CENTERED, dropouts=0.4, **changes):
    return calibrate(
        PrivacyTarget(
            dimension=DIMENSION,
            population=4 * CLIENTS,
            cohort_size=CLIENTS,
            rounds=2,
            epsilon=20.0,
            against=RELEASED,
            sampling=Sampling.FIXED,
            colluders=0.0,
            dropouts=dropouts,
            mechanism=mechanism,
            **changes,
        )
    )


def simulate(plan, backend, fidelity, participations=None):
    session = session_of(plan, Attempt("processes", 0, 0), tuple(range(CLIENTS)))
    return SimulatedFederation(
        plan=plan,
        backend=backend,
        entropy=Entropy.replay(b"processes"),
        fidelity=fidelity,
    ).collect(session, PARAMS, participations or {})


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_sums_are_those_of_the_in_process_backend(start):
    plan = make_plan()
    participations = {3: plan.max_participations}  # at its limit: zero and its noise, wherever it is encoded
    with closing(ProcessBackend(known, 2, start)) as backend:
        for fidelity in Fidelity:
            here = simulate(plan, SerialBackend(known), fidelity, participations)
            there = simulate(plan, backend, fidelity, participations)
            assert there.survivors == here.survivors == tuple(range(CLIENTS))
            assert np.array_equal(there.unmask().vector, here.unmask().vector)


def test_a_sum_here_has_the_vector_of_each_client_that_it_names():
    plan, entropy = make_plan(), Entropy.replay(b"processes")
    collected = simulate(plan, SerialBackend(known), Fidelity.SUM)
    session = session_of(plan, Attempt("processes", 0, 0), tuple(range(CLIENTS)))
    total = np.zeros(plan.codec.length, np.uint32)
    seed = shuffle_seed(session.run, session.round)
    for client, update in zip(collected.survivors, known(PARAMS, collected.survivors, seed), strict=True):
        own = simulated_participant(plan, client, entropy, {})
        plan.ring.add_into(total, own.encode(session, update, None))
    assert collected.survivors == tuple(range(CLIENTS))
    assert np.array_equal(collected.unmask().vector, total)


def test_other_updates_give_another_sum():
    plan = make_plan()
    here = simulate(plan, SerialBackend(known), Fidelity.SUM).unmask().vector
    with closing(ProcessBackend(lambda *given: (2 * update for update in known(*given)), 2)) as backend:
        assert not np.array_equal(simulate(plan, backend, Fidelity.SUM).unmask().vector, here)


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_clients_of_a_dead_worker_drop_out(fidelity):
    plan = make_plan()
    with closing(ProcessBackend(deadly, 2)) as backend:
        collected = simulate(plan, backend, fidelity)
        lost = set(range(CLIENTS)) - set(collected.survivors)
        assert 7 in lost
        assert len(lost) == 10  # one piece of eight
        assert len(backend.processes()) == 1
        total = collected.unmask().vector

    def others(params, clients, seed):
        for client, update in zip(clients, known(params, clients, seed), strict=True):
            yield None if client in lost else update

    class Alone(SerialBackend):
        def encode(self, encoder, params, clients, seed):
            for client, update in zip(clients, others(params, clients, seed), strict=True):
                if update is not None:
                    yield (client,), encoder.encode(client, update)

    assert np.array_equal(simulate(plan, Alone(others), fidelity).unmask().vector, total)


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_without_any_worker_left_the_run_ends_with_an_error(fidelity):
    """Later attempts would all be void, and all be charged."""
    plan = make_plan()
    with closing(ProcessBackend(deadly, 1)) as backend:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"no worker process is left .* the last one ended by signal 9"):
                simulate(plan, backend, fidelity)


def test_a_worker_that_is_killed_while_it_works_is_not_waited_for(tmp_path):
    """Not even if another process holds the end of its pipe, so that it never closes."""
    started, release = tmp_path / "started", tmp_path / "release"

    def endless(params, clients, seed):
        keeper = os.fork()  # holds what this process holds, and outlives it
        while keeper == 0:
            time.sleep(0.01)
            if release.exists():
                os._exit(0)
        started.write_text(str(os.getpid()))
        time.sleep(600)
        yield from known(params, clients, seed)

    def kill():
        while not (started.exists() and (process := started.read_text())):
            time.sleep(0.01)
        os.kill(int(process), signal.SIGKILL)

    with closing(ProcessBackend(endless, 1)) as backend:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(ConfigError, match="the last one ended by signal 9"):
                list(backend.train(PARAMS, range(20), 0))
        finally:
            release.touch()
            killer.join()


def test_answers_that_nobody_took_are_not_those_of_the_next_round():
    """A round that is given up in the middle leaves workers with full pipes; the next one has its own answers."""
    wide = np.zeros(200_000, np.float32)

    def widely(params, clients, seed):
        for client in clients:
            yield np.full(params.size, client + seed, np.float32)

    with closing(ProcessBackend(widely, 2)) as backend:
        given_up = backend._spread(range(80), _Stage(None, wide, 1000))
        next(given_up)
        updates = list(backend.train(wide, range(80), 0))
        assert [update[0] for update in updates] == list(range(80))
        del given_up


AFTER_TORCH = """
from d2pfed.errors import ConfigError
from d2pfed.simulation import SerialBackend
from d2pfed.simulation.process_backend import ProcessBackend, can_fork, start_workers


def known(params, clients, seed):
    return (0 * params for _ in clients)


if __name__ == "__main__":
    import numpy, torch

    PARAMS = numpy.zeros(5, numpy.float32)
    assert can_fork()
    torch.set_num_threads(2)
    torch.ones(600, 600) @ torch.ones(600, 600)
    assert not can_fork()
    try:
        ProcessBackend(known, 2)
    except ConfigError as error:
        print(error)
    backend, line = start_workers(known, 2, None)
    print(line)
    assert len(list(backend.train(PARAMS, range(40), 0))) == 40
    backend.close()
    backend, line = start_workers(lambda *given: known(*given), 2, None)
    assert isinstance(backend, SerialBackend)
    print(line)
"""


def test_a_process_in_which_torch_has_threads_is_not_forked(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AFTER_TORCH)
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    refused, sent, here = done.stdout.splitlines()
    assert refused == "workers must be forked before this process has other threads: start must be forkserver"
    assert "sent to worker processes that start afresh" in sent
    assert "Clients are trained in this process: it has other threads" in here


def test_workers_are_prepared_before_they_train():
    with closing(ProcessBackend(prepared, 2, "fork", partial(os.environ.__setitem__, "PREPARED", "5"))) as backend:
        assert [update[0] for update in backend.train(PARAMS, range(30), 0)] == [5] * 30
    assert "PREPARED" not in os.environ


def test_an_error_in_training_is_raised_and_no_dropout():
    with (
        closing(ProcessBackend(broken, 1)) as backend,
        pytest.raises(ArithmeticError, match="a mistake in the training"),
    ):
        simulate(make_plan(), backend, Fidelity.SUM)


@pytest.mark.parametrize(
    ("clients", "workers", "sizes"),
    [(80, 2, {10}), (1000, 2, {125}), (10, 2, {5}), (25, 2, {12, 13}), (3, 4, {1}), (5, 0, {5}), (0, 2, set())],
)
def test_no_worker_is_idle_and_no_piece_needlessly_small(clients, workers, sizes):
    pieces = backends.pieces(range(clients), workers, process_backend._LEAST_PIECE)
    assert {len(piece) for piece in pieces} == sizes
    assert [client for piece in pieces for client in piece] == list(range(clients))


def test_there_must_be_a_worker():
    with pytest.raises(ConfigError, match="workers must be at least 1, got 0"):
        ProcessBackend(known, 0)


def test_closing_ends_the_workers():
    backend = ProcessBackend(known, 2)
    processes = backend.processes()
    backend.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("changes", [{}, {"mechanism": MechanismName.SHARED, "dropouts": 0.0}, {"clip": "auto"}])
def test_a_warm_up_trains_and_encodes_one_client_for_nobody(changes, monkeypatch):
    trained, encoded = [], []
    encode = Participant.encode

    def train(params, clients, seed):
        trained.extend(clients)
        return known(params, clients, seed)

    def watched(own, session, *given):
        encoded.append(session.run)
        return encode(own, session, *given)

    monkeypatch.setattr(Participant, "encode", watched)
    warm_up(make_plan(**changes), train, PARAMS)
    assert trained == [0]
    assert encoded == ["sketch"]  # a session of nobody


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_warm_up_compiles_what_encodes_in_another_process(fails, tmp_path, monkeypatch):
    seen = tmp_path / "seen"

    def encode(_plan, update):
        with seen.open("a") as file:
            file.write(f"{os.getpid()} {update.any()}\n")
        if fails and not update.any():
            raise ArithmeticError("in the other process")

    def train(params, _clients, _seed):
        yield np.ones_like(params)

    monkeypatch.setattr(backends, "is_kept", lambda _: False)
    monkeypatch.setattr(backends, "can_fork", lambda: True)
    monkeypatch.setattr(backends, "_encode", encode)
    warm_up(make_plan(), train, PARAMS)
    (helper, of_zeros), (here, of_training) = (line.split() for line in seen.read_text().splitlines())
    assert (of_zeros, of_training) == ("False", "True")
    assert int(here) == os.getpid() != int(helper)
    with pytest.raises(ProcessLookupError):
        os.kill(int(helper), 0)
    seen.unlink()
    monkeypatch.setattr(backends, "is_kept", lambda _: True)
    warm_up(make_plan(), train, PARAMS)
    assert seen.read_text().split()[0] == here
