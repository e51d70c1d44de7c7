"""A client that is missing costs seconds, not the whole deadline: the tests would not end otherwise."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Error, Message

from d2pfed.deploy import transport as grid_module
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import ConfigError
from d2pfed.ledger import RowKind, read_rows
from d2pfed.secagg.wire import MessageKind
from support.enrolled_clients import enrol, make_plan
from support.local_grid import LocalGrid, kind, make_grid, make_strategy, start

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


@dataclass
class HeldUpGrid(LocalGrid):
    """A grid that waits for the rest of one node's answer, as Flower does when the node dies while it sends it.

    Whatever the others answer comes while it waits, and is kept for as long as their messages live.
    """

    dead: int = 104
    held: Callable[[Message], bool] = lambda _: False  # for which requests the node dies
    seconds: float = 1.5
    waiting: list[Message] = field(default_factory=list)  # requests of the others, answered when it has waited

    def _push(self, message: Message) -> str:
        if not self.held(message):
            return super()._push(message)
        message.metadata.__dict__["_message_id"] = f"message-{len(self.sent)}"
        self.sent.append(message)
        self.waiting.append(message)
        return message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        died = [each for each in self.waiting if each.metadata.dst_node_id == self.dead]
        if not died:
            return super().pull_messages(message_ids)
        time.sleep(self.seconds)
        for message in self.waiting:
            if message not in died:
                self.inbox[message.metadata.message_id] = self.answer(message.metadata.dst_node_id, message)
        self.waiting.clear()
        return [Message(Error(code=7, reason="Reply message objects are unavailable"), reply_to=died[0])]


@pytest.mark.parametrize("asked", [MessageKind.KEY_ADVERTISEMENTS, MessageKind.MASK_REQUEST])
def test_answers_that_came_while_flower_waited_for_a_dead_node_count(tmp_path, asked):
    plan, roster = make_plan(rounds=1), enrol(tmp_path, 5)
    grid = HeldUpGrid(make_grid(tmp_path).apps, held=lambda message: kind(message) is asked)
    deadlines = Deadlines(joining=60.0, keys=1.0, grace=0.01, poll=0.001)
    start(make_strategy(plan, tmp_path, roster, deadlines=deadlines), grid, timeout=1.0)
    assert committed(tmp_path) == [(0, 1, 2, 3)]
    rows = [row.kind for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.key is not None]
    assert rows == [RowKind.RESERVE, RowKind.COMMIT]  # at the first attempt
    lives = {message.metadata.ttl for message in grid.sent if kind(message) is asked}
    assert min(lives) > 180  # Flower waits as long for what a node has begun to send
