"""Private evaluation over Flower: the clients' own functions, one round, weighted means, charged on both sides."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from d2pfed.accounting import SERVER, Sampling, Unit
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.evaluation import evaluation_strategy
from d2pfed.deploy.layout import MOST_LOCAL_BYTES
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import BudgetExceeded, ConfigError, TooFewClients
from d2pfed.flower.client import PrivateRecords, private
from d2pfed.flower.statistics import private_evaluate, private_metrics
from d2pfed.ledger import RowKind, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.secagg.trust import Consistency
from support.enrolled_clients import directory_of, enrol
from support.local_grid import make_grid, make_strategy

CLIENTS = 5
SECRET = 0.123456
TARGET = PrivacyTarget(
    dimension=16,
    population=CLIENTS,
    cohort_size=CLIENTS,
    rounds=2,
    sampling=Sampling.NONE,
    against=SERVER,
    epsilon=5000.0,
    delta=1e-5,
    dropouts=0.2,
    colluders=0.1,
    consistency=Consistency.SIGNED,
)
MODEL = ArrayRecord({"params": Array(np.full(16, 7, np.float32)), "steps": Array(np.array([3]))})


def federation(directory, evaluate, roster=None):
    """Enrolled clients whose app has both functions; the strategy is one for training."""
    roster = enrol(directory, CLIENTS) if roster is None else roster
    grid = make_grid(directory, train=lambda _client: never)
    for node, (_, context) in list(grid.apps.items()):
        app = ClientApp(mods=[private])
        app.train()(never)
        if evaluate is not None:
            app.evaluate()(evaluate(node - 100))
        grid.apps[node] = app, context
    strategy = replace(make_strategy(calibrate(TARGET), directory, roster), target=TARGET)
    return grid, strategy


def never(_message, _context):
    raise AssertionError("this was asked for an evaluation, not for training")


def metrics_of(client):
    """Clients 0 to 4: accuracy 0.1 times their number over 10 times as many examples, and a loss of 3."""

    def evaluate(message, _context):
        assert (message.content["arrays"]["params"].numpy() == 7).all()
        assert message.content["arrays"]["steps"].numpy() == [3]
        assert message.content["config"]["threshold"] == 0.5
        found = {"accuracy": 0.1 * client, "loss": 3.0, "num-examples": 10 * client, "secret": SECRET}
        return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)

    return evaluate


def ask(strategy, grid, **changed):
    options = {"epsilon": 5000.0, "max_examples": 30.0, "config": ConfigRecord({"threshold": 0.5})} | changed
    return private_evaluate(strategy, grid, MODEL, {"accuracy": (0.0, 1.0), "loss": (0.0, 10.0)}, **options)


def test_metrics_of_the_clients_functions_are_weighted_means(tmp_path):
    grid, strategy = federation(tmp_path, metrics_of)
    found = ask(strategy, grid)
    weights = np.minimum([0, 10, 20, 30, 40], 30)
    expected = {"accuracy": np.average([0, 0.1, 0.2, 0.3, 0.4], weights=weights), "loss": 3.0}
    for name, value in expected.items():
        assert abs(found.value[name] - value) < 6 * found.standard_error[name]
    assert found.standard_error["accuracy"] < 0.05
    assert found.clients == CLIENTS
    assert not any(repr(SECRET).encode() in repr(each.content).encode() for each in grid.received)

    # It is charged by the server and by each client; asked again under its name it costs nothing.
    ledger = strategy.directory / "evaluations" / "evaluate" / "ledger.sqlite"
    rows = [row.kind for row in read_rows(ledger) if row.key is not None]
    assert rows == [RowKind.RESERVE, RowKind.COMMIT]
    history = read_client_config(directory_of(tmp_path, 2)).log.read()
    assert len(list(history.bodies(Entry.CHARGE))) == 1
    assert ask(strategy, grid).value == found.value
    assert len(list(read_client_config(directory_of(tmp_path, 2)).log.read().bodies(Entry.CHARGE))) == 1


def test_an_evaluation_beyond_the_shared_ledger_is_refused(tmp_path):
    grid, strategy = federation(tmp_path, metrics_of)
    first = ask(strategy, grid, epsilon=20.0)
    shared = replace(strategy, ledger=strategy.directory / "evaluations" / "evaluate" / "ledger.sqlite")
    assert first.clients == CLIENTS
    with pytest.raises(BudgetExceeded):
        ask(shared, grid, epsilon=20.0, name="again")


def test_metrics_of_scores_are_those_of_one_process(tmp_path):
    def scores_of(client):
        labels = np.array([0.0, 1.0, 1.0, 0.0])
        scores = np.array(
            [0.2, 0.9, 0.6, 0.7 if client % 2 else 0.1]
        )  # of class 1: the last one wrong for odd clients

        def evaluate(message, _context):
            arrays = ArrayRecord({"scores": Array(scores), "labels": Array(labels)})
            return Message(RecordDict({"arrays": arrays}), reply_to=message)

        return evaluate

    grid, strategy = federation(tmp_path, scores_of)
    found = private_metrics(strategy, grid, MODEL, ["accuracy", "auroc"], epsilon=5000.0, classes=2, max_values=4)
    assert abs(found.value["accuracy"] - (3 * 1.0 + 2 * 0.75) / 5) < 6 * found.standard_error["accuracy"] < 0.2
    assert found.value["auroc"] > 0.5
    alike = private_metrics(strategy, grid, MODEL, epsilon=5000.0, classes=2, name="alike")
    assert abs(alike.value["accuracy"] - 0.9) < 6 * alike.standard_error["accuracy"] < 0.2


def test_a_model_too_large_to_go_along_is_part_of_the_vector(tmp_path):
    sizes = []

    def evaluate(_client):
        def function(message, _context):
            sizes.append(message.content["arrays"]["large"].numpy().size)
            return Message(
                RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "num-examples": 30})}), reply_to=message
            )

        return function

    grid, strategy = federation(tmp_path, evaluate)
    large = ArrayRecord({"large": Array(np.ones(MOST_LOCAL_BYTES // 4 + 1, np.float32))})
    found = private_evaluate(strategy, grid, large, {"accuracy": (0.0, 1.0)}, epsilon=5000.0, max_examples=30.0)
    assert sizes == [MOST_LOCAL_BYTES // 4 + 1] * CLIENTS
    assert abs(found.value["accuracy"] - 0.5) < 6 * found.standard_error["accuracy"]


def test_a_client_that_cannot_evaluate_has_no_weight(tmp_path):
    def evaluate(client):
        def function(message, context):
            if client == 1:
                raise ValueError(f"{SECRET}")
            found = {"accuracy": float("nan") if client == 2 else 0.8, "num-examples": 30}
            return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)

        return function

    grid, strategy = federation(tmp_path, evaluate)
    found = private_evaluate(strategy, grid, MODEL, {"accuracy": (0.0, 1.0)}, epsilon=5000.0, max_examples=30.0)
    assert found.clients == CLIENTS
    assert abs(found.value["accuracy"] - 0.8) < 6 * found.standard_error["accuracy"] < 0.3


def test_an_app_without_evaluation_takes_no_part(tmp_path):
    grid, strategy = federation(tmp_path, None)
    hasty = replace(strategy, deadlines=Deadlines(joining=0.05, keys=1, training=1, poll=0.01))
    with pytest.raises(TooFewClients):
        ask(hasty, grid)


def test_a_task_for_evaluation_in_a_request_for_training_is_refused(tmp_path):
    grid, strategy = federation(tmp_path, metrics_of)

    def as_training(_client, message):
        message.metadata.message_type = "train"
        return message

    grid.going = as_training
    with pytest.raises(TooFewClients):
        ask(strategy, grid)
    assert "a request for training must have a task for it" in str(
        [each.error for each in grid.received if each.has_error()]
    )
    assert not list(read_client_config(directory_of(tmp_path, 2)).log.read().bodies(Entry.CHARGE))


def test_what_cannot_be_asked_for_is_refused(tmp_path):
    grid, strategy = federation(tmp_path, metrics_of)
    with pytest.raises(ConfigError, match="bounds must be finite and in order, got 1 and 0"):
        private_evaluate(strategy, grid, MODEL, {"accuracy": (1.0, 0.0)}, epsilon=1.0, max_examples=1)
    with pytest.raises(ConfigError, match="must name its metrics, got none"):
        private_evaluate(strategy, grid, MODEL, {}, epsilon=1.0, max_examples=1)
    with pytest.raises(ConfigError, match="max_examples must be positive and finite, got 0"):
        ask(strategy, grid, max_examples=0.0)
    with pytest.raises(ConfigError, match="make the strategy from a target"):
        ask(replace(strategy, target=None), grid)


@pytest.mark.parametrize("name", ["..", ".", "", "../a", "a/b", "-a", "a\n", "a" * 101])
def test_an_evaluations_name_leads_to_no_other_directory(name, tmp_path, monkeypatch):
    grid, strategy = federation(tmp_path, metrics_of)
    with pytest.raises(ConfigError, match="an evaluation's name must be letters, digits and underscores"):
        ask(strategy, grid, name=name)
    with pytest.raises(ConfigError, match="an evaluation's name must be letters, digits and underscores"):
        private_metrics(strategy, grid, MODEL, epsilon=1.0, classes=2, name=name)
    if name == "..":  # the directory of the run itself
        monkeypatch.setattr("d2pfed.deploy.evaluation.check_name", lambda *_: None)
        found = evaluation_strategy(strategy, {}, 1, 1.0, name)
        assert found.directory.resolve() == strategy.directory.resolve()


RECORDS = 40  # of each silo


class Scored:
    """A silo's records: one in four is wrong, with a loss of 1; record `broken` has no evaluation."""

    count = RECORDS

    def __init__(self, *, broken=None, scores=False):
        self.broken, self.scores = broken, scores

    def evaluate(self, record):
        if record == self.broken:
            raise RuntimeError("a secret of the data")
        right = record % 4 > 0
        if self.scores:
            return np.array([0.9, 0.1]) if right else np.array([0.2, 0.8]), 0
        return {"accuracy": float(right), "loss": 1.0}


