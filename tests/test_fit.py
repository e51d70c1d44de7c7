"""`fit` on a user's own modules, data, losses and metrics."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import d2pfed
from d2pfed.api.complete_target import scope_of
from d2pfed.api.settings import EarlyStop
from d2pfed.errors import BudgetExceeded, ConfigError
from d2pfed.learning import Examples
from d2pfed.ledger import Budget, Ledger, verify
from d2pfed.plan import DEFAULT_TARGET
from d2pfed.runs import End
from d2pfed.runs.report import read_report

CLIENTS = 60
CLEAR = {"privacy": None, "rounds": 3, "cohort_size": 20, "seed": 1}
PRIVATE = {"privacy": {"epsilon": 20.0, "delta": 1e-3, "colluders": 0.0, "dropouts": 0.0}, "rounds": 3, "seed": 1}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def pairs(count: int = CLIENTS, rows: int = 8):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, rows, 4, generator=generator)
    return [(each, (each[:, 0] > 0).long()) for each in inputs]


def held_out():
    inputs = torch.randn(1500, 4, generator=torch.Generator().manual_seed(6))
    return inputs, (inputs[:, 0] > 0).long()


def linear(outputs: int = 2) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, outputs)


def vector(module: nn.Module) -> np.ndarray:
    return np.concatenate([value.detach().numpy().reshape(-1) for value in module.parameters()])


# The result of a call


def test_a_private_run_returns_module_metrics_guarantees_and_history(tmp_path):
    net = linear()
    before = vector(net)
    result = d2pfed.fit(net, pairs(), **PRIVATE, validation=held_out(), test=held_out(), lr=1.0, epochs=2)
    assert (vector(net) == before).all()
    assert not (vector(result.module) == before).all()
    assert not result.module.training
    assert result.metrics["accuracy"] > 0.8
    assert result.test_metrics == result.metrics
    assert [record.round for record in result.history] == [1, 2, 3]
    against = {str(each.observer): each for each in result.guarantees}
    assert 0 < against["server"].epsilon <= 20
    assert result.norm_quantiles == {}
    assert result.not_finite is None
    arrays = load_file(result.directory / "model.safetensors")
    assert (np.concatenate([arrays["weight"].reshape(-1), arrays["bias"]]) == vector(result.module)).all()
    assert (result.directory / "report.html").exists()
    assert result.directory.parent == (tmp_path / "runs").relative_to(tmp_path)


def test_a_result_reads_well_in_terminal_and_notebook():
    result = d2pfed.fit(linear(), pairs(), **PRIVATE, validation=held_out())
    text, page = repr(result), result._repr_html_()
    assert text.startswith("FitResult after 3 rounds, complete\n")
    for part in (
        "accuracy 0.",
        "epsilon against server: ",
        "at delta 0.001",
        "report.html",
        "anyone who knows the seed",
    ):
        assert part in text
    assert "<table>" in page
    assert "epsilon against server" in page
    assert "<script" not in replace(result, notes=("<script>",))._repr_html_()


def test_without_privacy_the_same_training_is_in_the_clear_with_norms():
    result = d2pfed.fit(linear(), pairs(), **CLEAR, validation=held_out(), lr=1.0)
    assert result.guarantees == ()
    assert not (result.directory / "ledger.sqlite").exists()
    assert list(result.norm_quantiles) == [0.1, 0.25, 0.5, 0.75, 0.9]
    assert 0 < result.norm_quantiles[0.1] <= result.norm_quantiles[0.9]
    assert "trained in the clear" in repr(result)


def test_a_modules_name_leads_to_no_other_directory(tmp_path, monkeypatch):
    module = type("../outside", (nn.Linear,), {})(4, 2)
    with pytest.raises(ConfigError, match=r"a run's name must be letters, .* got '\.\./outside-"):
        d2pfed.fit(module, pairs(), **CLEAR)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("d2pfed.api.fitting.check_name", lambda *_: None)
    (tmp_path / "runs").mkdir()
    d2pfed.fit(module, pairs(), **CLEAR)
    assert len(list(tmp_path.glob("outside-*"))) == 1


def test_a_run_is_resumed_only_when_asked_and_says_so_first():
    calls = []
    settings = CLEAR | {"directory": "runs/mine"}

    def interrupt(record, _module):
        calls.append(record.round)
        return record.round < 2

    first = d2pfed.fit(linear(), pairs(), **settings, run={"callbacks": [interrupt]})
    assert (first.summary.end, first.summary.rounds) == (End.INTERRUPTED, 2)
    assert "interrupted, resume=True goes on" in repr(first)
    with pytest.raises(ConfigError, match="runs/mine holds a run: resume=True continues it"):
        d2pfed.fit(linear(), pairs(), **settings)
    rest = d2pfed.fit(linear(), pairs(), **settings, resume=True)
    assert rest.notes[0] == "The run in runs/mine is resumed at round 3 of 3."
    assert (rest.summary.end, len(rest.history)) == (End.COMPLETE, 3)
    whole = d2pfed.fit(linear(), pairs(), **CLEAR, directory="other/yours")
    assert (vector(rest.module) == vector(whole.module)).all()
    again = d2pfed.fit(linear(), pairs(), **settings, resume=True, run={"callbacks": interrupt})
    assert (vector(again.module) == vector(rest.module)).all()
    assert calls == [1, 2]
    assert re.fullmatch(r"The run in runs/mine finished on 20.* at ..:..: nothing was trained.", again.notes[0])
    with pytest.raises(ConfigError, match=r"begun with other settings: details.local.lr was 0\.1, now 0\.2"):
        d2pfed.fit(linear(), pairs(), **settings, resume=True, lr=0.2)


# Clients and their data


class Rows(Dataset):
    def __init__(self, pair):
        self.pair = pair

    def __len__(self):
        return len(self.pair[0])

    def __getitem__(self, at):
        return self.pair[0][at], self.pair[1][at]


FORMS = {
    "pairs of arrays": lambda data: [(x.numpy().astype(np.float64), y.numpy().astype(np.int32)) for x, y in data],
    "lists of pairs": lambda data: [list(zip(x, y, strict=True)) for x, y in data],
    "data sets": lambda data: [Rows(pair) for pair in data],
    "tensor data sets": lambda data: [TensorDataset(*pair) for pair in data],
    "loaders": lambda data: [DataLoader(TensorDataset(*pair), batch_size=3) for pair in data],
    "examples of a task": lambda data: [Examples(*pair) for pair in data],
    "a mapping": lambda data: {f"client {at}": pair for at, pair in enumerate(data)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_data_trains_the_same_model(form):
    wanted = d2pfed.fit(linear(), pairs(), **CLEAR, directory="a/run")
    found = d2pfed.fit(linear(), FORMS[form](pairs()), **CLEAR, directory="b/run")
    np.testing.assert_allclose(vector(found.module), vector(wanted.module), rtol=1e-6)


def test_a_function_loads_a_client_only_when_it_is_asked():
    data, asked = pairs(), []

    def load(client):
        asked.append(client)
        return data[client]

    found = d2pfed.fit(linear(), load, population=CLIENTS, privacy=None, rounds=1, cohort_size=5, seed=1)
    assert len(found.history) == 1
    assert len(set(asked)) <= 6  # the cohort, and one for the trial


def test_a_list_of_two_examples_is_no_pair_of_inputs_and_targets():
    data = [[(x[0], y[0]), (x[1], y[1])] for x, y in pairs()]
    wanted = d2pfed.fit(linear(), [(x[:2], y[:2]) for x, y in pairs()], **CLEAR, directory="a/run")
    found = d2pfed.fit(linear(), data, **CLEAR, directory="b/run")
    np.testing.assert_allclose(vector(found.module), vector(wanted.module), rtol=1e-6)


@pytest.mark.parametrize("is_plain", [True, False])
def test_clients_of_no_and_one_example_take_part(is_plain):
    data = [(x[: k % 3], y[: k % 3]) for k, (x, y) in enumerate(pairs())]
    data[0] = ([], [])
    loss = (
        None
        if is_plain
        else (lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, reduction="sum") / len(labels))
    )
    result = d2pfed.fit(linear(), data, **CLEAR, loss=loss)
    assert result.norm_quantiles[0.1] == 0 < result.norm_quantiles[0.9]
    assert result.history[-1].survivors == 20


def test_a_client_with_infinite_data_contributes_zero():
    data = pairs()
    whole = [(x * 0, y) for x, y in data]
    broken = [(x * torch.nan, y) if k % 2 else whole[k] for k, (x, y) in enumerate(data)]
    result = d2pfed.fit(linear(), broken, privacy=None, rounds=3, cohort_size=20, seed=1)
    assert result.not_finite == CLIENTS // 2
    assert "30, counted as zero" in repr(result)
    assert np.isfinite(vector(result.module)).all()
    private = d2pfed.fit(linear(), broken, **PRIVATE)
    assert private.not_finite is None
    assert np.isfinite(vector(private.module)).all()


def test_without_the_check_one_broken_client_breaks_the_model(monkeypatch):
    """The planted bug: updates that are not finite are added up as they are."""
    monkeypatch.setattr("d2pfed.simulation.federation.finite", lambda update: update)
    broken = [(x * torch.nan, y) if k % 2 else (x, y) for k, (x, y) in enumerate(pairs())]
    with pytest.raises(ConfigError, match="update norm must be finite"):
        d2pfed.fit(linear(), broken, **CLEAR)


# Losses, metrics, hooks


def test_regression():
    data = [(x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0])[:, None]) for x, _ in pairs()]
    result = d2pfed.fit(linear(1), data, **PRIVATE, validation=data[0], loss=nn.MSELoss(), epochs=5)
    assert list(result.metrics) == ["loss"]
    assert result.metrics["loss"] < 1.0 < float((data[0][1] ** 2).mean())


def test_multi_label():
    data = [(x, (x[:, :3] > 0).float()) for x, _ in pairs()]
    share = {"share": lambda outputs, labels: ((outputs > 0) == (labels > 0)).float().mean()}
    loss = nn.BCEWithLogitsLoss()
    result = d2pfed.fit(linear(3), data, **PRIVATE, validation=data[0], loss=loss, metrics=share, lr=2.0, epochs=3)
    assert result.metrics["share"] > 0.75


def test_one_logit_with_a_loss_of_each_example():
    def loss(outputs, labels):
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.float(), reduction="none")

    right = {"accuracy": lambda outputs, labels: ((outputs[:, 0] > 0) == labels).float().mean()}
    result = d2pfed.fit(linear(1), pairs(), **CLEAR, loss=loss, metrics=right, validation=held_out(), lr=2.0)
    assert result.metrics["accuracy"] > 0.8


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_torch_s_own_cross_entropy_trains_as_the_default_does(loss):
    wanted = d2pfed.fit(linear(), pairs(), **CLEAR, directory="a/run")
    found = d2pfed.fit(linear(), pairs(), **CLEAR, loss=loss, directory="b/run")
    assert (vector(found.module) == vector(wanted.module)).all()


def test_a_mean_loss_and_the_loss_of_each_row_train_the_same_model():
    data = [(x[: 1 + k % 8], x[: 1 + k % 8, :1]) for k, (x, _) in enumerate(pairs())]
    by_mean = lambda outputs, targets: ((outputs - targets) ** 2).mean()  # noqa: E731
    settings = CLEAR | {"batch_size": 3, "lr": 0.5}
    wanted = d2pfed.fit(linear(1), data, **settings, loss=by_mean, directory="a/run")
    found = d2pfed.fit(linear(1), data, **settings, loss=nn.MSELoss(), directory="b/run")
    np.testing.assert_allclose(vector(found.module), vector(wanted.module), rtol=1e-4, atol=1e-6)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, left, right):
        return {"logits": self.one(left) + self.two(right)}


def test_several_inputs_and_dictionary_outputs():
    tuples = [((x[:, :2], x[:, 2:]), y) for x, y in pairs()]
    named = [({"left": x[:, :2], "right": x[:, 2:]}, y) for x, y in pairs()]
    loss = lambda outputs, labels: nn.functional.cross_entropy(outputs["logits"], labels)  # noqa: E731
    right = {"accuracy": lambda outputs, labels: (outputs["logits"].argmax(1) == labels).float().mean()}
    settings = CLEAR | {"validation": None, "lr": 1.0}
    torch.manual_seed(0)
    net = TwoInputs()
    by_tuple = d2pfed.fit(
        net, tuples, **settings | {"validation": tuples[0]}, loss=loss, metrics=right, directory="a/r"
    )
    by_name = d2pfed.fit(net, named, **settings, loss=loss, directory="b/r")
    by_hook = d2pfed.fit(
        net,
        pairs(),
        **settings,
        training={"forward": lambda module, x: module(x[:, :2], x[:, 2:])["logits"]},
        directory="c/r",
    )
    by_step = d2pfed.fit(
        net,
        pairs(),
        **settings,
        training={"step": lambda module, batch: loss(module(batch[0][:, :2], batch[0][:, 2:]), batch[1])},
        directory="d/r",
    )
    assert by_tuple.metrics["accuracy"] > 0.5
    for each in (by_name, by_hook, by_step):
        np.testing.assert_allclose(vector(each.module), vector(by_tuple.module), rtol=1e-4, atol=1e-6)


def test_a_step_may_take_batches_that_are_no_pairs():
    data = [{"x": x, "y": y} for x, y in pairs()]
    batches = [[{"x": row, "y": label} for row, label in zip(d["x"], d["y"], strict=True)] for d in data]
    step = lambda module, batch: nn.functional.cross_entropy(module(batch["x"]), batch["y"])  # noqa: E731
    result = d2pfed.fit(linear(), batches, **CLEAR, training={"step": step}, validation=batches[0])
    assert 0 < result.metrics["loss"] < 1


def test_metrics_see_all_rows_at_once_whatever_their_number():
    seen = []

    def count(outputs, labels):
        seen.append((len(outputs), len(labels)))
        return len(outputs)

    result = d2pfed.fit(linear(), pairs(), **CLEAR, validation=held_out(), metrics={"count": count})
    assert result.metrics["count"] == 1500
    assert set(seen) == {(1000, 1000), (1500, 1500)}  # the trial has one batch


def test_the_model_is_evaluated_every_k_rounds_and_at_the_end():
    settings = CLEAR | {"rounds": 5, "cohort_size": 10}
    result = d2pfed.fit(linear(), pairs(), **settings, validation=held_out(), run={"evaluate_every": 2})
    assert [bool(record.metrics) for record in result.history] == [False, True, False, True, True]
    assert (result.directory / "plots" / "accuracy.svg").exists()


# What is trained, and where


def test_only_what_the_patterns_name_is_trained():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    result = d2pfed.fit(net, pairs(), **CLEAR, training={"trainable": "2.*"})
    assert sorted(load_file(result.directory / "model.safetensors")) == ["2.bias", "2.weight"]
    assert (result.module[0].weight == net[0].weight).all()
    assert not (result.module[2].weight == net[2].weight).all()
    both = d2pfed.fit(net, pairs(), **CLEAR, training={"trainable": ["0.*", "2.bias"]})
    assert sorted(load_file(both.directory / "model.safetensors")) == ["0.bias", "0.weight", "2.bias"]


class LoadsByOtherNames(nn.Linear):
    def load_state_dict(self, values, *args, **options):
        return super().load_state_dict({f"inner.{name}": value for name, value in values.items()}, strict=False)


def test_the_result_is_trained_whatever_the_module_makes_of_a_state_dict():
    net = LoadsByOtherNames(4, 2)
    result = d2pfed.fit(net, pairs(), **CLEAR)
    stored = load_file(result.directory / "model.safetensors")
    assert not (result.module.weight == net.weight).all()
    assert (result.module.weight.detach().numpy() == stored["weight"]).all()


def with_a_hook():
    net = linear()
    net.weight.register_hook(torch.zeros_like)
    return net


UNFIT = {
    "lazy layers must know their shapes": lambda: nn.LazyLinear(2),
    "hooks of parameters would be lost": with_a_hook,
    "the module cannot be copied to cpu: Only Tensors": lambda: nn.utils.weight_norm(linear()),
    "the module cannot be copied to cpu: Cannot copy out of meta": lambda: nn.Linear(4, 2, device="meta"),
}


@pytest.mark.parametrize("rule", UNFIT)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_that_cannot_be_copied_whole_is_refused(rule):
    with pytest.raises(ConfigError, match=rule):
        d2pfed.fit(UNFIT[rule](), pairs(), **CLEAR)


def test_a_buffer_may_be_sparse():
    net = linear()
    net.register_buffer("graph", torch.eye(4).to_sparse())
    assert d2pfed.fit(net, pairs(), **CLEAR).summary.rounds == 3


def test_arrays_in_the_bytes_order_of_a_file_are_taken():
    clients = [(x.numpy().astype(">f4"), y.numpy().astype(">i4")) for x, y in pairs()]
    found = [d2pfed.fit(linear(), each, **CLEAR) for each in (clients, pairs())]
    assert (vector(found[0].module) == vector(found[1].module)).all()


def test_a_run_in_the_clear_that_diverges_goes_on():
    found = d2pfed.fit(linear(), [(x * 1e38, y) for x, y in pairs()], **CLEAR)
    assert found.summary.rounds == 3


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_a_directory_that_cannot_be_is_refused(path):
    with pytest.raises(ConfigError, match="run directory"):
        d2pfed.fit(linear(), pairs(), **CLEAR, directory=path)


def test_a_run_with_another_frozen_part_is_another_run():
    torch.manual_seed(1)
    one = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    two = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    d2pfed.fit(one, pairs(), **CLEAR, training={"trainable": "2.*"}, directory="runs/r")
    with pytest.raises(ConfigError, match=r"other settings: details\.fixed was"):
        d2pfed.fit(two, pairs(), **CLEAR, training={"trainable": "2.*"}, directory="runs/r", resume=True)


def test_torch_s_threads_are_as_they_were():
    before = torch.get_num_threads()
    seen = []
    d2pfed.fit(linear(), pairs(), **CLEAR, run={"callbacks": lambda *_: seen.append(torch.get_num_threads())})
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_worker_processes_train_the_same_model():
    wanted = d2pfed.fit(linear(), pairs(), **CLEAR, run={"backend": "in-process"}, directory="a/run")
    found = d2pfed.fit(linear(), pairs(), **CLEAR, run={"backend": "processes", "workers": 2}, directory="b/run")
    assert "2 worker processes" in repr(found)
    assert (vector(found.module) == vector(wanted.module)).all()


def test_what_cannot_be_sent_to_a_worker_stays_here():
    loss = lambda outputs, labels: nn.functional.cross_entropy(outputs, labels) + 0  # noqa: E731
    with pytest.raises(
        ConfigError, match="worker processes cannot be used: model, loss or clients cannot be sent"
    ):
        d2pfed.fit(linear(), pairs(), **CLEAR, loss=loss, run={"backend": "processes"})


# Callbacks, early stop, ledger, baseline


def test_callbacks_get_each_record_and_the_module_as_it_is():
    seen = []
    result = d2pfed.fit(
        linear(),
        pairs(),
        **CLEAR,
        run={"callbacks": [lambda record, module: seen.append((record.round, vector(module())))]},
    )
    assert [number for number, _ in seen] == [1, 2, 3]
    assert (seen[-1][1] == vector(result.module)).all()
    assert not (seen[0][1] == seen[1][1]).all()


STOP = EarlyStop(metric="count", patience=2)


def test_an_early_stop_ends_the_run_for_good_with_the_epsilon_of_the_plan():
    settings = PRIVATE | {"rounds": 6, "validation": held_out(), "metrics": {"count": lambda *_: 1.0}}
    first = d2pfed.fit(linear(), pairs(), **settings, early_stop=STOP, directory="runs/r", test=held_out())
    assert (first.summary.end, first.summary.rounds) == (End.STOPPED, 3)
    assert first.summary.stopped == "count has not improved for 2 evaluations"
    assert first.test_metrics is not None
    assert first.stop_guarantee is None
    whole = d2pfed.fit(linear(), pairs(), **settings, directory="runs/whole")
    assert first.guarantees == whole.guarantees
    settings |= {"early_stop": STOP, "directory": "runs/r", "test": held_out()}
    again = d2pfed.fit(linear(), pairs(), **settings, resume=True)
    assert again.summary.rounds == 3
    assert "nothing was trained" in again.notes[0]
    assert "by its declared rule" in (first.directory / "report.html").read_text()


def test_a_stop_at_a_declared_milestone_states_less_than_the_plan():
    target = d2pfed.PrivacyTarget(epsilon=20.0, delta=1e-3, against="server", cohort_size=CLIENTS, spare=0)
    settings = {"privacy": target, "rounds": 8, "seed": 1, "metrics": {"count": lambda *_: 1.0}}
    stop = replace(STOP, milestones=(4, 6))
    result = d2pfed.fit(linear(), pairs(), **settings, validation=held_out(), early_stop=stop)
    assert result.summary.rounds == 4
    whole = next(each for each in result.guarantees if each.observer == d2pfed.SERVER)
    assert result.stop_guarantee.epsilon < 0.8 * whole.epsilon
    assert "by the early stop, against server" in repr(result)


def test_phases_on_one_ledger_are_charged_until_it_is_spent():
    target = d2pfed.PrivacyTarget(
        epsilon=1.0, delta=1e-3, against="server", cohort_size=CLIENTS, spare=0, rounds=2
    )
    budget = Budget(1.75, 1e-3, d2pfed.SERVER, max_participations=2)
    Ledger.create(Path("ledger.sqlite"), budget).close()
    first = d2pfed.fit(linear(), pairs(), privacy=target, run={"ledger": "ledger.sqlite"}, directory="runs/one")
    second = d2pfed.fit(
        first.module, pairs(), privacy=target, run={"ledger": "ledger.sqlite"}, directory="runs/two"
    )
    assert second.summary.end is End.COMPLETE
    assert "tuning: 2 runs on this ledger, epsilon 1.75 together at delta 0.001 against server" in repr(second)
    assert "2 runs on this ledger, epsilon 1.75 together" in (second.directory / "report.html").read_text()
    assert len(verify(Path("ledger.sqlite")).runs) == 2
    short = replace(target, rounds=1, epsilon=0.01)  # at most one participation of the two that the ledger allows
    third = d2pfed.fit(
        second.module, pairs(), privacy=short, run={"ledger": "ledger.sqlite"}, directory="runs/short"
    )
    assert third.summary.tuning.startswith("3 runs on this ledger, epsilon 1.75 together")
    assert verify(Path("ledger.sqlite")).runs[-1].plan.max_participations == 1
    with pytest.raises(BudgetExceeded, match="run three"):
        d2pfed.fit(second.module, pairs(), privacy=target, run={"ledger": "ledger.sqlite"}, directory="runs/three")


def test_the_report_shows_a_baseline_beside_the_run():
    plain = d2pfed.fit(linear(), pairs(), **CLEAR, validation=held_out(), directory="runs/plain")
    for baseline in (plain, "runs/plain"):
        result = d2pfed.fit(
            linear(),
            pairs(),
            **PRIVATE,
            validation=held_out(),
            run={"baseline": baseline},
            directory="runs/private",
            resume=True,
        )
    report = read_report(result.directory)
    assert report.baseline.name == "plain"
    assert report.baseline.rounds == plain.history
    assert "The baseline plain ends at" in (result.directory / "report.html").read_text()
    assert "baseline" in (result.directory / "plots" / "accuracy.svg").read_text()
    assert "baseline" not in (plain.directory / "plots" / "accuracy.svg").read_text()


def test_progress_is_shown_when_asked_for_and_not_into_a_file(capsys):
    d2pfed.fit(linear(), pairs(), **CLEAR, directory="runs/a")
    assert capsys.readouterr().err == ""
    d2pfed.fit(linear(), pairs(), **CLEAR, directory="runs/b", run={"progress": True})
    shown = capsys.readouterr().err
    assert "Clients are trained in this process" in shown
    assert "3/3" in shown


# The target


def test_a_target_may_leave_out_what_fit_fills_in_and_nothing_else():
    target = d2pfed.PrivacyTarget(epsilon=1.0, against="server")
    assert target.missing == ("dimension", "population", "cohort_size", "rounds")
    with pytest.raises(ConfigError, match="a plan needs dimension, population, cohort_size, rounds"):
        d2pfed.calibrate(target)
    with pytest.raises(ConfigError, match="a plan needs rounds: state what is missing"):
        d2pfed.calibrate(replace(target, dimension=4, population=9, cohort_size=9))
    for wrong in ({"population": 0}, {"rounds": 1.5}, {"epsilon": None}, {"sampling": "twice"}):
        with pytest.raises(ConfigError):
            replace(target, **wrong)


@pytest.mark.parametrize(
    ("asked", "dimension", "compression"),
    [
        (DEFAULT_TARGET, 19_354, 2048),
        ({}, 19_354, 2048),
        ({"compression": 1024}, 19_354, 1024),
        ({"compression": "off"}, 19_354, "off"),
        (DEFAULT_TARGET, 4095, "auto"),
    ],
)
def test_the_main_job_states_its_compression(asked, dimension, compression):
    clients = {"population": 100_000, "rounds": None, "cohort_size": None}
    main = scope_of(asked, dimension=dimension, is_main_job=True, **clients)
    assert main.target.compression == compression
    other = scope_of(asked, dimension=dimension, **clients).target.compression
    assert other == (compression if asked and not isinstance(asked, d2pfed.PrivacyTarget) else "auto")


def test_the_default_target_holds_against_colluders_and_dropouts():
    scope = scope_of(DEFAULT_TARGET, dimension=100, population=2000, rounds=None, cohort_size=None)
    target = scope.target
    assert (str(target.against), target.sampling, target.epsilon) == ("server", "once", 1.0)
    assert (target.dropouts, target.colluders) == (0.1, 0.1)
    assert target.missing == ()


@pytest.mark.parametrize(("population", "rounds"), [(10_000, range(20, 31)), (100_000, range(100, 101))])
def test_rounds_and_cohorts_follow_population_dimension_and_epsilon(population, rounds):
    scope = scope_of({}, dimension=8000, population=population, rounds=None, cohort_size=None)
    assert scope.rounds in rounds
    assert scope.target.max_attempts == scope.rounds + -(-scope.rounds // 10)
    assert f"{scope.rounds} rounds with cohorts of {scope.sampling.cohort_size:,} clients" in scope.notes[0]
    louder = scope_of({"epsilon": 0.5}, dimension=8000, population=population, rounds=None, cohort_size=None)
    assert louder.rounds <= scope.rounds


def test_a_population_too_small_for_little_noise_is_told_so():
    scope = scope_of({}, dimension=8000, population=60, rounds=None, cohort_size=None)
    assert "even with 60 clients it is above 2" in scope.notes[0]


@pytest.mark.parametrize(
    ("given", "found"),
    [((5, None), (5, 16)), ((None, 30), (2, 30)), ((4, 25), (4, 25)), ((None, 100), (1, 100))],
)
def test_what_is_given_of_rounds_and_cohort_stays(given, found):
    scope = scope_of({"colluders": 0.0}, dimension=10, population=100, rounds=given[0], cohort_size=given[1])
    assert (scope.rounds, scope.sampling.cohort_size) == found


def test_few_clients_at_the_default_delta_are_told():
    scope = scope_of({"colluders": 0.0}, dimension=10, population=20, rounds=1, cohort_size=20)
    assert "population^-1.1 = 0.037" in scope.notes[-1]
    stated = scope_of({"colluders": 0.0, "delta": 1e-3}, dimension=10, population=20, rounds=1, cohort_size=20)
    assert stated.notes == ()


def test_settings_on_disk_hold_nothing_of_the_data():
    result = d2pfed.fit(linear(), pairs(), **CLEAR)
    settings = json.loads((result.directory / "settings.json").read_text())
    assert settings["data"] == "60 clients"


# What is refused, each in one line

BROKEN_LATE = [*pairs(59), (torch.zeros(3, 4), torch.tensor([0, 1, 7]))]
BAD = [
    ({"module": "net"}, "module must be a torch.nn.Module, got str"),
    ({"clients": 5}, "clients must be a sequence, a mapping or a function of data sets, got int"),
    ({"clients": []}, "clients must be at least 1, got 0"),
    (
        {"clients": [([], [])] * 9, "cohort_size": 2, "rounds": 1},
        "some client must hold data, the first 9 hold none",
    ),
    ({"clients": lambda _: None}, "population must be given where clients is a function"),
    ({"clients": [3] * 60}, "client 0 must hold a pair of tensors or arrays, a torch Dataset .*, got int"),
    ({"clients": [(torch.zeros(3, 4), torch.zeros(2).long())] * 60}, "client 0: .* as many rows"),
    ({"clients": [(torch.zeros(3, 5), torch.zeros(3).long())] * 60}, "client 0 cannot be trained: mat1 and mat2"),
    ({"clients": [(np.array(["a"]), np.array([1]))] * 60}, "client 0: arrays must hold numbers"),
    ({"clients": lambda number: 1 // number, "population": 60}, "client 0 cannot be loaded: ZeroDivisionError: "),
    (
        {"clients": (torch.zeros(60, 4), torch.zeros(60).long())},
        r"one data set per client, got one pair of arrays: split it, as in \[\(x\[i::100\]",
    ),
    ({"clients": torch.zeros(60, 3, 4)}, "a function of data sets, got Tensor: split it"),
    ({"clients": BROKEN_LATE}, "client 59 cannot be trained: .* out of bounds"),
    ({"clients": BROKEN_LATE[:1], "privacy": {}}, "one client cannot hide among others: split the data"),
    (
        {"privacy": {"colluders": 0.0}, "rounds": 61, "cohort_size": None},
        "rounds must be at most the population 60",
    ),
    ({"population": 7}, "population is the number of clients, 60, got 7"),
    (
        {"training": {"optimizer": "adagrad"}},
        "optimizer must be one of sgd, adam, adamw, rmsprop or a function, got",
    ),
    ({"run": {"backend": "threads"}}, "backend must be one of auto, processes, in-process, ray, got 'threads'"),
    ({"training": {"device": "tpu"}}, "device must be one of cpu, cuda, mps, got 'tpu'"),
    ({"training": {"device": "mps"}}, "device mps is not available on this machine"),
    (
        {"training": {"trainable": "head.*"}},
        "trainable must name parameters that require gradients, 'head.\\*' names none of weight, bias",
    ),
    ({"training": {"trainable": 3}}, "trainable must be a pattern or a list of patterns, got 3"),
    ({"loss": "mse"}, "loss must be a function, got str"),
    ({"loss": abs, "training": {"step": abs}}, "step takes the place of the loss"),
    ({"metrics": [abs]}, "metrics must be a dictionary of names and functions, got list"),
    ({"metrics": {"loss": abs}}, "metrics has the name loss"),
    ({"metrics": {"m": lambda *_: "high"}}, "the metric m must return a number, got str"),
    ({"validation": 3}, "validation must hold a pair"),
    ({"lr": float("nan")}, "lr must be positive"),
    ({"lr": "0.1"}, "lr must be a number"),
    ({"rounds": 0}, "rounds must be in"),
    ({"rounds": 2.0}, "rounds must be a whole number or None, got 2.0"),
    ({"rounds": None}, "rounds and cohort_size must be given for training in the clear"),
    ({"cohort_size": 61}, "cohort_size must be at most the population 60, got 61"),
    ({"privacy": 1.0}, "privacy must be a PrivacyTarget, a dictionary of its fields, or None, got float"),
    (
        {"privacy": {"epsilom": 1}},
        r"no field 'epsilom' \(did you mean epsilon\?\); its fields are dimension, population",
    ),
    ({"privacy": {"sampling": "twice"}}, "sampling must be one of fixed, once, none, got 'twice'"),
    ({"privacy": {"against": "nobody"}}, "against must be released, server, client, alone"),
    ({"privacy": {"population": 3}}, "the privacy target has population 3, and fit has 60"),
    ({"privacy": {"rounds": 9}}, "the privacy target has rounds 9, and fit is given 3"),
    ({"privacy": {"sampling": "fixed"}, "rounds": None}, "unless sampling is once"),
    ({"early_stop": 3, "validation": held_out()}, "early_stop must be an EarlyStop or None, got int"),
    ({"early_stop": EarlyStop()}, "early_stop needs validation data, got none"),
    ({"run": {"callbacks": 3}}, "callbacks must be functions, got int"),
    ({"callbacks": 3}, r"fit has no parameter callbacks: it is now run=\{'callbacks': \.\.\.\}"),
    ({"resume": 1}, "resume must be True or False, got 1"),
    ({"run": {"name": ".."}}, "a run's name must be letters, digits and underscores"),
    ({"run": {"name": "a"}, "directory": "b"}, "give name or directory, got a and b"),
    ({"seed": "x"}, "seed must be a whole number, got 'x'"),
    (
        {"seed": 3, "run": {"ledger": "x"}, "privacy": {"colluders": 0.0}},
        "takes its noise from the system, got seed 3",
    ),
    ({"run": {"evaluate_every": 0}}, "evaluate_every must be in"),
    ({"run": {"workers": 0}}, "workers must be in"),
    ({"run": {"baseline": 3}}, "baseline must be a FitResult or a run's directory, got int"),
    ({"directory": 3}, "directory must be a path, got int"),
    ({"run": {"ledger": 3}}, "ledger must be of the type .*Path or its name or None, got 3"),
    (
        {"run": {"leger": "x"}},
        r"run has no field 'leger' \(did you mean ledger\?\); its fields are name, ledger, ",
    ),
    ({"run": 3}, "run must be a RunOptions, a dictionary of its fields, or None, got int"),
    ({"server": [1]}, "server must be a ServerOptimizer, a dictionary of its fields, or None, got list"),
    ({"server_lr": 2.0}, r"fit has no parameter server_lr: it is now server=\{'lr': \.\.\.\}"),
    ({"optimizer": "adam"}, r"fit has no parameter optimizer: it is now training=\{'optimizer': \.\.\.\}"),
    ({"ledger": "x"}, r"fit has no parameter ledger: it is now run=\{'ledger': \.\.\.\}"),
    ({"epoch": 3}, r"fit has no parameter epoch \(did you mean epochs\?\)"),
    ({"training": {"weights": [1.0]}}, "weights and max_weight go together, got only weights"),
    ({"clients": "digitz"}, "task must be one of infimnist, digits"),
    ({"run": {"partition": "iid"}}, "partition and data are those of a named task"),
    ({"run": {"ledger": "nowhere"}, "seed": None, "privacy": {"colluders": 0.0}}, "there is no ledger at nowhere"),
]


@pytest.mark.parametrize(("wrong", "rule"), BAD, ids=[f"{at}-{next(iter(b[0]))}" for at, b in enumerate(BAD)])
def test_bad_input_is_refused_in_one_line(wrong, rule):
    given = {"module": linear(), "clients": pairs(), **CLEAR} | wrong
    if "validation" not in wrong and "metrics" in wrong:
        given["validation"] = held_out()
    with pytest.raises(ConfigError, match=rule) as refusal:
        d2pfed.fit(given.pop("module"), given.pop("clients"), **given)
    assert "\n" not in str(refusal.value)


def test_a_module_that_is_not_finite_is_refused():
    net = linear()
    net.weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="the module's parameters must be finite, weight is not"):
        d2pfed.fit(net, pairs(), **CLEAR)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"mode": "best"}, "mode must be one of min, max, got 'best'"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"least_gain": -1.0}, "least_gain must be finite"),
        ({"milestones": (3, 2)}, "milestones must be increasing"),
        ({"milestones": (0, 2)}, "milestones must be increasing"),
    ],
)
def test_a_stop_rule_that_makes_no_sense_is_refused(wrong, rule):
    with pytest.raises(ConfigError, match=rule):
        EarlyStop(**wrong)


def test_a_stop_rule_names_the_metrics_that_there_are():
    rule = EarlyStop(metric="loos")
    with pytest.raises(ConfigError, match="early_stop watches loos, metrics are loss, accuracy"):
        d2pfed.fit(linear(), pairs(), **CLEAR, validation=held_out(), early_stop=rule, directory="r")
    assert not Path("r").exists()


@pytest.mark.parametrize("owner", ["validation", "test"])
def test_data_that_cannot_be_measured_are_refused_before_the_charge(owner):
    wrong = torch.randn(8, 5), torch.zeros(8, dtype=torch.long)
    with pytest.raises(ConfigError, match=f"the {owner} data cannot be measured"):
        d2pfed.fit(linear(), pairs(), **PRIVATE, **{owner: wrong}, directory="r")
    assert not Path("r").exists()


class Stream(IterableDataset):
    """Examples of five columns, read from one source."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return self.source if isinstance(self.source, Iterator) else iter(self.source)


