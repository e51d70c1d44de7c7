import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from safetensors.numpy import load_file

from d2pfed.accounting import Sampling
from d2pfed.cli import main
from d2pfed.deploy import federation
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.requests import RequestKind, RunAcceptance
from d2pfed.deploy.rosters import DrawCommitment
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import BudgetExceeded, ConfigError, LedgerError, TooFewClients
from d2pfed.flower.grid import from_record, to_record
from d2pfed.ledger import RowKind, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.randomness import digest
from d2pfed.runs import RoundRecord
from d2pfed.runs.json_files import from_json, to_json
from d2pfed.runs.report import read_report
from d2pfed.secagg import crypto
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import MessageKind
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan, noise_bound, sign_roster
from support.local_grid import (
    kind,
    make_grid,
    make_message,
    make_strategy,
    start,
)
from support.reports import Page, outside


def is_acceptance(reply: Message) -> bool:
    return reply.has_content() and list(reply.content) == [RequestKind.ANNOUNCEMENT]


def unavailable(message: Message) -> Message:
    """What Flower says of a node that is gone."""
    return Message(Error(code=5, reason="node unavailable"), reply_to=message)


def rounds_of(directory):
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def committed(directory):
    rows = read_rows(directory / "run" / "ledger.sqlite")
    return [row.release.participants for row in rows if row.kind is RowKind.COMMIT]


def exact(*rounds: tuple[int, ...]) -> np.ndarray:
    """The mean of one-hot updates over the planned cohort of five, summed over rounds."""
    total = np.zeros(DIMENSION)
    for survivors in rounds:
        total[list(survivors)] += 1 / 5
    return total


def test_a_run_adds_up_and_its_ledger_names_participants(tmp_path):
    plan, roster = make_plan(), enrol(tmp_path, 5)
    params = start(make_strategy(plan, tmp_path, roster), make_grid(tmp_path))
    everyone = tuple(range(5))
    assert np.abs(params - exact(everyone, everyone)).max() < 2 * noise_bound(plan, 5)
    assert committed(tmp_path) == [everyone, everyone]
    kinds = [row.kind for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.key is not None]
    assert kinds == [RowKind.RESERVE, RowKind.COMMIT] * 2
    assert [round_["survivors"] for round_ in rounds_of(tmp_path)] == [5, 5]


@pytest.mark.parametrize(
    "lost_at", [MessageKind.INVITATION, MessageKind.KEY_ADVERTISEMENTS, MessageKind.MASK_REQUEST]
)
def test_a_failing_client_drops_out_of_the_sum(tmp_path, lost_at):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    grid.coming = lambda client, reply: (
        unavailable(grid.sent[-1]) if client == 3 and kind(grid.sent[-1]) is lost_at else reply
    )
    params = start(make_strategy(plan, tmp_path, roster), grid)
    assert np.abs(params - exact((0, 1, 2, 4))).max() < noise_bound(plan, 4)
    assert committed(tmp_path) == [(0, 1, 2, 4)]


def test_a_survivor_silent_in_the_last_exchange_stays_in_the_sum(tmp_path):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    grid.coming = lambda client, reply: (
        unavailable(grid.sent[-1]) if client == 3 and kind(grid.sent[-1]) is MessageKind.UNMASK_REQUEST else reply
    )
    params = start(make_strategy(plan, tmp_path, roster), grid)
    assert np.abs(params - exact((0, 1, 2, 3, 4))).max() < noise_bound(plan, 5)


def test_silence_ends_at_the_deadline(tmp_path):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    grid.coming = lambda client, reply: (
        None if client == 3 and kind(grid.sent[-1]) is MessageKind.MASK_REQUEST else reply
    )
    start(make_strategy(plan, tmp_path, roster), grid, timeout=4.0)
    assert committed(tmp_path) == [(0, 1, 2, 4)]
    assert [each["answered"] for each in rounds_of(tmp_path)[0]["exchanges"]] == [5, 5, 4, 4, 4]


def test_an_answer_in_another_nodes_name_is_not_taken(tmp_path):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)

    def impostor(client, reply):
        if client == 3 and kind(grid.sent[-1]) is MessageKind.MASK_REQUEST:
            reply.metadata.__dict__["_src_node_id"] = 104
        return reply

    grid.coming = impostor
    start(make_strategy(plan, tmp_path, roster), grid)
    assert committed(tmp_path) == [(0, 1, 2, 4)]


