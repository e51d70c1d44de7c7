"""`fit` never returns an old model for new data: what is resumed, and what one seed fixes."""

import argparse
import functools
import importlib
import json
import logging
import operator
import re
from decimal import Decimal
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import d2pfed
from d2pfed.api.workload import keep_fingerprint
from d2pfed.errors import ConfigError
from d2pfed.learning.fingerprint import MOST_VALUES, fingerprint

CLEAR = {"privacy": None, "rounds": 2, "cohort_size": 5, "seed": 1}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pairs(shift: float = 0.0):
    inputs = torch.randn(20, 6, 3, generator=torch.Generator().manual_seed(5)) + shift
    return [(each, (each[:, 0] > 0).long()) for each in inputs]


def linear(outputs: int = 2) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, outputs)


def vector(result) -> np.ndarray:
    return np.concatenate([each.detach().numpy().reshape(-1) for each in result.module.parameters()])


def changed(before: object, after: object) -> bool:
    return fingerprint({"part": before}, []) != fingerprint({"part": after}, [])


def test_a_run_whose_fingerprint_is_gone_is_not_resumed():
    directory = d2pfed.fit(linear(), pairs(), **CLEAR, directory="mine").directory
    (directory / "fingerprint.json").unlink()
    with pytest.raises(ConfigError, match=r"fingerprint.json is missing"):
        d2pfed.fit(linear(), pairs(2.0), **CLEAR, directory="mine", resume=True)


def test_a_call_without_a_directory_always_trains_in_a_new_one():
    first = d2pfed.fit(linear(), pairs(), **CLEAR)
    other = d2pfed.fit(linear(), pairs(2.0), **CLEAR)
    again = d2pfed.fit(linear(), pairs(), **CLEAR)
    assert len({each.directory for each in (first, other, again)}) == 3
    assert not (vector(first) == vector(other)).all()
    assert (vector(first) == vector(again)).all()
    named = [d2pfed.fit(linear(), pairs(), **CLEAR, run={"name": "mine"}) for _ in range(2)]
    assert [str(each.directory) for each in named] == ["runs/mine", "runs/mine-2"]
    assert "<h1>mine</h1>" in (named[0].directory / "report.html").read_text()


def test_resume_begins_a_run_where_there_is_none_and_finds_it_by_its_name():
    first = d2pfed.fit(linear(), pairs(), **CLEAR, resume=True, run={"name": "mine"})
    assert not any("The run in" in note for note in first.notes)
    again = d2pfed.fit(linear(), pairs(), **CLEAR, resume=True, run={"name": "mine"})
    assert again.directory == first.directory
    assert "nothing was trained" in again.notes[0]


def flipped():
    return [(x, 1 - y) for x, y in pairs()]


def opposite(outputs, labels):
    return -nn.functional.cross_entropy(outputs, labels)


OTHERS = {
    "client 0, client 1": {"clients": pairs(1.0)},
    "client 0": {"clients": flipped()},
    "client 17": {"clients": [(x, y) if k != 17 else (x[:5], y[:5]) for k, (x, y) in enumerate(pairs())]},
    "validation": {"validation": pairs(1.0)[0]},
    "metrics": {"metrics": {"m": lambda *_: 2.0}},
    "forward": {"training": {"forward": lambda module, x: -module(x)}},
}


@pytest.mark.parametrize("named", OTHERS)
def test_a_resumed_run_refuses_other_parts_and_names_them(named):
    usual = {"validation": pairs()[0], "metrics": {"m": lambda *_: 1.0}}
    usual |= {"training": {"forward": lambda module, x: module(x)}, "directory": "run"}
    d2pfed.fit(linear(), pairs(), **CLEAR | usual)
    given = {"clients": pairs()} | usual | OTHERS[named]
    with pytest.raises(ConfigError, match=f"the run in run was begun with other parts: {named}"):
        d2pfed.fit(linear(), given.pop("clients"), **CLEAR | given, resume=True)
    assert "nothing was trained" in d2pfed.fit(linear(), pairs(), **CLEAR | usual, resume=True).notes[0]


def test_without_the_fingerprint_flipped_labels_get_the_old_model(monkeypatch):
    """The planted bug: what the run was begun with is not looked at."""
    first = d2pfed.fit(linear(), pairs(), **CLEAR, directory="run")
    monkeypatch.setattr("d2pfed.api.fitting.keep_fingerprint", lambda *_, **__: None)
    assert (vector(first) == vector(d2pfed.fit(linear(), flipped(), **CLEAR, directory="run", resume=True))).all()


def test_clients_of_a_function_are_told_apart_by_the_first_one():
    given = CLEAR | {"population": 20, "directory": "run"}
    d2pfed.fit(linear(), lambda k: pairs()[k], **given)
    with pytest.raises(ConfigError, match="other parts: client 0"):
        d2pfed.fit(linear(), lambda k: pairs(1.0)[k], **given, resume=True)


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, at):
        return self.rows[at]


def scaled(factor):
    return lambda outputs, labels: factor * (outputs - labels) ** 2