WIDE = [(torch.zeros(5), 0)] * 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"test": lambda: (torch.zeros(8, 5), torch.zeros(8).long())},
        {"test": lambda: iter(WIDE)},
        {"test": iter(WIDE)},
        {"validation": iter(WIDE)},
        {"validation": held_out},  # a function opens test data only
        {"validation": Stream(WIDE)},
        {"test": DataLoader(Stream(WIDE), batch_size=4)},
    ],
)
def test_held_out_data_that_are_yet_to_be_read_are_tried_before_the_charge(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} (data cannot be measured|must hold a pair)"):
        d2pfed.fit(linear(), pairs(), **PRIVATE, **wrong, directory="r")
    assert not Path("r").exists()


def test_data_that_can_be_read_only_once_are_left_for_the_end():
    source = iter([(torch.zeros(4), 0)] * 8)
    found = d2pfed.fit(linear(), pairs(), **PRIVATE, test=DataLoader(Stream(source), batch_size=4), directory="r")
    assert found.test_metrics["loss"] > 0
    assert next(source, None) is None


def test_an_unknown_optimizer_is_refused_with_those_that_have_a_name():
    with pytest.raises(ConfigError, match="one of sgd, adam, adamw, rmsprop or a function, got 'none'"):
        d2pfed.fit(linear(), pairs(), **CLEAR, training={"optimizer": "none"})
