"""Worker processes give the sums of this process, and what dies with a worker has dropped out."""

import os
import signal
from contextlib import closing

import numpy as np
import pytest

from d2pfed.accounting import RELEASED, Sampling
from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, PrivacyTarget, calibrate
from d2pfed.round import Attempt, session_of
from d2pfed.simulation import Dropouts, Fidelity, InProcess, collect
from d2pfed.simulation.process_backend import ProcessBackend

DIMENSION, CLIENTS = 60, 80
PARAMS = np.linspace(-1, 1, DIMENSION).astype(np.float32)


def known(params, clients, seed):
    for client in clients:
        yield (np.sin(np.arange(DIMENSION) * (client + seed % 7)) / 10).astype(np.float32) + 0 * params


def deadly(params, clients, seed):
    if 7 in clients:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from known(params, clients, seed)


def broken(params, clients, seed):
    raise ArithmeticError("a mistake in the training")


def make_plan(mechanism=MechanismName.CENTERED, dropouts=0.4):
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
        )
    )


def simulate(plan, backend, fidelity, participations=None):
    session = session_of(plan, Attempt("processes", 0, 0), tuple(range(CLIENTS)))
    return collect(
        session,
        PARAMS,
        participations or {},
        plan=plan,
        backend=backend,
        dropouts=Dropouts(),
        entropy=Entropy.replay(b"processes"),
        fidelity=fidelity,
    )


@pytest.mark.parametrize("start", ["fork", "forkserver"])
@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_sums_are_those_of_the_in_process_backend(start, fidelity):
    plan = make_plan()
    participations = {3: plan.max_participations}  # at its limit: zero and its noise, wherever it is encoded
    here = simulate(plan, InProcess(known), fidelity, participations)
    with closing(ProcessBackend(known, 2, start)) as backend:
        there = simulate(plan, backend, fidelity, participations)
        assert there.survivors == here.survivors == tuple(range(CLIENTS))
        assert np.array_equal(there.unmask().vector, here.unmask().vector)


def test_other_updates_give_another_sum():
    plan = make_plan()
    here = simulate(plan, InProcess(known), Fidelity.SUM).unmask().vector
    with closing(ProcessBackend(lambda *given: (2 * update for update in known(*given)), 2)) as backend:
        assert not np.array_equal(simulate(plan, backend, Fidelity.SUM).unmask().vector, here)


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_clients_of_a_worker_that_dies_have_dropped_out_and_the_rest_add_up(fidelity):
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

    class Alone(InProcess):
        def encode(self, encoder, params, clients, seed):
            for client, update in zip(clients, others(params, clients, seed), strict=True):
                if update is not None:
                    yield (client,), encoder.encode(client, update)

    assert np.array_equal(simulate(plan, Alone(others), fidelity).unmask().vector, total)


def test_without_any_worker_left_the_attempt_is_void():
    plan = make_plan()
    with closing(ProcessBackend(deadly, 1)) as backend:
        for _ in range(2):
            with pytest.raises(TooFewClients):
                simulate(plan, backend, Fidelity.SUM)


def test_an_error_in_training_is_raised_and_no_dropout():
    with (
        closing(ProcessBackend(broken, 1)) as backend,
        pytest.raises(ArithmeticError, match="a mistake in the training"),
    ):
        simulate(make_plan(), backend, Fidelity.SUM)


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