def test_an_answer_with_a_second_record_beside_the_frame_is_not_taken(tmp_path):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)

    def talkative(client, reply):
        if client == 3 and kind(grid.sent[-1]) is MessageKind.MASK_REQUEST:
            reply.content["metrics"] = MetricRecord({"num-examples": 7})
        return reply

    grid.coming = talkative
    start(make_strategy(plan, tmp_path, roster), grid)
    assert committed(tmp_path) == [(0, 1, 2, 4)]


PLANTED = b"planted-in-an-answer"


@pytest.mark.parametrize(
    "asked",
    [
        MessageKind.INVITATION,
        MessageKind.KEY_ADVERTISEMENTS,
        MessageKind.MASK_REQUEST,
        MessageKind.SURVIVORS,
        MessageKind.UNMASK_REQUEST,
    ],
)
def test_the_log_names_the_refused_node_the_exchange_and_the_rule(tmp_path, caplog, asked):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)

    def damaged(client, reply):
        if client == 3 and kind(grid.sent[-1]) is asked:
            reply.content = to_record(RequestKind.EXCHANGE, from_record(reply.content)[1] + PLANTED)
        return reply

    grid.coming = damaged
    start(make_strategy(plan, tmp_path, roster), grid)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"{asked.name}: node 103 is refused: ")
    assert "bytes was announced" in line
    assert all(secret not in caplog.text for secret in (PLANTED.decode(), PLANTED.hex(), str(PLANTED)[2:-1]))


def test_the_text_of_a_remote_error_is_escaped_in_the_log(tmp_path, caplog):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    words = "oh\nround 7: 5 survivors\x1b[2J" + "!" * 1000
    grid.coming = lambda client, reply: (
        Message(Error(code=0, reason=words), reply_to=grid.sent[-1])
        if client == 3 and kind(grid.sent[-1]) is MessageKind.KEY_ADVERTISEMENTS
        else reply
    )
    start(make_strategy(plan, tmp_path, roster), grid)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("KEY_ADVERTISEMENTS: node 103 is refused: oh\\nround 7")
    assert line.isprintable()
    assert len(line) < 400


def test_a_void_attempt_says_why(tmp_path, caplog):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    lost = []

    def lose_three_once(client, reply):
        if kind(grid.sent[-1]) is MessageKind.KEY_ADVERTISEMENTS and len(lost) < 3:
            lost.append(client)
            return unavailable(grid.sent[-1])
        return reply

    grid.coming = lose_three_once
    start(make_strategy(plan, tmp_path, roster), grid)
    assert "round 1, attempt 0 is void: at least 3 clients must be left" in caplog.text


def test_a_node_that_was_away_when_it_was_told_of_the_run_is_told_again(tmp_path):
    plan, roster, grid, looks = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path), [0]
    away = {102, 103, 104}

    def connected():
        looks[0] += 1  # Flower lists a node for a while after it is gone, and then again when it is back
        return [node for node in grid.apps if not (node in away and 1 < looks[0] < 5)]

    grid.get_node_ids = connected
    grid.coming = lambda client, reply: (
        unavailable(grid.sent[-1]) if 100 + client in away and looks[0] == 1 else reply
    )
    start(make_strategy(plan, tmp_path, roster), grid)
    assert committed(tmp_path) == [(0, 1, 2, 3, 4)]


def test_too_few_clients_end_the_wait_before_anything_is_charged(tmp_path):
    plan, roster, grid = make_plan(), enrol(tmp_path, 5), make_grid(tmp_path, clients=2)
    strategy = make_strategy(plan, tmp_path, roster, deadlines=Deadlines(joining=1.0, keys=60.0, poll=0.01))
    with pytest.raises(TooFewClients, match="round 1 needs 3 of 5 clients, 2 came within 1 s"):
        start(strategy, grid)
    assert [row for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.key is not None] == []


def test_attempts_without_a_quorum_are_void_and_cost_nothing(tmp_path):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    grid.coming = lambda client, reply: (
        unavailable(grid.sent[-1])
        if client > 1 and kind(grid.sent[-1]) is MessageKind.KEY_ADVERTISEMENTS
        else reply
    )
    with pytest.raises(TooFewClients, match="failed in all"):
        start(make_strategy(plan, tmp_path, roster), grid)
    rows = [row for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.key is not None]
    assert [row.kind for row in rows] == [RowKind.RESERVE, RowKind.VOID] * plan.attempts_per_round


