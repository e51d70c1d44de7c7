from dataclasses import replace

import pytest

from benchmarks import lattice as bench
from benchmarks import page, tables
from benchmarks.lattice import BY_SLOT, LATTICE, ProtocolRow
from d2pfed.errors import ConfigError
from d2pfed.secagg.lattice import messages
from d2pfed.secagg.lattice.opening import Opener


@pytest.mark.parametrize("protocol", [LATTICE, BY_SLOT])
def test_a_lattice_round_is_checked_and_measured(protocol):
    row = bench.measure_lattice(protocol, 64, 100, 6)
    session = bench.lattice_session(protocol, 64, 100)
    assert row.client_up == messages.contribution_bytes(session, 64)
    vouchers = session.committee.threshold + 1
    assert (row.client_down > 32 * 64 + (64 + 104) * vouchers) == (
        protocol == BY_SLOT
    )  # each with its certificate
    assert row.member_up < row.member_down
    assert min(row.client_seconds, row.member_seconds, row.server_seconds) > 0


def test_a_wrong_sum_is_a_benchmark_of_nothing(monkeypatch):
    kept = Opener._unmask
    monkeypatch.setattr(Opener, "_unmask", lambda self, seeds: kept(self, seeds) ^ 1)
    with pytest.raises(ConfigError, match="its cost means nothing"):
        bench.measure_lattice(LATTICE, 64, 100, 0)


def row_of(protocol: str, clients: int, dimension: int, seconds: float, lost: int = 0) -> ProtocolRow:
    return ProtocolRow(
        protocol=protocol,
        clients=clients,
        dimension=dimension,
        bits=11,
        dropouts=lost,
        client_up=3_000 + dimension * 11 // 8,
        client_seconds=seconds / 100,
        server_seconds=seconds,
    )


def test_large_rows_are_scaled_and_say_so():
    rows = [row_of(BY_SLOT, 1_000, 20_000, 1.0), row_of(BY_SLOT, 1_000, 1_000_000, 5.0)]
    rows.append(row_of(BY_SLOT, 10_000, 20_000, 9.0))
    found = {row.size: row for row in rows}
    assert bench.scaled_lattice((10_000, 100_000, 0), found) is None
    scaled = bench.scaled_lattice((10_000, 1_000_000, 0), found)
    assert (scaled.server_seconds, scaled.client_seconds) == (49.0, 0.05)
    assert scaled.client_up == 3_000 + 1_375_000
    assert scaled.note == "vectors scaled from 1,000 clients"
    pairs = [row_of("pairwise", 1_000, 20_000, 2.0), row_of("pairwise", 1_000, 100_000, 10.0)]
    scaled = bench._scaled_pairwise((1_000, 1_000_000, 0), {row.size: row for row in pairs})
    assert (scaled.server_seconds, scaled.client_up) == (pytest.approx(100.0), 3_000 + 1_375_000)
    assert "scaled from 20,000 and 100,000 coordinates" in scaled.note
    assert bench._scaled_pairwise((1_000, 100_000, 0), {row.size: row for row in pairs}) is None


def test_short_rounds_are_measured_three_times():
    rows = iter([row_of(LATTICE, 100, 1_000, seconds) for seconds in (0.3, 0.9, 0.4)])
    steady = bench.steady(lambda: next(rows))
    assert (steady.server_seconds, steady.client_seconds, steady.member_seconds) == (0.4, 0.004, None)
    assert steady.note == "median of three rounds"
    long = row_of("pairwise", 1_000, 100_000, 12.0)
    assert bench.steady(lambda: long) is long


def test_goals_are_ratios_to_pair_masks():
    lattice, pairwise = row_of(LATTICE, 1_000, 100_000, 0.4, 100), row_of("pairwise", 1_000, 100_000, 12.0, 100)
    pairwise = replace(pairwise, client_up=137_500 + 90_000, client_seconds=0.4)
    by_slot, large = row_of(BY_SLOT, 1_000, 100_000, 0.5, 100), row_of(BY_SLOT, 10_000, 100_000, 6.5, 1_000)
    held = bench.goals([lattice, pairwise, by_slot, large])
    assert [goal.value for goal in held] == pytest.approx([3_000, 1 / 30, 0.01, 1 / 30, 13.0])
    assert [goal.met for goal in held] == [True, True, True, True, False]
    assert {goal.met for goal in bench.goals([])} == {None}
    rows = [tables.as_dict(row) for row in (lattice, large)]
    part = {"rows": rows, "goals": [tables.as_dict(goal) for goal in held]}
    found = {"date": "today", "machine": "", "versions": "", "benchmarks": {"protocols": part}}
    text = page._protocols(found)
    assert "| lattice | 1,000 | 100,000 | 100 | 140,500 | 0.004 | 0.4 |" in text
    assert "| the server's processor time at 10,000 clients over 1,000 | 13 | 12 | missed |" in text
    assert len(list(tables.tables_of([lattice, large]))) == 1
    assert "lattice: 1,000 clients" in tables.progress(lattice)