class Focal:
    def __init__(self, gamma):
        self.gamma = gamma

    def __call__(self, outputs, labels):
        return (outputs - labels) ** self.gamma


def by_default(outputs, labels, power=2):
    return (outputs - labels) ** power


class Half:
    @property
    def factor(self):
        return 0.5


class Third:
    @property
    def factor(self):
        return 1 / 3


Third.__qualname__ = Half.__qualname__


def sampled(*rows):
    return DataLoader(TensorDataset(X), batch_size=2, sampler=SubsetRandomSampler(rows))


X = torch.arange(12.0).reshape(4, 3)
DIFFERENT = {
    "two lambdas": (lambda a, b: a - b, lambda a, b: b - a),
    "a constant": (lambda a, b: a - 2 * b, lambda a, b: a - 3 * b),
    "a closure": (scaled(1.0), scaled(2.0)),
    "a partial": (functools.partial(by_default, power=2), functools.partial(by_default, power=3)),
    "a loss object": (nn.HuberLoss(delta=1.0), nn.HuberLoss(delta=100.0)),
    "weights of a loss": (nn.CrossEntropyLoss(torch.ones(2)), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))),
    "an object of one's own": (Focal(1), Focal(2)),
    "a bound method": (Focal(1).__call__, Focal(2).__call__),
    "one value": (X, X.clone().index_fill_(0, torch.tensor([2]), 5.0)),
    "a type": (X, X.double()),
    "a shape": (X, X.reshape(3, 4)),
    "large arrays": (torch.zeros(10, MOST_VALUES), torch.ones(10, MOST_VALUES)),
    "arrays": (np.arange(3), np.arange(3)[::-1]),
    "data sets": (Rows(X), Rows(X + 1)),
    "tensor data sets": (TensorDataset(X), TensorDataset(X + 1)),
    "loaders": (DataLoader(TensorDataset(X)), DataLoader(TensorDataset(X + 1))),
    "samplers": (sampled(0, 1), sampled(2, 3)),
    "batches of a sampler": (DataLoader(X, batch_sampler=[[0]]), DataLoader(X, batch_sampler=[[1]])),
    "a property": (Half(), Third()),
    "arguments of a program": (argparse.Namespace(delta=1.0), argparse.Namespace(delta=2.0)),
    "a pattern": (re.compile("a"), re.compile("b")),
    "a decimal number": (Decimal(1), Decimal(2)),
    "what is taken": (operator.itemgetter(0), operator.itemgetter(1)),
    "a method of a dictionary": ({0: 1}.get, {0: 2}.get),
    "a sparse tensor": (X.to_sparse(), (X + 1).to_sparse()),
    "bfloat16": (X.bfloat16(), (X + 1).bfloat16()),
    "objects in an array": (np.array(["a", None], object), np.array(["b", None], object)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_fingerprint_tells_parts_apart_by_what_they_do(name):
    before, after = DIFFERENT[name]
    assert changed(before, after)
    assert not changed(before, before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_equal_parts_that_were_made_twice_have_one_fingerprint():
    assert not changed(scaled(2.0), scaled(2.0))
    assert not changed([(X, X)] * 3, [(X.clone(), X.clone()) for _ in range(3)])
    assert not changed(nn.HuberLoss(delta=3.0), nn.HuberLoss(delta=3.0))
    logger = logging.getLogger("of a test")  # which changes from call to call
    before = fingerprint({"part": [logger, Lock()]}, [])
    logger.setLevel("DEBUG")
    assert fingerprint({"part": [logger, Lock()]}, []) == before
    assert fingerprint({"module": linear()}, []) == fingerprint({"module": nn.Linear(3, 2)}, [])
    assert not changed(hooked(), hooked())
    assert not changed(torch.compile(linear()), torch.compile(linear()))
    assert fingerprint({"module": linear()}, []) != fingerprint({"module": nn.Linear(3, 3)}, [])
    cyclic: list = [1]
    cyclic.append(cyclic)
    assert not changed(cyclic, cyclic)


def hooked():
    net = linear()
    net.register_forward_hook(opposite)
    return net


def test_a_function_of_a_module_of_one_s_own_counts_by_its_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_losses.py").write_text("DELTA = 1\ndef huber(a, b): return a - b * DELTA\n")
    my_losses = importlib.import_module("my_losses")

    def loss(outputs, labels):
        return my_losses.huber(outputs, labels)

    before = fingerprint({"loss": loss}, [])
    assert fingerprint({"loss": loss}, []) == before
    monkeypatch.setattr(my_losses, "DELTA", 2)
    after = fingerprint({"loss": loss}, [])
    monkeypatch.setattr(my_losses, "huber", opposite)
    assert len({each["loss"] for each in (before, after, fingerprint({"loss": loss}, []))}) == 3


def test_an_object_that_raises_when_looked_into_counts_by_its_class():
    class Broken:
        def __getattr__(self, name):
            raise RuntimeError(name)

    assert not changed(Broken(), Broken())
    assert changed(Broken(), X)


def test_the_file_has_no_digest_that_another_run_would_have(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        keep_fingerprint(tmp_path / name, {"loss": "00"}, is_trained=False)
    one, two = (json.loads((tmp_path / name / "fingerprint.json").read_text()) for name in ("a", "b"))
    assert one["loss"] != two["loss"]
    assert (tmp_path / "a" / "fingerprint.json").stat().st_mode & 0o077 == 0
    keep_fingerprint(tmp_path / "a", {"loss": "00"}, is_trained=True)
    with pytest.raises(ConfigError, match="other parts: loss, step;"):
        keep_fingerprint(tmp_path / "a", {"loss": "01", "step": "00"}, is_trained=True)


# Seeds


def cohorts_of(**given):
    asked: list[int] = []
    rows = pairs()

    def load(client):
        asked.append(client)
        return rows[client]

    result = d2pfed.fit(linear(), load, population=20, **CLEAR | given)
    return asked, result


def test_one_seed_gives_one_run_whatever_its_directory_is_called():
    private = {
        "privacy": {"epsilon": 20.0, "delta": 1e-3, "colluders": 0.0, "dropouts": 0.0},
        "rounds": 2,
        "seed": 1,
    }
    one, two = (d2pfed.fit(linear(), pairs(), **private, directory=name) for name in ("a", "b"))
    assert (vector(one) == vector(two)).all()
    other = d2pfed.fit(linear(), pairs(), **private | {"seed": 2}, directory="c")
    assert not (vector(one) == vector(other)).all()


class Drawn(Dataset):
    def __getitem__(self, at):
        return torch.randn(3), at % 2

    def __len__(self):
        return 6


def test_one_seed_fixes_loaders_that_shuffle_and_data_that_are_drawn():
    shuffled = [DataLoader(TensorDataset(*pair), batch_size=2, shuffle=True) for pair in pairs()]
    before = torch.get_rng_state()
    for clients in (shuffled, [Drawn()] * 20):
        one, two = (d2pfed.fit(net, clients, **CLEAR | {"lr": 1.0}) for net in [linear()] * 2)
        assert (vector(one) == vector(two)).all()
    torch.set_rng_state(before)


def test_two_settings_with_one_seed_share_their_cohorts():
    slow, _ = cohorts_of(lr=0.1)
    fast, _ = cohorts_of(lr=0.5)
    assert slow == fast
    assert slow != cohorts_of(seed=2)[0]


# What a run leaves behind


def test_budgets_take_an_observers_name_and_refuse_other_types(tmp_path):
    with d2pfed.Ledger.create(str(tmp_path / "a.sqlite"), d2pfed.Budget(1.0, 1e-5, "server")) as made:
        assert made.budget.observer == d2pfed.SERVER
    d2pfed.Ledger.open(str(tmp_path / "a.sqlite")).close()
    for wrong in (("server", 1e-5), (1.0, "x"), (1.0, 1e-5, 3), (1.0, 1e-5, d2pfed.SERVER, 1.5)):
        with pytest.raises(ConfigError, match=r"must be of the type"):
            d2pfed.Budget(*wrong)
    with pytest.raises(ConfigError, match="budget must be of the type Budget, got"):
        d2pfed.Ledger.create(tmp_path / "b.sqlite", "server")


def test_files_of_a_run_are_json_whatever_its_metrics_and_drafts_go():
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    odd = {"a": lambda *_: float("nan"), "b": lambda *_: float("inf")}
    given = CLEAR | {"validation": pairs()[0], "metrics": odd, "directory": "run"}
    d2pfed.fit(linear(), pairs(), **given)
    stored = json.loads(Path("run/summary.json").read_text(), parse_constant=refuse)
    assert (stored["metrics"]["a"], stored["metrics"]["b"]) == (None, "inf")
    for name in (".summary.json.4711", ".hidden"):
        Path("run", name).touch()
    again = d2pfed.fit(linear(), pairs(), **given, resume=True)
    assert np.isnan(again.history[0].metrics["a"])
    assert again.history[0].metrics["b"] == float("inf")
    assert sorted(path.name for path in again.directory.glob(".*")) == [".hidden"]


def test_a_logger_has_every_line_and_warns_of_a_run_that_is_resumed(caplog):
    with caplog.at_level(logging.INFO, "d2pfed"):
        d2pfed.fit(linear(), pairs(), **CLEAR, directory="run")
        d2pfed.fit(linear(), pairs(), **CLEAR, directory="run", resume=True)
    texts = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("round 2 of 2: ") for text in texts)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].endswith("nothing was trained.")


def test_the_headline_is_the_epsilon_that_was_asked_for():
    clients = pairs() * 5
    asked = {"epsilon": 8.0, "delta": 1e-3, "colluders": 0.1, "dropouts": 0.0}
    result = d2pfed.fit(linear(), clients, privacy=asked, rounds=1, seed=1, run={"name": "mine"})
    against = result.plan_summary.against
    found = next(each.epsilon for each in result.guarantees if each.observer == against)
    assert str(against).startswith("colluding(")
    assert 7.9 < found <= 8
    assert repr(result).splitlines()[1].startswith(f"  epsilon against {against}: ")
    assert f"against {against}, delta 0.001; 8 was asked for" in (result.directory / "report.html").read_text()
