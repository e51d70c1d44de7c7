"""A server that was restored from a backup learns from its clients what it has forgotten, charges it and goes on."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from d2pfed.accounting import Sampling
from d2pfed.deploy import client as private_client
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.requests import Progress, RequestKind, RunAcceptance
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import BudgetExceeded
from d2pfed.flower.grid import from_record, to_record
from d2pfed.ledger import RowKind, decode_release, read_rows, verify
from d2pfed.ledger.client_log import Entry
from d2pfed.secagg.wire import MessageKind
from support.enrolled_clients import directory_of, enrol, make_plan, noise_bound
from support.local_grid import make_grid, make_strategy, start
from support.small_committees import CLIENTS, keep_keys_in, make_lattice_plan, shrink
from test_flower_lattice import train as train_one_of_many
from test_flower_server import is_acceptance, kind, unavailable

SAVED, DONE, PLANNED = 2, 4, 6  # rounds when the backup was made, when it was restored, and in all


def everyone(tmp_path):
    return make_plan(rounds=PLANNED), enrol(tmp_path, 5), {}


def drawn(tmp_path):
    return (
        make_plan(4, rounds=PLANNED, population=6, sampling=Sampling.FIXED, dropouts=0.25),
        enrol(tmp_path, 6),
        {},
    )


def partition(tmp_path):
    plan = make_plan(3, rounds=PLANNED, population=27, sampling=Sampling.ONCE, dropouts=0.0, spare=3)
    return plan, enrol(tmp_path, 27), {}


def silos(tmp_path):
    roster = enrol(tmp_path, 5, None)
    keep_keys_in(tmp_path, 5)
    return make_plan(rounds=PLANNED), roster, {"keys": "standing"}


def committees(tmp_path):
    roster = enrol(tmp_path, CLIENTS)
    keep_keys_in(tmp_path)
    return make_lattice_plan(rounds=PLANNED), roster, {}


def back_up(tmp_path):
    shutil.copytree(tmp_path / "run", tmp_path / "backup")


def restore(tmp_path):
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup", tmp_path / "run")


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def charged_by_the_server(tmp_path):
    """The attempts that count, after the whole ledger was verified."""
    found = {}
    for row in read_rows(tmp_path / "run" / "ledger.sqlite"):
        if row.key is not None:
            found[row.key.round, row.key.attempt] = row.kind
    counted = {place for place, step in found.items() if step is not RowKind.VOID}
    assert sum(verify(tmp_path / "run" / "ledger.sqlite").charged.values()) == len(counted)
    return counted


def charged_by(tmp_path, client):
    log = read_client_config(directory_of(tmp_path, client)).log.read()
    releases = [decode_release(str(body["release"])) for body in log.bodies(Entry.CHARGE)]
    return [(release.round, release.attempt) for release in releases]


def require_accounts_agree(tmp_path, plan):
    """Whatever a client was charged for counts at the server; nobody sent twice in an attempt, or beyond the plan."""
    for client in range(plan.sampling.population):
        charged = charged_by(tmp_path, client)
        assert len(set(charged)) == len(charged) <= plan.max_participations
        assert set(charged) <= charged_by_the_server(tmp_path)


@pytest.mark.parametrize("federation", [everyone, drawn, partition, silos, committees])
def test_a_backup_two_rounds_old_goes_on_and_all_that_was_opened_is_charged(
    tmp_path, monkeypatch, federation, caplog
):
    if federation is committees:
        shrink(monkeypatch)
    plan, roster, options = federation(tmp_path)
    grid = make_grid(tmp_path, plan.sampling.population, train_one_of_many)
    start(make_strategy(plan, tmp_path, roster, **options), grid, rounds=SAVED)
    back_up(tmp_path)
    start(make_strategy(plan, tmp_path, roster, **options), grid, rounds=DONE)
    opened = charged_by_the_server(tmp_path)
    assert opened == {(number, 0) for number in range(DONE)}
    restore(tmp_path)
    start(make_strategy(plan, tmp_path, roster, **options), grid)
    require_accounts_agree(tmp_path, plan)
    assert opened < charged_by_the_server(tmp_path)
    assert [record["round"] for record in records(tmp_path)] == list(range(1, PLANNED + 1))
    assert records(tmp_path)[DONE - 1]["attempt"] == 1  # the round that clients had reached, tried again
    assert "clients have begun attempt 0 of round 3, which this server, restored from a backup" in caplog.text


def test_the_model_does_not_move_in_a_lost_round(tmp_path, caplog):
    plan, roster, _ = everyone(tmp_path)
    grid = make_grid(tmp_path)
    start(make_strategy(plan, tmp_path, roster), grid, rounds=SAVED)
    back_up(tmp_path)
    start(make_strategy(plan, tmp_path, roster), grid, rounds=DONE)
    restore(tmp_path)
    before = start(make_strategy(plan, tmp_path, roster), grid, rounds=SAVED)
    after = start(make_strategy(plan, tmp_path, roster), grid, rounds=SAVED + 1)
    assert np.array_equal(before, after)
    assert "round 3 is lost, and the model is unchanged: clients have gone on to later rounds" in caplog.text
    params = start(make_strategy(plan, tmp_path, roster), grid)
    assert np.abs(params[:5] - (PLANNED - 1) / 5).max() < PLANNED * noise_bound(plan, 5)
    assert [(record["attempt"], bool(record["lost"])) for record in records(tmp_path)] == [
        (0, False),
        (0, False),
        (None, True),
        (1, False),
        (0, False),
        (0, False),
    ]


def test_every_attempt_that_was_opened_in_a_lost_round_is_charged(tmp_path):
    plan, roster, _ = everyone(tmp_path)
    grid = make_grid(tmp_path)
    start(make_strategy(plan, tmp_path, roster), grid, rounds=SAVED)
    back_up(tmp_path)
    lost = set()

    def lose_shares_once(client, reply):
        if kind(grid.sent[-1]) is MessageKind.UNMASK_REQUEST and client not in lost:
            lost.add(client)
            return unavailable(grid.sent[-1])
        return reply

    grid.coming = lose_shares_once
    start(make_strategy(plan, tmp_path, roster), grid, rounds=DONE)
    opened = charged_by_the_server(tmp_path)
    assert (SAVED, 1) in opened
    restore(tmp_path)
    start(make_strategy(plan, tmp_path, roster), grid, rounds=DONE)
    assert opened < charged_by_the_server(tmp_path)
    require_accounts_agree(tmp_path, plan)


def test_a_run_whose_attempts_were_used_up_by_what_was_forgotten_ends_with_the_reason(tmp_path):
    plan, roster, grid = make_plan(rounds=3, spare=0), enrol(tmp_path, 5), make_grid(tmp_path)
    start(make_strategy(plan, tmp_path, roster), grid, rounds=1)
    back_up(tmp_path)
    start(make_strategy(plan, tmp_path, roster), grid, rounds=2)
    restore(tmp_path)
    with pytest.raises(BudgetExceeded, match="all of the 3 attempts that the run may take are charged"):
        start(make_strategy(plan, tmp_path, roster), grid)
    require_accounts_agree(tmp_path, plan)


def run_with_liars(tmp_path, monkeypatch, count):
    """Rounds in which so many clients state, signed, that they have begun every attempt of the run."""
    plan = make_plan(7, rounds=2, dropouts=0.15, colluders=0.28)
    assert plan.colluders == 2
    honest = private_client.accept_run

    def lie(config, announcement):
        progress = honest(config, announcement)
        return Progress((1 << 6) - 1, 9) if config.client < count else progress

    monkeypatch.setattr(private_client, "accept_run", lie)
    start(make_strategy(plan, tmp_path, enrol(tmp_path, 7)), make_grid(tmp_path, 7))
    return records(tmp_path)


def test_as_many_liars_as_the_plan_allows_for_move_nothing(tmp_path, monkeypatch):
    found = run_with_liars(tmp_path, monkeypatch, 2)
    assert [(record["attempt"], record["survivors"]) for record in found] == [(0, 7), (0, 7)]
    assert charged_by_the_server(tmp_path) == {(0, 0), (1, 0)}


def test_one_liar_more_than_the_plan_allows_for_is_believed(tmp_path, monkeypatch):
    assert all(record["lost"] for record in run_with_liars(tmp_path, monkeypatch, 3))


def test_a_node_cannot_change_what_its_client_has_begun(tmp_path, caplog):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)

    def changed(client, reply):
        if client == 3 and is_acceptance(reply):
            said = RunAcceptance.decode(from_record(reply.content)[1])
            forged = RunAcceptance(said.client, said.signature, Progress(1))
            reply.content = to_record(RequestKind.ANNOUNCEMENT, forged.encode())
        return reply

    grid.coming = changed
    deadlines = Deadlines(joining=1.0, keys=60.0, grace=0.05, poll=0.001)
    start(make_strategy(plan, tmp_path, roster, deadlines=deadlines), grid)
    assert "node 103 is refused: a signature does not match" in caplog.text
    assert records(tmp_path)[0]["survivors"] == 4
