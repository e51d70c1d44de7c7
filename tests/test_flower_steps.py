"""Other strategies over Flower: the server's steps, a proximal term on the clients, callbacks."""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Message, RecordDict

from d2pfed.training import ServerOptimizer
from support.enrolled_clients import DIMENSION, enrol, make_plan, noise_bound
from support.local_grid import make_grid, make_strategy, start

CLIENTS = 5
LR = 0.1


def after(tmp_path, rounds, **settings):
    """What five clients, of whom each adds one at its own place, move the model to at these places."""
    plan, roster = make_plan(rounds=rounds), enrol(tmp_path, CLIENTS)
    strategy = make_strategy(plan, tmp_path, roster, optimizer=ServerOptimizer(lr=LR, **settings))
    return start(strategy, make_grid(tmp_path))[:CLIENTS]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"momentum": 0.5}, LR * 0.2 * (1 + 1.5)),
        ({"momentum": 0.9, "second_moment": 0.5}, 2 * LR),
        ({"momentum": 0.9, "second_moment": 0.5, "second_rule": "yogi"}, LR * (1 + np.sqrt(0.75))),
    ],
    ids=["FedAvgM", "FedAdam", "FedYogi"],
)
def test_the_servers_step_is_the_optimizers(tmp_path, settings, expected):
    assert np.abs(after(tmp_path, 2, **settings) - expected).max() < 0.02


def proximal(mu):
    """Clients that want another model than they are sent, and stay near that one by mu / 2 times their distance."""

    def of(_client):
        wanted = torch.full((DIMENSION,), 0.2)

        def train(message, _context):
            sent = torch.from_numpy(message.content["arrays"]["params"].numpy().copy())
            params = sent.clone().requires_grad_()
            optimizer = torch.optim.SGD([params], lr=0.1)
            for _ in range(200):
                optimizer.zero_grad()
                loss = ((params - wanted) ** 2).sum() / 2 + mu / 2 * ((params - sent) ** 2).sum()
                loss.backward()
                optimizer.step()
            arrays = ArrayRecord({"params": Array(params.detach().numpy())})
            return Message(RecordDict({"arrays": arrays}), reply_to=message)

        return train

    return of


@pytest.mark.parametrize("mu", [0.0, 3.0])
def test_a_proximal_term_keeps_clients_near_the_model_that_they_were_sent(tmp_path, mu):
    plan, roster = make_plan(rounds=1), enrol(tmp_path, CLIENTS)
    found = start(make_strategy(plan, tmp_path, roster), make_grid(tmp_path, train=proximal(mu)))
    bound = noise_bound(plan, CLIENTS) / np.sqrt(DIMENSION)
    assert abs(found.mean() - 0.2 / (1 + mu)) < bound
    assert 2 * bound < 0.2 - 0.2 / 4


def test_callbacks_see_each_round_and_may_end_the_run(tmp_path):
    plan, roster, grid, seen = make_plan(rounds=3), enrol(tmp_path, CLIENTS), make_grid(tmp_path), []

    def callback(record, model):
        seen.append((record.round, record.survivors, float(model()["params"].numpy().sum())))
        return record.round != 2

    strategy = make_strategy(plan, tmp_path, roster)
    last = start(strategy, grid, callbacks=[callback])
    assert [each[:2] for each in seen] == [(1, CLIENTS), (2, CLIENTS)]
    assert seen[-1][2] == pytest.approx(float(last.sum()))
    start(strategy, grid, callbacks=[callback])
    assert [each[0] for each in seen] == [1, 2, 3]