def test_a_run_goes_on_where_it_was_interrupted(tmp_path):
    plan, roster, grid = make_plan(rounds=3), enrol(tmp_path, 5), make_grid(tmp_path)
    seen = []

    def crash(number, arrays):
        seen.append(number)
        if number == 2:
            raise KeyboardInterrupt
        return MetricRecord({"round": number})

    with pytest.raises(KeyboardInterrupt):
        start(make_strategy(plan, tmp_path, roster), grid, evaluate_fn=crash)
    # The second round was unmasked and not kept: it is charged, and done again as a new attempt.
    params = start(
        make_strategy(plan, tmp_path, roster), grid, evaluate_fn=lambda number, arrays: seen.append(number)
    )
    assert seen == [0, 1, 2, 1, 2, 3]
    assert len(committed(tmp_path)) == 4
    assert [(round_["round"], round_["attempt"]) for round_ in rounds_of(tmp_path)] == [(1, 0), (2, 1), (3, 0)]
    assert np.abs(params[:5] - 3 / 5).max() < 3**0.5 * noise_bound(plan, 5)


def trained_anyhow(client: int):
    """Training that succeeds, fails, explodes or yields no numbers, by the client."""

    def train(message: Message, _context: object) -> Message:
        params = message.content["arrays"]["params"].numpy().copy()
        if client == 1:
            raise RuntimeError("records of client 1")
        params += (1.0, 0.0, 1e30, np.nan, 0.0)[client]
        return Message(RecordDict({"arrays": ArrayRecord({"params": Array(params)})}), reply_to=message)

    return train


def test_what_a_client_has_spent_depends_on_no_training(tmp_path):
    """Its silence, once its budget is spent, then tells nothing that the cohorts do not."""
    start(make_strategy(make_plan(), tmp_path, enrol(tmp_path, 5)), make_grid(tmp_path, train=trained_anyhow))
    logs = [read_client_config(directory_of(tmp_path, client)).log.read() for client in range(5)]
    spent = [[body["release"] for body in log.bodies(Entry.CHARGE)] for log in logs]
    assert len(spent[0]) == 2
    assert all(each == spent[0] for each in spent)


def test_unsampled_clients_at_their_cap_refuse_and_the_run_ends(tmp_path):
    plan, roster, grid = make_plan(rounds=2, spare=0), enrol(tmp_path, 5), make_grid(tmp_path)

    def crash(number, arrays):
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(make_strategy(plan, tmp_path, roster), grid, evaluate_fn=crash)
    start(make_strategy(plan, tmp_path, roster), grid, 1)  # the first round again, charged again
    hurry = Deadlines(joining=1.0, keys=60.0, poll=0.001)
    with pytest.raises((TooFewClients, LedgerError, BudgetExceeded)):
        start(make_strategy(plan, tmp_path, roster, deadlines=hurry), grid)
    assert len(committed(tmp_path)) == 2


def test_a_resumed_run_must_be_the_same(tmp_path):
    plan, roster, grid = make_plan(), enrol(tmp_path, 5), make_grid(tmp_path)
    start(make_strategy(plan, tmp_path, roster), grid, 1)
    with pytest.raises(ConfigError, match="other settings"):
        start(make_strategy(replace(plan, attempts_per_round=2), tmp_path, roster), grid)


def test_an_unknown_node_is_refused(tmp_path, caplog):
    plan, grid = make_plan(rounds=1), make_grid(tmp_path)
    roster = enrol(tmp_path, 5)
    keys = {client: key for client, key in roster.roster.keys.items() if client != 4} | {9: digest("other")}
    committed_to = DrawCommitment(roster.roster.depth, roster.roster.root)
    stranger = sign_roster(tmp_path, keys, None, committed_to)
    hurry = Deadlines(joining=1.0, keys=60.0, poll=0.001)
    start(make_strategy(plan, tmp_path, stranger, deadlines=hurry), grid)
    assert "node 104 is refused" in caplog.text
    assert "client 4 is not enrolled" in caplog.text
    assert committed(tmp_path) == [(0, 1, 2, 3)]


def test_a_node_cannot_speak_for_a_client_whose_key_it_lacks(tmp_path, caplog):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)

    def forged(client, reply):
        if client == 4 and is_acceptance(reply):
            forged = RunAcceptance(0, crypto.sign(digest("mine"), digest("a lie")))
            reply.content = to_record(RequestKind.ANNOUNCEMENT, forged.encode())
        return reply

    grid.coming = forged
    start(make_strategy(plan, tmp_path, roster, deadlines=Deadlines(joining=1.0, keys=60.0, poll=0.001)), grid)
    assert "node 104 is refused: a signature does not match its statement" in caplog.text
    assert committed(tmp_path) == [(0, 1, 2, 3)]


