import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.table import Table

from benchmarks import __main__ as command
from benchmarks import tables
from benchmarks.engines_row import EngineRow
from benchmarks.growth import GrowthRow
from benchmarks.secagg import SecAggRow
from benchmarks.silos_row import SiloRow
from benchmarks.training_row import TrainingRow
from d2pfed.cli import run

ROW = EngineRow(engine="process", clients=3, start_seconds=1.0, round_seconds=0.5)


def bench(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    status = 0
    try:
        run(command.bench, "bench")
    except SystemExit as end:
        status = int(end.code or 0)
    output = capsys.readouterr()
    return status, output.out, output.err


def measured() -> tuple[list[dict[str, object]], Table]:
    return [tables.as_dict(ROW)], tables.engine_table([ROW])


def test_all_writes_machine_versions_date_and_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "_MODEST_RUNS", {"first": measured, "second": measured})
    status, out, _ = bench(monkeypatch, capsys, "all", "--out", str(tmp_path / "bench.json"))
    found = json.loads((tmp_path / "bench.json").read_text())
    assert status == 0
    assert out.count("One simulated round") == 2
    assert set(found) == {"date", "machine", "versions", "busy_loops", "benchmarks"}
    assert found["versions"]["numpy"]
    assert found["benchmarks"]["second"]["rows"][0]["round_seconds"] == 0.5


def grown() -> tuple[list[dict[str, object]], Table]:
    rows = [
        GrowthRow(what="a", across=across, size=size, seconds=size / 7)
        for across in ("clients", "releases")
        for size in (10, 20)
    ]
    return [tables.as_dict(row) for row in rows], tables.growth_table(rows)


def test_all_writes_a_plot_of_each_growth_beside_the_rows_and_may_be_busy(monkeypatch, capsys, tmp_path):
    seen = []

    def growth():
        seen.append(len(list(children())))
        return grown()

    def children():
        for place in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if f") R {os.getpid()} " in place.read_text() or f") S {os.getpid()} " in place.read_text():
                    yield place

    before = len(list(children()))
    monkeypatch.setattr(command, "_MODEST_RUNS", {"growth": growth})
    status, out, _ = bench(monkeypatch, capsys, "all", "--busy", "--out", str(tmp_path / "found.json"))
    assert status == 0
    assert seen == [before + 2]
    assert len(list(children())) == before
    assert json.loads((tmp_path / "found.json").read_text())["busy_loops"] == 2
    for across in ("clients", "releases"):
        assert (tmp_path / f"found-{across}.png").read_bytes().startswith(b"\x89PNG")
        assert f"found-{across}.png" in out


def test_a_failing_benchmark_loses_nothing_of_those_before_it(monkeypatch, capsys, tmp_path):
    def fail() -> tuple[list[dict[str, object]], Table]:
        raise ArithmeticError("wrong")

    monkeypatch.setattr(command, "_MODEST_RUNS", {"first": measured, "second": fail})
    with pytest.raises(ArithmeticError):
        bench(monkeypatch, capsys, "all", "--out", str(tmp_path / "bench.json"))
    assert list(json.loads((tmp_path / "bench.json").read_text())["benchmarks"]) == ["first"]


@pytest.mark.parametrize(
    "words",
    [
        *((), ("all",), ("arithmetic",), ("secagg",), ("ledger",), ("statistics",), ("goals",), ("engines",)),
        ("training",),
    ],
)
def test_help_is_plain_text(monkeypatch, capsys, words):
    status, out, _ = bench(monkeypatch, capsys, *words, "--help")
    assert status == 0
    assert not set(out) & set("╭│╰\\\x1b")
    assert "..." not in out.replace("[ARGS]...", "")
    assert out.startswith("Usage: bench ")
    assert "completion" not in out


def test_an_unknown_benchmark_is_one_line(monkeypatch, capsys):
    status, _, text = bench(monkeypatch, capsys, "nothing")
    assert (status, text.count("\n")) == (2, 1)
    assert text.startswith("bench: ")


def test_a_row_without_a_measurement_shows_its_error():
    base = {"clients": 1, "dimension": 2, "bits": 3, "neighbours": 0, "dropouts": 0}
    nothing = dict.fromkeys(
        ("client_seconds", "server_seconds", "round_seconds", "upload_bytes", "server_peak_mib")
    )
    row = SecAggRow(implementation="flower", **base, **nothing, error="gone")
    assert list(tables.secagg_table([row]).columns[-1].cells) == ["gone"]
    trained = TrainingRow(
        what="a", clients=1, examples=1, epochs=1, dimension=1, seconds=1.0, processor_seconds=None, peer="b",
        peer_seconds=None, peer_processor_seconds=None, goal=2.0, peer_error="gone",
    )  # fmt: skip
    assert list(tables.training_table([trained]).columns[-1].cells) == ["gone"]


def test_silos_shows_how_many_times_the_seconds_of_dp_sgd_a_round_takes(monkeypatch, capsys):
    peer = SiloRow(what="Opacus", dimension=10, rounds=2, seconds=0.002, processor_seconds=0.002)
    ours = [
        SiloRow(
            what="ours", dimension=10, rounds=2, seconds=0.002 * ratio, processor_seconds=0.01, ratio=ratio, goal=3
        )
        for ratio in (2.5, 3.5)
    ]
    monkeypatch.setattr("benchmarks.silos.bench_silos", lambda _rounds: iter([peer, *ours]))
    status, out, _ = bench(monkeypatch, capsys, "silos", "--json")
    assert (status, [row["met"] for row in json.loads(out)["rows"]]) == (0, [None, True, False])
    assert "3.5" in bench(monkeypatch, capsys, "silos")[1]
