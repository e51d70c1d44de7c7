"""A client that is missing costs seconds, not the whole deadline: the tests would not end otherwise."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from d2pfed.deploy import transport as grid_module
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import ConfigError
from d2pfed.ledger import RowKind, read_rows
from support.enrolled_clients import enrol, make_plan
from support.local_grid import make_grid, make_strategy, start

DAYS = Deadlines(joining=40_000.0, keys=40_000.0, grace=0.01, poll=0.001)


def committed(directory):
    rows = read_rows(directory / "run" / "ledger.sqlite")
    return [row.release.participants for row in rows if row.kind is RowKind.COMMIT]


def test_a_silent_client_is_not_waited_for_once_a_quorum_has_answered(tmp_path):
    plan, roster, grid = make_plan(rounds=2), enrol(tmp_path, 5), make_grid(tmp_path)
    announced = []

    def silent(client, reply):
        announced.append(client)
        return None if client == 4 and announced.count(4) > 1 else reply

    grid.coming = silent
    start(make_strategy(plan, tmp_path, roster, deadlines=DAYS), grid, timeout=100_000.0)
    assert committed(tmp_path) == [(0, 1, 2, 3)] * 2


def test_a_quorum_does_not_wait_for_a_client_that_never_comes(tmp_path, caplog):
    plan, roster, grid = make_plan(rounds=2), enrol(tmp_path, 5), make_grid(tmp_path, clients=4)
    with caplog.at_level("INFO", "d2pfed.deploy"):
        start(make_strategy(plan, tmp_path, roster, deadlines=DAYS), grid, timeout=100_000.0)
    assert committed(tmp_path) == [(0, 1, 2, 3)] * 2
    assert "4 of 5 clients are here; waiting for 4" in caplog.text
    assert "round 2 of 2: 4 of 5 survivors, epsilon " in caplog.text


def test_a_node_that_went_and_came_back_takes_part_again(tmp_path):
    plan, roster, grid = make_plan(rounds=3), enrol(tmp_path, 5), make_grid(tmp_path)
    away = {}

    def move(number, _arrays):
        if number == 1:
            away.update({104: grid.apps.pop(104)})
        if number == 2:
            grid.apps.update(away)

    start(make_strategy(plan, tmp_path, roster, deadlines=DAYS), grid, timeout=100_000.0, evaluate_fn=move)
    everyone = (0, 1, 2, 3, 4)
    assert committed(tmp_path) == [everyone, everyone[:4], everyone]


def test_the_others_have_as_long_again_as_the_quorum_took(monkeypatch):
    monkeypatch.setattr(grid_module.time, "monotonic", lambda: 1000.0)
    deadlines = Deadlines(grace=15.0)
    assert deadlines.after_quorum(999.0, 5000.0) == 1015.0
    assert deadlines.after_quorum(900.0, 5000.0) == 1100.0
    assert deadlines.after_quorum(900.0, 1001.0) == 1001.0
    assert (
        deadlines.after_quorum(999.0, 5000.0, slowest=300.0) == 2199.0
    )  # where one that is missing costs an attempt
    with pytest.raises(ConfigError, match="the deadline grace must be in"):
        Deadlines(grace=0.0)


def test_an_announcement_that_was_lost_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_module, "_AGAIN_SECONDS", 0.01)
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    lost = []

    def lose_once(client, message):
        if client == 4 and not lost:
            lost.append(message)
            return None
        return message

    grid.going = lose_once
    slow = Deadlines(joining=40_000.0, keys=40_000.0, grace=20_000.0, poll=0.001)
    start(make_strategy(plan, tmp_path, roster, deadlines=slow), grid, timeout=100_000.0)
    assert committed(tmp_path) == [(0, 1, 2, 3, 4)]


def test_a_late_answer_to_an_announcement_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_module, "_AGAIN_SECONDS", 0.01)
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    held = []

    def delay(client, reply):
        if client != 4:
            return reply
        held.append((grid.sent[-1].metadata.message_id, reply))
        if len(held) == 3:  # it was asked three times: the first answer comes now, the others never
            grid.inbox[held[0][0]] = held[0][1]
        return None if len(held) <= 3 else reply

    grid.coming = delay
    slow = Deadlines(joining=20.0, grace=20.0, poll=0.001)
    start(make_strategy(plan, tmp_path, roster, deadlines=slow), grid, timeout=100_000.0)
    assert committed(tmp_path) == [(0, 1, 2, 3, 4)]