def test_an_acceptance_of_another_node_cannot_be_passed_on(tmp_path, caplog):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    shown = {}

    def copied(client, reply):
        if is_acceptance(reply):
            shown[client] = reply.content
            if client == 4:
                reply.content = shown[0]
        return reply

    grid.coming = copied
    start(make_strategy(plan, tmp_path, roster, deadlines=Deadlines(joining=1.0, keys=60.0, poll=0.001)), grid)
    assert "node 104 is refused: a signature does not match its statement" in caplog.text


def test_the_roster_must_be_the_plans_population(tmp_path):
    roster = enrol(tmp_path, 4)
    with pytest.raises(ConfigError, match="the roster must have the 5 clients of the plan's population, got 4"):
        make_strategy(make_plan(), tmp_path, roster)


def test_cohorts_come_from_the_whole_roster_whoever_is_connected(tmp_path):
    """Drawing from those who are connected would break the sampling that the guarantee rests on."""
    plan = make_plan(5, rounds=1, population=6, sampling=Sampling.FIXED, dropouts=0.4)
    roster, grid = enrol(tmp_path, 6), make_grid(tmp_path, clients=5)
    start(
        make_strategy(plan, tmp_path, roster, deadlines=Deadlines(joining=0.5, keys=60.0, poll=0.001)),
        grid,
    )
    invited = {message.metadata.dst_node_id for message in grid.sent if kind(message) is MessageKind.INVITATION}
    assert len(invited) in (4, 5)
    (release,) = [r.release for r in read_rows(tmp_path / "run" / "ledger.sqlite") if r.kind is RowKind.COMMIT]
    assert set(release.participants) == {node - 100 for node in invited}


@pytest.mark.parametrize("rounds", [0, 3])
def test_rounds_beyond_the_plan_are_refused(tmp_path, rounds):
    roster = enrol(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"num_rounds must be in \[1, 2\]"):
        start(make_strategy(make_plan(), tmp_path, roster), make_grid(tmp_path), rounds)


def test_a_model_of_another_size_than_planned_is_refused(tmp_path):
    strategy = make_strategy(make_plan(), tmp_path, enrol(tmp_path, 5))
    with pytest.raises(ConfigError, match="must have the plan's 16 parameters, got 3"):
        strategy.start(make_grid(tmp_path), ArrayRecord({"params": Array(np.zeros(3, np.float32))}))


@pytest.mark.parametrize("name", ["joining", "keys", "training", "poll"])
def test_every_deadline_is_finite_and_positive(name):
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=f"the deadline {name} must be in"):
            Deadlines(**{name: seconds})


def test_messages_of_the_server_carry_their_time_to_live():
    assert make_message(RecordDict({}), 100, "x", 7.0).metadata.ttl == 7.0


def test_a_node_that_failed_once_is_announced_again_in_the_next_round(tmp_path):
    plan, roster, grid = make_plan(rounds=2), enrol(tmp_path, 5), make_grid(tmp_path)
    failed = []

    def fail_once(client, reply):
        if client == 4 and not failed:
            failed.append(reply)
            return unavailable(grid.sent[-1])
        return reply

    grid.coming = fail_once
    hurry = Deadlines(joining=1.0, keys=60.0, poll=0.001)
    start(make_strategy(plan, tmp_path, roster, deadlines=hurry), grid)
    assert committed(tmp_path) == [(0, 1, 2, 3), (0, 1, 2, 3, 4)]


def test_a_huge_identity_from_a_stranger_does_not_end_the_server(tmp_path, caplog):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)

    def huge(client, reply):
        if client == 4 and is_acceptance(reply):
            accepted = RunAcceptance(4, b"").encode()
            reply.content = to_record(RequestKind.ANNOUNCEMENT, accepted[:-8] + b"\xff" * 2048)
        return reply

    grid.coming = huge
    start(make_strategy(plan, tmp_path, roster, deadlines=Deadlines(joining=1.0, keys=60.0, poll=0.001)), grid)
    assert "node 104 is refused: an acceptance must state at most 100000000 attempts" in caplog.text
    assert committed(tmp_path) == [(0, 1, 2, 3)]


