"""docs/performance.md, made of the results of `scripts/bench all`: no figure in it is typed by hand."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any  # rows as JSON has them

from benchmarks import deployment, record
from benchmarks.growth import plot_rows

PAGE, PLOT = Path("performance.md"), Path("img") / "growth.png"
Row = Mapping[str, Any]

_HEAD = """# Performance

<!-- Made by `scripts/bench page` of benchmarks/results; edits are lost. -->

This page compares the costs of d2pfed with peers and with the limits of the machine, in one run of `scripts/bench all`.
`scripts/bench all --busy` repeats it while two processes keep two cores busy: the columns named *busy*. Compare
ratios; seconds are those of one machine. `benchmarks/results` has every row.
"""


def write(results: Path, docs: Path) -> list[Path]:
    """Write the page and its plot, and return where they are."""
    idle, busy, protocols, models = read(results)
    (docs / PAGE).write_text(markdown(idle, busy, protocols, models))
    if not (grown := _rows(idle, "growth")):
        return [docs / PAGE]
    plot_rows(grown, docs / PLOT)
    return [docs / PAGE, docs / PLOT]


def read(results: Path) -> tuple[Row, Row, Row, Row]:
    """Return what was measured on idle cores, on busy ones, by protocol and by network; of no file an empty one."""
    idle, busy, protocols, models = (
        _read(results / f"{name}.json") for name in ("idle", "busy", "protocols", "models")
    )
    return idle, busy, protocols, models


def markdown(
    idle: Row, busy: Row, protocols: Row = MappingProxyType({}), models: Row = MappingProxyType({})
) -> str:
    """Return the page."""
    if not idle:
        commands = "`scripts/bench all`, `scripts/bench all --busy`, then `scripts/bench page`"
        return f"{_HEAD}\nNothing is kept yet: {commands}.\n"
    sections = (
        *(part(idle, busy) for part in _SECTIONS),
        _protocols(protocols),
        _models(models),
        _durations(idle, busy),
    )
    parts = (_HEAD, _machines(idle, busy), *sections)
    return "\n".join(part for part in parts if part)


def _machines(idle: Row, busy: Row) -> str:
    lines = [f"Idle: {record.line(idle)}.\n"]
    if busy:
        lines.append(f"Busy: {_machine(busy)}\n")
    return "\n".join(lines)


def _machine(found: Row) -> str:
    """Return when and on what something was measured, without the versions of libraries."""
    return record.line(found).partition("; python")[0] + "."


def _goals(idle: Row, busy: Row) -> str:
    others = {row["what"]: row for row in _rows(busy, "goals")}
    body = []
    for row in _rows(idle, "goals"):
        other = others.get(row["what"], {})
        what = "; ".join(part for part in (row["what"], row["error"] or row["note"]) if part)
        goal = _number(row["goal"]) + (", missed" if row["met"] is False else "")
        cells = (_number(row["seconds"]), goal, _number(row.get("limit")), _number(other.get("seconds")))
        what = what.replace("processor seconds", "processor").replace(", complete", "")
        body.append((what, *cells))
    head = ("what", "seconds", "goal", "limit", "busy")
    about = (
        "Wall-clock seconds, or processor seconds where a row says so. The limit is the least that the machine needs: "
        "for training the floating-point operations of the trained layers, for the protocol X25519 alone."
    )
    return _section("Goals", about, head, body, _failure(idle, "goals"))


def _arithmetic(idle: Row, busy: Row) -> str:
    def key(row: Row) -> tuple[object, ...]:
        return row["what"], row["dimension"], row["threads"], row["peer"]

    rows, others = _rows(idle, "arithmetic"), {key(row): row for row in _rows(busy, "arithmetic")}
    largest = max((row["dimension"] for row in rows), default=0)
    shown = [row for row in rows if row["dimension"] == largest]
    threads = {row["what"]: row["ratio"] for row in shown if row["threads"] > 1}
    missed = {(row["what"], row["peer"]) for row in rows if row["met"] is False}
    body = [
        (
            *(row["what"], _number(row["rate"] / 1e6), _number(threads.get(row["what"])), row["peer"]),
            *(_number(row["ratio"]), _number(others.get(key(row), {}).get("ratio"))),
            row["peer_error"] or ("no" if (row["what"], row["peer"]) in missed else _met(row)),
        )
        for row in shown
        if row["threads"] == 1
    ]
    head = ("what", "M/s", "two threads", "peer", "ratio", "busy", "goal met")
    about = (
        f"Millions of coordinates per second in one thread, for {largest:,} coordinates; the speedup by two threads; "
        "and our rate over the peer's or the limit's. A goal is met if it is met for all sizes."
    )
    return _section("Arithmetic", about, head, body, _failure(idle, "arithmetic"))


def _secagg(idle: Row, busy: Row) -> str:
    others = iter(_rows(busy, "secagg"))
    body = []
    for row in _rows(idle, "secagg"):
        other: Row = next(others, {})
        sizes = (f"{row[name]:,}" for name in ("clients", "dimension", "dropouts"))
        costs = (_number(row[name]) for name in ("client_seconds", "server_seconds", "round_seconds"))
        sent = "" if row["upload_bytes"] is None else f"{row['upload_bytes']:,}"
        body.append(
            (row["implementation"], *sizes, *costs, _number(other.get("round_seconds")), sent, row["error"])
        )
    head = (
        *("implementation", "clients", "coordinates", "lost", "client", "server", "round", "round, busy"),
        *("bytes sent", "note"),
    )
    about = "Processor seconds of one client and of the server, wall-clock seconds of a whole round."
    return _section("Secure aggregation", about, head, body, _failure(idle, "secagg"))


def _protocols(found: Row) -> str:
    if not (rows := _rows(found, "protocols")):
        return ""
    columns = ("client_up", "client_down", "client_seconds", "member_up", "member_down", "member_seconds")
    body = [
        (
            "; ".join(part for part in (row["protocol"], row["note"]) if part),
            *(f"{row[name]:,}" for name in ("clients", "dimension", "dropouts")),
            *(_number(row[name]) for name in (*columns, "server_seconds")),
        )
        for row in rows
        if row["dropouts"] and row["dimension"] >= 100_000
    ]
    head = (
        *("protocol", "clients", "coordinates", "lost", "client sends", "receives", "seconds"),
        *("member sends", "receives", "seconds", "server seconds"),
    )
    about = (
        f"`scripts/bench secagg`: signed rounds with dropouts, bytes without the model, processor seconds; rings of "
        f"{rows[0]['bits']} bits, Flower's of 64. A committee member's figures are added to those of a client.\n\n"
        f"{_machine(found)}"
    )
    held = [
        (goal["what"], _number(goal["value"]), _number(goal["limit"]), _met(goal))
        for goal in found["benchmarks"]["protocols"]["goals"]
    ]
    goals = "\n".join(("", *_lines(("goal", "measured", "at most", "met"), held), ""))
    return _section("Secure aggregation by protocol", about, head, body) + goals


def _training(idle: Row, busy: Row) -> str:
    def key(row: Row) -> tuple[object, ...]:
        return row["what"], row["dimension"], row["peer"]

    others = {key(row): row for row in _rows(busy, "training")}
    body = [
        (
            *(row["what"], f"{row['clients']:,}", f"{row['dimension']:,}", _number(row["seconds"]), row["peer"]),
            *(_number(row["peer_seconds"]), _number(row["ratio"])),
            *(_number(others.get(key(row), {}).get("ratio")), row["peer_error"] or _met(row)),
        )
        for row in _rows(idle, "training")
    ]
    head = ("what", "clients", "parameters", "seconds", "peer", "its", "ratio", "busy", "goal met")
    about = (
        "Wall-clock seconds of a round in one process; the ratio is the peer's seconds over ours. The first rows are "
        "3 epochs of 80 digits, the others one epoch of 100, in steps of 10."
    )
    return _section("Training", about, head, body, _failure(idle, "training"))


def _engines(idle: Row, busy: Row) -> str:
    others = {row["engine"]: row for row in _rows(busy, "engines")}
    body = [
        (
            *(row["engine"], f"{row['clients']:,}", _number(row["start_seconds"]), _number(row["round_seconds"])),
            *(_number(others.get(row["engine"], {}).get("round_seconds")), row["error"]),
        )
        for row in _rows(idle, "engines")
    ]
    head = ("backend", "clients", "start and first round", "round", "round, busy", "note")
    about = "A private round of `mlp`, 51,370 parameters, 3 epochs of 80 digits, in wall-clock seconds."
    return _section("Backends of the simulation", about, head, body, _failure(idle, "engines"))


def _silos(idle: Row, busy: Row) -> str:
    others = {(row["what"], row["dimension"]): row for row in _rows(busy, "silos")}
    body = [
        (
            *(row["what"], f"{row['dimension']:,}", _number(1e3 * row["seconds"]), _number(row["ratio"])),
            *(_number(others.get((row["what"], row["dimension"]), {}).get("ratio")), _met(row)),
        )
        for row in _rows(idle, "silos")
    ]
    head = ("what", "parameters", "milliseconds", "over DP-SGD", "over DP-SGD, busy", "goal met")
    about = "A round with privacy of a record over 20 silos, compared with Opacus on the pooled records."
    return _section("Silos", about, head, body, _failure(idle, "silos"))


def _models(found: Row) -> str:
    """Return networks compared with a torch loop, and with Opacus by record; the linear layers are summarized."""
    if not (rows := _rows(found, "models")):
        return ""
    networks = [
        (row["what"], f"{row['dimension']:,}", *map(_number, (row["seconds"], row["peer_seconds"], row["ratio"])))
        for row in found["benchmarks"]["models"]["networks"]
    ]
    ours = [row for row in rows if row["goal"] is not None]
    linear = sorted((row for row in ours if row["what"].startswith("Linear")), key=lambda row: row["ratio"])
    chosen = {"median": linear[len(linear) // 2], "worst": linear[-1]} if linear else {}
    named = [(f"{row['what']}, the {name} of {len(linear)} widths", row) for name, row in chosen.items()]
    named += [(row["what"], row) for row in ours if row not in linear]
    records = [
        (name, *(_number(row[key]) for key in ("dimension", "ratio", "processor_ratio")), _met(row))
        for name, row in named
    ]
    about = (
        "`scripts/bench models`: seconds of a round of 50 clients with 40 examples each, compared with a torch loop in "
        "one thread; and a round by record compared with Opacus on pooled records, the run's directory in memory: on a "
        f"disk each round waits for five more syncs.\n\n{_machine(found)}"
    )
    head = ("network", "parameters", "seconds", "loop", "times as fast")
    beside = _lines(("by record", "parameters", "over DP-SGD", "over DP-SGD, processor", "goal met"), records)
    return _section("Networks", about, head, networks) + "\n".join(("", *beside, ""))


def _deployment(idle: Row, _busy: Row) -> str:
    rows = _rows(idle, "deployment")
    body = [
        (
            *(row["what"], row["executor"], str(row["clients"]), str(row["rounds"]), _number(row["seconds"])),
            row["error"] or deployment.in_words(row["stages"]),
        )
        for row in rows
    ]
    head = ("what", "executor", "clients", "rounds", "seconds", "of which")
    about = "Median wall-clock seconds of a round over Flower with TLS, all nodes on this machine."
    found = deployment.goals([deployment.DeploymentRow(**row) for row in rows])
    met = [(goal.what, _number(goal.value), _number(goal.limit), _met({"met": goal.met})) for goal in found]
    goals = "\n".join(("", *_lines(("goal", "measured", "at most", "met"), met), ""))
    return _section("Deployment", about, head, body, _failure(idle, "deployment")) + (goals if rows else "")


def _growth(idle: Row, busy: Row) -> str:
    others = {(row["what"], row["size"]): row["seconds"] for row in _rows(busy, "growth")}
    body = []
    for (what, across), rows in _series(_rows(idle, "growth")).items():
        first, last = rows[0], rows[-1]
        slope = math.log(last["seconds"] / first["seconds"]) / math.log(last["size"] / first["size"])
        sizes = f"{first['size']:,} to {last['size']:,} {across}"
        seconds = (_number(first["seconds"]), _number(last["seconds"]))
        body.append((what, sizes, *seconds, _number(others.get((what, last["size"]))), f"{slope:.2f}"))
    head = ("what", "from, to", "seconds at first", "at last", "at last, busy", "exponent")
    about = f"The exponent is the slope on logarithmic axes: 1 is linear.\n\n![How cost grows]({PLOT.as_posix()})"
    return _section("Growth", about, head, body, _failure(idle, "growth"))


def _durations(idle: Row, busy: Row) -> str:
    others = busy["benchmarks"] if busy else {}
    parts = [
        f"{name} {found['seconds']:.0f}" + (f" (busy {others[name]['seconds']:.0f})" if name in others else "")
        for name, found in idle["benchmarks"].items()
    ]
    return f"Seconds that each part takes: {', '.join(parts)}.\n"


_SECTIONS = (_goals, _arithmetic, _secagg, _training, _engines, _silos, _deployment, _growth)


def _failure(results: Row, part: str) -> str:
    return str(results["benchmarks"].get(part, {}).get("error", ""))


def _section(title: str, about: str, head: Sequence[str], body: Iterable[Sequence[str]], failed: str = "") -> str:
    lines = list(_lines(head, body))
    if len(lines) == 2 and not failed:
        return ""
    why = f"This part failed: {failed}\n\n" if failed else ""
    about = f"{about}\n\n" if about else ""
    return f"## {title}\n\n{about}{why}" + "\n".join(lines) + "\n"


def _lines(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for cells in body:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _series(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["what"], row["across"]), []).append(row)
    return found


def _rows(results: Row, part: str) -> list[Row]:
    return list(results["benchmarks"].get(part, {}).get("rows", ())) if results else []


def _read(path: Path) -> Row:
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    return found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _met(row: Row) -> str:
    return {None: "", True: "yes", False: "no"}[row["met"]]
