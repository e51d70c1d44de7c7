import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import mean, mean_page, page, record, tables
from benchmarks.arithmetic import SpeedRow
from benchmarks.engines_row import EngineRow
from benchmarks.goals import GoalRow
from benchmarks.growth import GrowthRow
from benchmarks.parts import Measured
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


def measured():
    yield ROW
    yield ROW


def failing():
    yield ROW
    raise ArithmeticError("wrong")


def crashing():
    yield ROW
    time.sleep(0.2)  # until the row has been sent
    os._exit(3)


def test_all_writes_machine_versions_date_and_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "PARTS", {"first": measured})
    status, out, err = bench(monkeypatch, capsys, "all", "--out", str(tmp_path / "bench.json"))
    found = json.loads((tmp_path / "bench.json").read_text())
    assert status == 0
    assert out.count("One simulated round") == 1
    assert "first: " in err
    assert set(found) == {"date", "machine", "versions", "busy_loops", "benchmarks"}
    assert found["versions"]["numpy"]
    part = found["benchmarks"]["first"]
    assert [row["round_seconds"] for row in part["rows"]] == [0.5, 0.5]
    assert part["seconds"] > 0
    assert part["error"] == ""


def test_a_part_that_fails_or_crashes_keeps_its_rows_and_stops_no_other(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "PARTS", {"a": failing, "b": crashing, "c": measured})
    status, out, err = bench(monkeypatch, capsys, "all", "--out", str(tmp_path / "bench.json"))
    found = json.loads((tmp_path / "bench.json").read_text())["benchmarks"]
    assert status != 0
    assert [len(part["rows"]) for part in found.values()] == [1, 1, 2]
    assert found["a"]["error"] == "ArithmeticError: wrong"
    assert "exit code 3" in found["b"]["error"]
    assert "a failed: ArithmeticError: wrong; b failed: " in err
    assert out.count("One simulated round") == 3


def test_only_known_parts_are_run(monkeypatch, capsys, tmp_path):
    status, _, err = bench(monkeypatch, capsys, "all", "--part", "nothing", "--out", str(tmp_path / "bench.json"))
    assert (status != 0, "part must be one of goals" in err) == (True, True)


def test_busy_loops_run_beside_the_parts_and_end(monkeypatch, capsys, tmp_path):
    seen = []

    def loops():
        """The endless loops that this process has started, whatever state they are in."""
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                _, _, about = (place / "stat").read_text().rpartition(") ")
                if about.split()[1] == str(os.getpid()) and b"while True" in (place / "cmdline").read_bytes():
                    yield place

    def run_part(_measure, _tell):
        seen.append(len(list(loops())))
        return Measured(rows=[ROW], seconds=1.0)

    monkeypatch.setattr(command, "BUSY_PARTS", {"first": measured})
    monkeypatch.setattr(command, "run_part", run_part)
    status, _, _ = bench(monkeypatch, capsys, "all", "--busy", "--out", str(tmp_path / "found.json"))
    assert status == 0
    assert seen == [2]
    assert list(loops()) == []
    assert json.loads((tmp_path / "found.json").read_text())["busy_loops"] == 2


def results(directory: Path, name: str, seconds: float, error: str = "") -> None:
    growth = [
        GrowthRow(what="a", across=across, size=size, seconds=seconds * size**2)
        for across in ("clients", "releases")
        for size in (10, 20)
    ]
    goal = GoalRow(what="a round", seconds=seconds, processor_seconds=None, goal=0.5, limit=0.25)
    speed = SpeedRow(
        what="pack",
        dimension=9,
        threads=1,
        rate=2e6,
        first_call_seconds=1.0,
        peer="numpy",
        peer_rate=1e6,
        goal=1.5,
    )
    rows = {"goals": [goal], "arithmetic": [speed], "engines": [ROW], "growth": growth}
    parts = {
        part: {"seconds": 1.0, "error": error if part == "engines" else "", "rows": list(map(tables.as_dict, own))}
        for part, own in rows.items()
    }
    record.write(directory / f"{name}.json", record.surroundings(), parts)