def test_an_attempt_lasts_no_longer_than_clients_keep_its_secrets():
    with pytest.raises(ConfigError, match="seconds"):
        Deadlines(training=400_000.0)


def test_a_client_that_is_to_blame_is_not_asked_again_even_after_a_restart(tmp_path, monkeypatch, caplog):
    plan, roster, grid = make_plan(rounds=2), enrol(tmp_path, 5), make_grid(tmp_path)
    gather, blamed = federation.gather, []

    def blaming(*arguments, **options):
        if not blamed:
            blamed.append(3)
            raise TooFewClients("somebody has cheated", (), (3,))
        return gather(*arguments, **options)

    monkeypatch.setattr(federation, "gather", blaming)
    start(make_strategy(plan, tmp_path, roster), grid, 1)
    assert "clients [3] have sent messages that cannot be accidents" in caplog.text
    start(make_strategy(plan, tmp_path, roster), grid, 2)
    assert committed(tmp_path) == [(0, 1, 2, 4)] * 2
    assert all(
        message.metadata.dst_node_id != 103 for message in grid.sent if kind(message) is MessageKind.INVITATION
    )


def test_every_attempt_is_a_fresh_draw_and_no_two_runs_share_one(tmp_path):
    plan = make_plan(4, rounds=2, population=6, sampling=Sampling.FIXED, dropouts=0.25, max_participations=6)
    roster, grid = enrol(tmp_path, 6), make_grid(tmp_path, clients=6)
    for run in ("run", "another"):
        start(replace(make_strategy(plan, tmp_path, roster), directory=tmp_path / run), grid)
    (file,) = tmp_path.glob("draws.*.used")
    used = json.loads(file.read_text())
    assert sorted(used.values()) == [[0, 6], [6, 6]]
    drawn = [
        (int(body["draw"]), body["run"])
        for client in range(6)
        for body in read_client_config(directory_of(tmp_path, client)).log.read().bodies(Entry.BEGUN)
    ]
    assert {draw for draw, _ in drawn} == {0, 3, 6, 9}
    assert len(drawn) == 4 * 4


def test_a_partition_takes_the_next_block_when_vectors_were_asked_for(tmp_path):
    plan = make_plan(3, rounds=2, population=9, sampling=Sampling.ONCE, dropouts=0.0, spare=1)
    roster, grid = enrol(tmp_path, 9), make_grid(tmp_path, clients=9)
    lost = []

    def lose_one_vector(client, reply):
        if kind(grid.sent[-1]) is MessageKind.MASK_REQUEST and not lost:
            lost.append(client)
            return unavailable(grid.sent[-1])
        return reply

    grid.coming = lose_one_vector
    start(make_strategy(plan, tmp_path, roster), grid)
    blocks = {
        (body["round"], body["attempt"]): body["block"]
        for client in range(9)
        for body in read_client_config(directory_of(tmp_path, client)).log.read().bodies(Entry.BEGUN)
    }
    assert blocks == {(0, 0): 0, (0, 1): 1, (1, 0): 2}
    assert json.loads((tmp_path / "run" / "participation.json").read_text())["block"] == 3