def silos(directory, **options):
    """Five silos whose plan protects records, with a strategy for training."""
    target = replace(TARGET, unit="record", records=CLIENTS * RECORDS, batch_rate=0.1, dropouts=0.2, spare=2)
    roster = enrol(directory, CLIENTS)
    grid = make_grid(directory, train=lambda _client: never)
    for node, (_, context) in list(grid.apps.items()):

        def evaluate(arrays, config, _context):
            assert (arrays["params"] == 7).all()
            return Scored(**options)

        app = ClientApp(mods=[PrivateRecords(never, evaluate)])
        app.train()(never)
        app.evaluate()(never)
        grid.apps[node] = app, context
    return grid, replace(make_strategy(calibrate(target), directory, roster), target=target)


@pytest.mark.parametrize("broken", [None, 3])
def test_metrics_of_records_are_means_over_all_of_them(tmp_path, broken):
    grid, strategy = silos(tmp_path, broken=broken)
    found = private_evaluate(strategy, grid, MODEL, {"accuracy": (0.0, 1.0), "loss": (0.0, 4.0)}, epsilon=5000.0)
    right = 30 - (broken is not None)  # a record that fails counts as absent, alone
    expected = right / (RECORDS - (broken is not None))
    assert abs(found.value["accuracy"] - expected) < 6 * found.standard_error["accuracy"] < 0.05
    assert abs(found.value["loss"] - 1.0) < 6 * found.standard_error["loss"] < 0.2
    assert {each.unit for each in found.guarantees} == {Unit.RECORD}


