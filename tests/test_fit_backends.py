"""Where `fit` trains clients: worker processes only where they are safe and worth it."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import d2pfed
from d2pfed.api import backends
from d2pfed.api.backends import TolerantTrainer, clients_to_try, start_backend
from d2pfed.api.settings import BackendName, RunOptions
from d2pfed.errors import ConfigError
from d2pfed.learning import (
    LocalTraining,
    UserClients,
    trainer_for,
    use_one_thread,
    user_model,
)
from d2pfed.simulation import SerialBackend

LONG = 1e6  # seconds


def trainer(loss=None):
    clients = UserClients.of([(torch.zeros(2, 3), torch.zeros(2).long())] * 4, None, torch.device("cpu"))
    return trainer_for(user_model(nn.Linear(3, 2), loss=loss), clients, LocalTraining())


def start(made, name=BackendName.AUTO, seconds=LONG, workers=2):
    options = RunOptions(backend=name, workers=workers)
    return start_backend(options, made, (made.model.initial(), 0), seconds=seconds)


class Workers:
    """Stands for worker processes, and answers as it is told."""

    answer: object = None
    closed = 0

    def __init__(self, _trainer, workers, start, prepare):
        assert (workers, start, prepare) == (2, "forkserver", use_one_thread)

    def train(self, _params, clients, _seed):
        return iter([self.answer] * len(clients))

    def close(self):
        Workers.closed += 1


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(backends, "ProcessBackend", Workers)
    monkeypatch.setattr(Workers, "answer", np.zeros(8, np.float32))
    monkeypatch.setattr(Workers, "closed", 0)


def test_workers_are_started_where_there_is_enough_to_do(workers):
    backend, line = start(trainer())
    assert isinstance(backend, Workers)
    assert line == "Clients are trained by 2 worker processes."


@pytest.mark.parametrize("limits", [{"seconds": 1.0}, {"workers": 1}])
def test_little_work_and_one_core_stay_here(workers, limits):
    backend, line = start(trainer(), **limits)
    assert isinstance(backend, SerialBackend)
    assert "there is little to do" in line


def test_workers_that_end_as_they_begin_are_not_used(workers, monkeypatch):
    """They would count as dropped out, in rounds that are charged."""
    monkeypatch.setattr(Workers, "answer", None)
    backend, line = start(trainer())
    assert isinstance(backend, SerialBackend)
    assert "ended as they began" in line
    assert Workers.closed == 1
    with pytest.raises(ConfigError, match="worker processes cannot be used: they ended as they began"):
        start(trainer(), BackendName.PROCESSES)


def test_a_script_that_workers_would_run_again_keeps_clients_here(workers, monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import d2pfed\nd2pfed.fit(...)\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    backend, line = start(trainer())
    assert isinstance(backend, SerialBackend)
    assert 'script.py has no `if __name__ == "__main__":`' in line
    script.write_text("import d2pfed\nprint(type(d2pfed.fit(...)).__name__)\n")
    assert isinstance(start(trainer())[0], SerialBackend)
    script.write_text('if __name__ == "__main__":\n    pass\n')
    assert isinstance(start(trainer())[0], Workers)


def by_hand(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def test_what_a_notebook_defines_keeps_clients_here(workers, monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert isinstance(start(trainer(by_hand))[0], Workers)
    monkeypatch.setattr(sys.modules["__main__"], "by_hand", by_hand, raising=False)
    monkeypatch.setattr(by_hand, "__module__", "__main__")
    backend, line = start(trainer(by_hand))
    assert isinstance(backend, SerialBackend)
    assert "defined in a notebook" in line


def test_what_cannot_be_sent_or_is_too_much_keeps_clients_here(workers, monkeypatch):
    backend, line = start(trainer(lambda outputs, labels: by_hand(outputs, labels) + 0))
    assert isinstance(backend, SerialBackend)
    assert "cannot be sent to another process" in line
    monkeypatch.setattr(backends, "MOST_SENT_BYTES", 100)
    assert "a function of a client's number would load its own" in start(trainer())[1]


def test_the_tensors_of_many_clients_are_sent_without_a_file_for_each():
    """Torch would send an open file per tensor, and a process may send 256 of them."""
    rows = torch.arange(1200.0).reshape(400, 1, 3)
    clients = UserClients.of([(each, torch.zeros(1).long()) for each in rows], None, torch.device("cpu"))
    made = trainer_for(user_model(nn.Linear(3, 2)), clients, LocalTraining())
    sent = bytes(ForkingPickler.dumps(TolerantTrainer(made)))
    assert 1200 * 4 < len(sent) < 400 * 1200 * 4 / 10  # each storage once, not once for every view of it
    assert b"rebuild_storage" in bytes(ForkingPickler.dumps(made)), "what torch itself would do"
    assert b"rebuild_storage" not in sent
    again = ForkingPickler.loads(sent)
    assert torch.equal(again.trainer.clients.examples(399).inputs, rows[399])


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from d2pfed.api import backends
from d2pfed.api.settings import RunOptions
from d2pfed.learning import LocalTraining, UserClients, trainer_for, user_model

if __name__ == "__main__":
    if sys.argv[1] == "as torch sends it":
        backends.TolerantTrainer = lambda trainer: trainer
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # so that workers start afresh
    clients = UserClients.of([(torch.zeros(2, 3), torch.zeros(2).long())] * 4, None, torch.device("cpu"))
    made = trainer_for(user_model(torch.nn.Linear(3, 2)), clients, LocalTraining())
    params = made.model.initial()
    options = RunOptions(backend="processes", workers=2)
    workers, line = backends.start_backend(options, made, (params, 0), seconds=1e6, is_ours=True)
    assert "start afresh" in line and len(list(workers.train(params, range(4), 0))) == 4
    maps = [Path(f"/proc/{each}/maps").read_text() for each in workers.processes()]
    print(any("/dev/shm/" in each for each in maps), *workers.processes(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not say what a process maps")
@pytest.mark.parametrize("way", ["as we send it", "as torch sends it"])
def test_a_killed_run_leaves_no_worker_and_nothing_in_shared_memory(way, tmp_path):
    """Torch shares tensors in files of /dev/shm, which a kill at the wrong moment would leave there."""
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(script), way], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    shares, *processes = done.stdout.split()
    assert shares == str(way == "as torch sends it")
    while any(Path(f"/proc/{process}").exists() for process in processes):
        time.sleep(0.05)


def test_other_devices_keep_clients_here(workers):
    made = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda"), initial=lambda: None))
    backend, line = start(made)
    assert isinstance(backend, SerialBackend)
    assert "device cuda is not shared" in line


# Clients that fail, before and after the charge

PRIVATE = {"privacy": {"epsilon": 20.0, "delta": 1e-3, "colluders": 0.0, "dropouts": 0.0}, "rounds": 2, "seed": 1}
GOOD = [(torch.ones(3, 4) * k, torch.arange(3) % 2) for k in range(1, 121)]
BAD = {
    "five columns": (torch.zeros(3, 5), torch.zeros(3).long()),
    "another type": (torch.zeros(3, 4).long(), torch.zeros(3).long()),
    "labels that are no classes": (torch.zeros(3, 4), torch.tensor([0, 1, 7])),
    "a negative label": (torch.zeros(3, 4), torch.tensor([0, 1, -7])),
    "rows without labels": (torch.zeros(3, 4), torch.zeros(2).long()),
    "arrays": (np.zeros((3, 5)), np.zeros(3, int)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_late_client_that_does_not_fit_is_refused_before_the_charge(name, tmp_path):
    clients = [*GOOD[:103], BAD[name], *GOOD[104:]]
    for held in (clients, dict(enumerate(clients))):
        with pytest.raises(ConfigError, match=r"^client 103\b"):
            d2pfed.fit(nn.Linear(4, 2), held, **PRIVATE, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


SILOS = {
    "privacy": {"unit": "record", "adjacency": "zero-out", "epsilon": 20.0, "delta": 1e-3, "batch_rate": 0.2},
    "rounds": 2,
    "seed": 1,
}


@pytest.mark.parametrize("name", BAD)
def test_a_late_silo_that_does_not_fit_is_refused_before_the_charge(name, tmp_path):
    silos = [*GOOD[:13], BAD[name], *GOOD[14:20]]
    for held in (silos, dict(enumerate(silos))):
        with pytest.raises(ConfigError, match=r"^client 13\b"):
            d2pfed.fit(nn.Linear(4, 2), held, **SILOS, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_the_trial_records_of_another_label_are_charged_for(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "try_silos", lambda *_: None)
    silos = [*GOOD[:13], BAD["a negative label"], *GOOD[14:20]]
    assert d2pfed.fit(nn.Linear(4, 2), silos, **SILOS, directory=tmp_path / "run").summary.charged == 2


def late(client):
    if client == 0:
        return GOOD[0]
    return BAD["five columns"] if client % 2 else GOOD[client]


def test_what_fails_after_the_charge_is_zero_and_counted_in_the_clear_only(tmp_path):
    clear = {"privacy": None, "rounds": 1, "cohort_size": 120}
    found = d2pfed.fit(nn.Linear(4, 2), late, population=120, **clear, directory=tmp_path / "clear")
    assert found.not_finite == 60
    private = d2pfed.fit(nn.Linear(4, 2), late, population=120, **PRIVATE, directory=tmp_path / "private")
    assert private.summary.rounds == 2
    assert private.not_finite is None
    assert [record.survivors for record in private.history] == [40, 40]


@pytest.mark.parametrize("error", [AssertionError, OSError, SystemExit, KeyError])
def test_whatever_a_charged_client_raises_tells_nothing(error, tmp_path):
    class Unreadable(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, at):
            raise error

    def held(client):
        return Unreadable() if client == 7 else GOOD[client]

    found = d2pfed.fit(nn.Linear(4, 2), held, population=120, **PRIVATE, directory=tmp_path / "run")
    assert found.summary.rounds == 2


@pytest.mark.parametrize("last", [lambda: 1 / 0, lambda: float("nan")])
def test_a_schedule_that_fails_in_a_late_round_is_refused_before_the_charge(last, tmp_path):
    training = {"lr_schedule": lambda done: 1.0 if done < 0.5 else last()}
    with pytest.raises(ConfigError, match=r"lr_schedule cannot be used|a schedule must return"):
        d2pfed.fit(nn.Linear(4, 2), GOOD, **PRIVATE, training=training, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_others_of_a_cohort_are_trained_as_without_the_one_that_fails():
    clients = UserClients.of(late, 120, torch.device("cpu"))
    made = trainer_for(user_model(nn.Linear(4, 2)), clients, LocalTraining())
    params = made.model.initial()
    one, lost, two = TolerantTrainer(made)(params, (2, 3, 4), 7)
    alone = [next(iter(made(params, (client,), 7))) for client in (2, 4)]
    assert (one == alone[0]).all()
    assert np.isnan(lost).all()
    assert (two == alone[1]).all()


def test_of_many_kinds_of_data_the_rarest_are_tried_and_the_first():
    clients = UserClients.of([*GOOD[:7], (torch.zeros(2, 3), torch.zeros(2).long())], None, torch.device("cpu"))
    assert clients_to_try(clients)[:2] == [0, 7]
    assert clients_to_try(UserClients.of(late, 120, torch.device("cpu"))) == [0]


def test_a_script_from_standard_input_keeps_clients_here(workers, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    backend, line = start(trainer())
    assert isinstance(backend, SerialBackend)
    assert "the script comes from standard input" in line
