import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import campaign_training
from benchmarks.explicit import local_training
from benchmarks.peers import attempt
from benchmarks.training import Federation, compare_with_peers, compare_without_privacy, measure
from benchmarks.training_peers import Cost, Peer, TrainingWork, measure_in_process, train_in_a_loop
from d2pfed.learning import LocalTrainer, build_model, load_task
from d2pfed.simulation import Fidelity

LOCAL = local_training(lr=0.5, epochs=1, batch_size=2000)  # one batch: every order of the examples is the same


@pytest.fixture(scope="module")
def learner() -> LocalTrainer:
    task = load_task("digits", population=40)
    return LocalTrainer(build_model("logistic", task, seed=0), task.clients, LOCAL)


def test_what_is_timed_privately_is_what_is_timed_without_privacy_plus_noise(learner):
    with Federation.open(learner, 20, epsilon=500.0) as federation:
        plain, private = federation.plain(1), federation.private(1, Fidelity.SUM)
        spread = federation.plan.sigma / federation.plan.cohort_size
    assert np.linalg.norm(private - plain) < 3 * spread * np.sqrt(learner.model.dimension)
    assert np.linalg.norm(private + plain) > np.linalg.norm(plain)


def test_the_loop_that_is_timed_does_the_same_training(learner):
    clients = range(10)
    table = tuple(learner.clients.examples(client) for client in clients)
    params = learner.model.initial()
    mean = np.mean(list(learner(params, list(clients), 0)), axis=0)
    looped = train_in_a_loop(TrainingWork(learner.model.module, table, LOCAL, 1))
    np.testing.assert_allclose(learner.model.flatten(looped) - params, mean, atol=1e-5)


def test_rows_compare_with_the_same_training_without_privacy(learner):
    total, protocol = compare_without_privacy(learner, 20, 1)
    assert (total.clients, total.dimension, total.epochs) == (20, learner.model.dimension, 1)
    assert total.seconds > 0
    assert total.ratio == pytest.approx(total.peer_seconds / total.seconds)
    assert total.met == (total.seconds <= 1.3 * total.peer_seconds * (1 + 1e-9))
    assert protocol.met is None
    assert protocol.processor_seconds > total.peer_processor_seconds


def test_a_peer_that_is_absent_is_named_and_not_measured():
    absent = Peer("nobody", ("no_such_module",), 2.0, lambda _: Cost(0.0, None))
    present = Peer("somebody", ("numpy",), 2.0, lambda work: Cost(float(len(work.table)), None))
    rows = list(compare_with_peers(4, 1, [absent, present]))
    assert [row.what for row in rows] == 4 * ["without privacy", "private, sum"]
    loop, _, threaded, _, named, _, measured, private = rows
    assert (loop.peer, threaded.peer) == ("torch loop, one thread", "torch loop, its default threads")
    assert None not in (loop.ratio, threaded.ratio)
    assert (named.peer, named.ratio, named.met) == ("nobody", None, None)
    assert named.peer_error == "not installed: pip install no_such_module, in no extra of ours"
    assert measured.ratio == pytest.approx(4 / measured.seconds)
    assert measured.met is not None
    assert private.met is None


def test_the_first_turn_is_not_counted():
    turns = []
    measure({"a": turns.append, "b": turns.append}, 2)
    assert turns == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
def test_memory_does_not_grow_over_sixty_rounds(tmp_path):
    root = Path(campaign_training.__file__).parent.parent
    command = [sys.executable, campaign_training.__file__, "memory", "60", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["rounds"] == 60


@pytest.mark.slow
def test_a_kill_costs_a_round_and_not_the_run(tmp_path):
    root = Path(campaign_training.__file__).parent.parent
    command = [sys.executable, campaign_training.__file__, "kills", "2", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_leak_of_a_thousandth_a_round_is_seen():
    leaking = campaign_training.Watch(memory=[1000 + turn for turn in range(60)])
    steady = campaign_training.Watch(memory=[1000 + turn % 7 for turn in range(60)])
    assert leaking.growth() >= campaign_training.LARGEST_GROWTH > steady.growth()


def raise_an_error(_work: TrainingWork) -> list[float]:
    raise ValueError("no\nsuch thing")


def end_without_an_answer(_work: TrainingWork) -> list[float]:
    os._exit(3)


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (raise_an_error, "ValueError: no such thing"),
        (end_without_an_answer, "its process ended with exit code 3 and no answer"),
    ],
)
def test_a_peer_that_crashes_is_named_with_its_error_in_one_line(learner, run, error):
    work = TrainingWork(learner.model.module, (), LOCAL, 1)
    assert attempt((), lambda: measure_in_process(run, work)) == (None, error)