def test_scores_of_records_give_metrics_over_all_of_them(tmp_path):
    grid, strategy = silos(tmp_path, scores=True)
    found = private_metrics(strategy, grid, MODEL, ["accuracy"], epsilon=5000.0, classes=2)
    assert abs(found.value["accuracy"] - 0.75) < 6 * found.standard_error["accuracy"] < 0.05


def test_a_large_model_goes_along_with_an_evaluation_of_records(tmp_path):
    grid, strategy = silos(tmp_path)
    large = ArrayRecord({"params": Array(np.full(MOST_LOCAL_BYTES // 4 + 1, 7, np.float32))})
    found = private_evaluate(strategy, grid, large, {"accuracy": (0.0, 1.0)}, epsilon=5000.0)
    assert abs(found.value["accuracy"] - 0.75) < 6 * found.standard_error["accuracy"] < 0.1


def test_silos_without_an_evaluation_refuse_one(tmp_path):
    grid, strategy = silos(tmp_path)
    for node, (_, context) in list(grid.apps.items()):
        app = ClientApp(mods=[PrivateRecords(never)])
        app.train()(never)
        app.evaluate()(never)
        grid.apps[node] = app, context
    with pytest.raises(TooFewClients, match=r"5 nodes refuse: .*answers only requests of d2pfed"):
        private_evaluate(strategy, grid, MODEL, {"accuracy": (0.0, 1.0)}, epsilon=5000.0)


def test_an_evaluation_of_clients_states_the_cap_on_a_weight(tmp_path):
    grid, strategy = federation(tmp_path, metrics_of)
    with pytest.raises(ConfigError, match="must state max_examples"):
        ask(strategy, grid, max_examples=None)
