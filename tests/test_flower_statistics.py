"""A private statistic over Flower: the clients' own numbers, in one round, charged like training."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, ConfigRecord

from d2pfed.errors import ConfigError
from d2pfed.flower.statistics import private_total, statistic_reply
from d2pfed.ledger import RowKind, read_rows
from d2pfed.statistics.questions import STATISTIC
from support.enrolled_clients import DIMENSION, enrol, make_plan
from support.local_grid import make_grid, make_strategy

MODEL = 12  # parameters; the statistic has the rest of the plan's 16


def accuracy(client):
    """A client's function: how many of its records a model gets right, of how many, as its only answer."""

    def train(message, _context):
        config, arrays = message.content["config"], message.content["arrays"]
        assert config[STATISTIC] == "accuracy"
        assert config["threshold"] == 0.5
        assert (arrays["model"].numpy() == 7).all()
        return statistic_reply(message, np.array([0.1 * client, 0.4, 0.0, 0.0]))

    return train


def test_clients_answer_with_numbers_and_nothing_else(tmp_path):
    plan, roster = make_plan(rounds=1), enrol(tmp_path, 5)
    grid = make_grid(tmp_path, train=accuracy)
    model = ArrayRecord({"model": Array(np.full(MODEL, 7, np.float32))})
    found = private_total(
        make_strategy(plan, tmp_path, roster),
        grid,
        "accuracy",
        DIMENSION - MODEL,
        arrays=model,
        config=ConfigRecord({"threshold": 0.5}),
    )
    assert found.clients == 5
    assert np.abs(found.value - [1.0, 2.0, 0, 0]).max() < 6 * found.standard_error
    assert found.standard_error < 0.1
    assert found.guarantees[1].epsilon <= plan.epsilon
    rows = read_rows(tmp_path / "run" / "ledger.sqlite")
    assert [row.kind for row in rows if row.key is not None] == [RowKind.RESERVE, RowKind.COMMIT]


def test_what_does_not_go_together_is_refused(tmp_path):
    roster = enrol(tmp_path, 5)
    grid = make_grid(tmp_path, train=accuracy)
    twice = make_strategy(make_plan(rounds=2), tmp_path, roster)
    with pytest.raises(ConfigError, match="a statistic takes one round, the plan has 2"):
        private_total(twice, grid, "accuracy", DIMENSION)
    once = replace(twice, plan=make_plan(rounds=1))
    with pytest.raises(ConfigError, match="the arrays must have the plan's 16 parameters, got 5"):
        private_total(once, grid, "accuracy", 5)
    with pytest.raises(ConfigError, match="is reserved"):
        private_total(once, grid, "accuracy", 5, arrays=ArrayRecord({STATISTIC: Array(np.zeros(1))}))