def test_the_page_is_made_of_both_results(monkeypatch, capsys, tmp_path):
    results(tmp_path, "idle", 0.4, "lost")
    results(tmp_path, "busy", 0.6)
    (tmp_path / "docs" / "img").mkdir(parents=True)
    words = ("page", "--results", str(tmp_path), "--docs", str(tmp_path / "docs"))
    assert bench(monkeypatch, capsys, *words)[0] == 0
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "| a round | 0.4 | 0.5 | 0.25 | 0.6 |" in page
    assert "| pack | 2 | numpy | 2 | 2 | ✓ |" in page
    assert "This part failed: lost" in page
    assert "| a | 10 to 20 clients | 40 | 160 | 240 | 2.00 |" in page
    assert "## Deployment" not in page
    assert (tmp_path / "docs" / "img" / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_the_documents_show_the_results_that_are_kept():
    assert page.markdown(*page.read(record.RESULTS)) == (record.DOCS / page.PAGE).read_text(), "scripts/bench page"


@pytest.mark.parametrize(
    "words",
    [
        *((), ("all",), ("arithmetic",), ("secagg",), ("ledger",), ("statistics",), ("goals",), ("engines",)),
        *(("training",), ("page",)),
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
    base = {"clients": 1, "dimension": 2, "bits": 3, "dropouts": 0}
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


def test_models_shows_networks_beside_a_loop_and_records_beside_opacus(monkeypatch, capsys):
    records = SiloRow(
        what="Linear(49, 10)", dimension=500, rounds=2, seconds=1.0, processor_seconds=1.0, ratio=2.5
    )
    asked = []
    monkeypatch.setattr("benchmarks.models.bench_networks", lambda repeats: asked.append(repeats) or iter(()))
    monkeypatch.setattr(
        "benchmarks.models.bench_records", lambda *given: asked.append([*map(list, given[1:])]) or iter([records])
    )
    status, out, _ = bench(monkeypatch, capsys, "models", "--repeats", "2", "--step", "64", "--json")
    assert status == 0
    assert json.loads(out)["rows"][0]["ratio"] == 2.5
    assert asked == [2, [[1, 65, 129]]]
    assert "2.5" in bench(monkeypatch, capsys, "models")[1]


def test_networks_of_the_benchmark_take_their_inputs():
    from benchmarks.networks import CLASSES, NETWORKS  # noqa: PLC0415 - torch takes seconds to load

    for build, draw in NETWORKS.values():
        assert build()(draw(2)).shape == (2, CLASSES)


def test_bytes_are_those_of_the_plans(monkeypatch, capsys):
    status, out, _ = bench(monkeypatch, capsys, "bytes", "--clients", "100", "--epsilon", "1", "--json")
    assert status == 0
    off, auto, stated = json.loads(out)["rows"]
    assert (auto["coordinates"], stated["coordinates"]) == (1024, 2048)
    for row in (off, auto, stated):
        assert row["vector"] == row["coordinates"] * row["bits"] // 8
        assert row["vector"] < row["sent"]
        assert row["sent"] < row["received"] < row["floats"]  # the model at 8 bits
    assert auto["sent"] < stated["sent"] < off["sent"]
    status, out, _ = bench(monkeypatch, capsys, "bytes", "--clients", "100", "--epsilon", "1")
    assert f"{auto['sent']:,}" in out


def test_a_private_mean_is_about_as_far_off_as_a_trusted_servers(tmp_path):
    rows = list(mean.rows_of("grid", mean.target_of(100, 250, 2.0)))
    assert len(rows) == 1
    assert 0.9 < rows[0].ratio < 1.1
    curve = [replace(rows[0], what="curve", bits=bits) for bits in (10, 12)]
    found = {"rows": [asdict(row) | {"ratio": row.ratio} for row in (*curve, *rows)]}
    record.write(tmp_path / "mean.json", record.surroundings(), {"mean": found})
    (tmp_path / "img").mkdir()
    page, plot = mean_page.write(tmp_path, tmp_path / "mean.json")
    assert f"| 100 | 250 | 2 | {rows[0].ratio:.3f} ({rows[0].bits}) |" in page.read_text()
    assert plot.stat().st_size > 10_000
