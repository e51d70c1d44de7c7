"""One front door: what `fit` can do, `d2pfed train` can, over the same runs, which every audit takes."""

import inspect
import json
from dataclasses import fields

import pytest
import torch
import typer

import d2pfed
from d2pfed.cli.train import app
from d2pfed.plan import PrivacyTarget
from d2pfed.runs import End
from d2pfed.simulation import SerialBackend, process_backend
from support.commands import run_command

TINY = "train --task digits --model logistic --population 60 --cohort-size 20 --rounds 3 --epsilon 50 --seed 3"

MINE = """
import torch
from torch import nn

def clients():
    inputs = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(5))
    return [(each, (each[:, 0] > 0).long()) for each in inputs]

def net():
    torch.manual_seed(3)
    return nn.Linear(4, 2)

seen = []

def callback():
    return lambda record, module: seen.append((record.round, type(module()).__name__))
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command line in a directory of its own with a module `mine`; return status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return lambda line: run_command(line.split(), monkeypatch, capsys)


def mine():
    import mine as module  # noqa: PLC0415 - of the fixture's directory

    return module


def test_fit_and_train_have_the_same_options():
    objects = {"training": d2pfed.Training, "run": d2pfed.RunOptions, "privacy": PrivacyTarget}
    prefixed = {"server": d2pfed.ServerOptimizer, "early_stop": d2pfed.EarlyStop}
    renamed = {"module": "model", "clients": "task"}
    own = {name for name in inspect.signature(d2pfed.fit).parameters if name != "unknown"}
    of_fit = {renamed.get(name, name) for name in own - objects.keys() - prefixed.keys()}
    of_fit |= {each.name for kind in objects.values() for each in fields(kind)}
    of_fit |= {
        f"{name.removeprefix('early_')}_{each.name}" for name, kind in prefixed.items() for each in fields(kind)
    }
    of_train = {each.name for each in typer.main.get_command(app).params}
    # A task and a model bring these along; fit fills in the rest, and shows progress as it is told.
    only_fit = {"loss", "metrics", "forward", "step", "groups", "validation", "test"}
    only_fit |= {"collate", "example_weights", "personal"}
    only_fit |= {"dimension", "draws", "consistency", "attempts_per_round", "progress"}
    only_fit |= {"directory", "resume", "callbacks"}  # the same command goes on, and a callback is named
    # `dropouts` are those planned for, `lost` those simulated; `clear` is privacy=None.
    only_train = {"config", "json", "lost", "clear", "callback"}
    assert of_fit - of_train == only_fit
    assert of_train - of_fit == only_train


def test_no_function_of_the_front_door_has_more_than_twenty_parameters():
    assert len([name for name in inspect.signature(d2pfed.fit).parameters if name != "unknown"]) <= 20


def test_both_doors_lead_to_the_same_run(run, tmp_path):
    earlier = "--rotation hadamard --compression off --longest-mean 1"
    status, out, err = run(f"{TINY} {earlier} --backend in-process --json")
    assert status == 0, err
    directory = tmp_path / json.loads(out)["directory"]
    changes = {"epsilon": 50.0, "against": "server", "sampling": "once", "dropouts": 0.1, "colluders": 0.1}
    changes |= {"rotation": "hadamard", "compression": "off", "longest_mean": 1.0}
    result = d2pfed.fit(
        "logistic",
        "digits",
        privacy=changes,
        population=60,
        cohort_size=20,
        rounds=3,
        lr=0.2,
        epochs=5,
        server={"lr": 2.0, "momentum": 0.7, "averaging": 0.8},
        seed=3,
        directory=tmp_path / "other" / "of-another-name",
    )
    for file in ("settings.json", "plan.json", "model.safetensors"):
        assert (directory / file).read_bytes() == (result.directory / file).read_bytes(), file


def test_train_has_weights_early_stop_callbacks_and_a_baseline(run, tmp_path):
    status, _, err = run(f"{TINY} --backend in-process --clear --name plain")
    assert status == 0, err
    assert not (tmp_path / "runs" / "plain" / "ledger.sqlite").exists()
    status, out, err = run(
        f"{TINY} --backend in-process --weights examples --max-weight 30 --stop-patience 1 --stop-metric accuracy"
        " --stop-least-gain 1 --callback mine:callback --baseline runs/plain --evaluate-every 1 --name private"
        " --server-second-moment 0.9 --server-second-rule yogi"
    )
    assert status == 0, err
    assert "Stopped by its declared rule: accuracy has not improved" in out
    assert mine().seen[0][0] == 1
    assert "The baseline plain ends at" in (tmp_path / "runs" / "private" / "report.html").read_text()
    summary = json.loads((tmp_path / "runs" / "private" / "summary.json").read_text())
    assert summary["end"] == End.STOPPED


def test_audits_take_a_run_of_fit(run, monkeypatch):
    # Workers take seconds to start, and test_audit.py has them.
    monkeypatch.setattr(process_backend, "start_workers", lambda trainer, **_options: (SerialBackend(trainer), ""))
    target = {"epsilon": 20.0, "delta": 1e-3, "colluders": 0.0, "dropouts": 0.0}
    for name in ("audited", "bare"):
        d2pfed.fit(mine().net(), mine().clients(), privacy=target, rounds=2, seed=1, directory=f"runs/{name}")
    status, _, err = run("audit training runs/audited")
    assert (
        status,
        "the run used a user's own clients: name the function that returns them with --task" in err,
    ) == (
        2,
        True,
    )
    again = "--task mine:clients --model mine:net"
    status, out, err = run(f"audit training runs/audited {again} --canaries 10 --json")
    assert status == 0, err
    assert json.loads(out)["canaries"] == 10
    status, out, err = run(f"audit membership runs/bare {again} --json")
    assert status == 0, err
    assert 0 <= json.loads(out)["area"] <= 1


def test_an_audit_of_another_module_or_other_clients_is_refused(run):
    target = {"epsilon": 20.0, "delta": 1e-3, "colluders": 0.0, "dropouts": 0.0}
    d2pfed.fit(mine().net(), mine().clients(), privacy=target, rounds=2, seed=1, directory="runs/a")
    mine().fewer = lambda: mine().clients()[:30]
    mine().other = lambda: torch.nn.Linear(4, 3)
    assert "used other data: 40 clients" in run("audit membership runs/a --task mine:fewer --model mine:net")[2]
    assert (
        "is not the one that the run trained"
        in run("audit membership runs/a --task mine:clients --model mine:other")[2]
    )


def test_fit_takes_yogi_losses_and_every_message(tmp_path):
    clients = [(x, (x[:, 0] > 0).long()) for x in torch.randn(40, 6, 3)]
    result = d2pfed.fit(
        torch.nn.Linear(3, 2),
        clients,
        privacy={"epsilon": 20.0, "delta": 1e-3, "colluders": 0.0},
        rounds=2,
        server={"second_moment": 0.9, "second_rule": "yogi"},
        run={"fidelity": "protocol", "stop_is_blind": True},
        directory=tmp_path / "run",
    )
    assert result.summary.end is End.COMPLETE
    stored = (tmp_path / "run" / "settings.json").read_text()
    assert '"yogi"' in stored
    assert '"protocol"' in stored


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fit_trains_on_ray(tmp_path):
    pytest.importorskip("ray")
    clients = [(x, (x[:, 0] > 0).long()) for x in torch.randn(20, 6, 3)]
    given = {"privacy": None, "rounds": 2, "cohort_size": 10, "seed": 1}
    there = d2pfed.fit(
        torch.nn.Linear(3, 2), clients, **given, run={"backend": "ray", "workers": 1}, directory=tmp_path / "ray"
    )
    assert "workers of Ray" in there.notes[-1]