def a_kill_before_vectors_are_asked_for_costs_a_block(tmp_path, monkeypatch):
    """The ledger has charged the block and participation.json does not show it: its clients are not asked again."""
    plan = make_plan(3, rounds=2, population=9, sampling=Sampling.ONCE, dropouts=0.0, spare=1)
    roster, grid = enrol(tmp_path, 9), make_grid(tmp_path, clients=9)

    def killed(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(federation, "gather", killed)
        with pytest.raises(KeyboardInterrupt):
            start(make_strategy(plan, tmp_path, roster), grid)
    start(make_strategy(plan, tmp_path, roster), grid)
    taken = [client for clients in committed(tmp_path) for client in clients]
    assert len(set(taken)) == len(taken) == 6


def test_a_kill_before_vectors_are_asked_for_costs_a_block_and_not_the_run(tmp_path, monkeypatch):
    a_kill_before_vectors_are_asked_for_costs_a_block(tmp_path, monkeypatch)


def test_a_partition_that_does_not_look_at_the_ledger_is_caught(tmp_path, monkeypatch):
    kept = federation.CohortFederation.draw

    def draw(self, attempt):
        whole, self._deployment = self._deployment, replace(self._deployment, run=SimpleNamespace(ledger=None))
        try:
            return kept(self, attempt)
        finally:
            self._deployment = whole

    monkeypatch.setattr(federation.CohortFederation, "draw", draw)
    with pytest.raises(ConfigError, match="uses each client once"):
        a_kill_before_vectors_are_asked_for_costs_a_block(tmp_path, monkeypatch)


def test_a_roster_that_has_or_may_expire_is_refused_before_the_run_begins(tmp_path):
    plan, grid = (
        make_plan(3, rounds=2, population=9, sampling=Sampling.ONCE, dropouts=0.0, spare=1),
        make_grid(tmp_path),
    )
    roster = enrol(tmp_path, 9)
    short = replace(roster, roster=replace(roster.roster, expires=roster.roster.issued + 86_400))
    with pytest.raises(ConfigError, match="`once` must end under one roster"):
        start(make_strategy(plan, tmp_path, short), grid, timeout=100_000.0)
    over = replace(roster, roster=replace(roster.roster, issued=1, expires=2))
    with pytest.raises(ConfigError, match="roster 1 expired"):
        start(make_strategy(plan, tmp_path, over), grid)
    assert not (tmp_path / "run").exists()


def test_a_roster_with_draws_needs_the_servers_file_of_them(tmp_path):
    roster = enrol(tmp_path, 5)
    with pytest.raises(ConfigError, match="needs the server's file"):
        start(make_strategy(make_plan(), tmp_path, roster, draws=None), make_grid(tmp_path))


def test_a_roster_without_draws_works_and_its_cohorts_are_believed(tmp_path):
    roster = enrol(tmp_path, 5, depth=None)
    params = start(make_strategy(make_plan(rounds=1), tmp_path, roster), make_grid(tmp_path))
    assert (params[:5] > 0.1).all()


def test_the_plans_consistency_is_that_of_the_roster(tmp_path):
    roster = enrol(tmp_path, 5)
    with pytest.raises(ConfigError, match="consistency must be signed, the plan has assumed"):
        make_strategy(make_plan(consistency=Consistency.ASSUMED), tmp_path, roster)
    with pytest.raises(ConfigError, match="consistency must be assumed, the plan has signed"):
        make_strategy(make_plan(), tmp_path, None)


# What a run leaves


def accuracy(rounds: int, _arrays: ArrayRecord) -> MetricRecord:
    """The app's own evaluation."""
    return MetricRecord({"accuracy": rounds / 4, "loss": 1.0})


def test_a_report_survives_a_round_trip_with_seconds_per_exchange(tmp_path, monkeypatch, capsys):
    start(make_strategy(make_plan(), tmp_path, enrol(tmp_path, 5)), make_grid(tmp_path), evaluate_fn=accuracy)
    run = tmp_path / "run"
    first = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    monkeypatch.setattr("sys.argv", ["d2pfed", "report", str(run)])
    main()
    assert capsys.readouterr().out == f"The report is in {run / 'report.html'}.\n"
    assert (run / "report.html").read_bytes() == first
    page, report = Page.read(first.decode()), read_report(run)
    assert outside(first.decode()) == []
    assert "Finished after 2 rounds." in page.text
    assert "Validation accuracy 50.00 %" in page.text
    start_of = page.cells.index(report.rounds[0].exchanges[0].name)
    shown = page.cells[start_of : start_of + 15]
    assert shown[::3] == [lap.name for lap in report.rounds[0].exchanges]
    for place, seconds in enumerate(shown[1::3]):
        own = [record.exchanges[place].seconds for record in report.rounds]
        assert float(seconds) == pytest.approx(sum(own) / 2, abs=0.0051)
    assert shown[2::3] == ["10 of 10"] * 5
    assert report.plan == make_plan()
    assert report.summary.guarantees


def test_every_line_of_the_metrics_is_a_record_of_a_round(tmp_path):
    start(make_strategy(make_plan(), tmp_path, enrol(tmp_path, 5)), make_grid(tmp_path), evaluate_fn=accuracy)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [from_json(RoundRecord, line, "metrics.jsonl") for line in lines]
    assert [to_json(record) for record in records] == lines
    assert [(record.round, record.metrics["accuracy"], record.survivors) for record in records] == [
        (1, 0.25, 5),
        (2, 0.5, 5),
    ]
    assert all(len(record.exchanges) == 5 for record in records)


def test_the_model_is_saved_by_the_apps_own_names(tmp_path):
    params = start(make_strategy(make_plan(), tmp_path, enrol(tmp_path, 5)), make_grid(tmp_path))
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert list(saved) == ["params"]
    assert np.array_equal(saved["params"], params)
