"""docs/performance.md, made of the results of `scripts/bench all`: no figure in it is typed by hand."""

import json
import math
import re
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

`scripts/bench all` measures time and bytes, compared with peers; a section measured by another command names it. *Busy*
is the same with both cores busy (`--busy`). Seconds depend on the machine, ratios less. A tick marks a met goal.
"""


def write(results: Path, docs: Path) -> list[Path]:
    """Write the page and its plot, and return where they are."""
    idle, *others = read(results)
    (docs / PAGE).write_text(markdown(idle, *others))
    if not (grown := _rows(idle, "growth")):
        return [docs / PAGE]
    plot_rows(grown, docs / PLOT)
    return [docs / PAGE, docs / PLOT]


def read(results: Path) -> tuple[Row, ...]:
    """Return what was measured on idle cores, on busy ones, by protocol, by network and of bounds; empty if nothing."""
    return tuple(_read(results / f"{name}.json") for name in ("idle", "busy", "protocols", "models", "tightening"))


def markdown(
    idle: Row,
    busy: Row,
    protocols: Row = MappingProxyType({}),
    models: Row = MappingProxyType({}),
    bounds: Row = MappingProxyType({}),
) -> str:
    """Return the page."""
    if not idle:
        commands = "`scripts/bench all`, `scripts/bench all --busy`, then `scripts/bench page`"
        return f"{_HEAD}\nNothing is kept yet: {commands}.\n"
    sections = (
        *(part(idle, busy) for part in _SECTIONS),
        _protocols(protocols),
        _models(models),
        _tightening(bounds),
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
        what = "; ".join(part for part in (row["what"], row["error"]) if part)
        goal = _number(row["goal"]) + (", missed" if row["met"] is False else "")
        cells = (_number(row["seconds"]), goal, _number(row.get("limit")), _number(other.get("seconds")))
        body.append((_short(what), *cells))
    head = ("what", "seconds", "goal", "limit", "busy")
    about = (
        "Wall-clock seconds; processor seconds for `client`, `server` and `ledger`. Sizes are clients x coordinates. "
        "In rows *assumed* (the server follows the protocol) and *signed* (it need not), 10 % drop out. *Limit*: the "
        "time of the matrix products or key agreements alone."
    )
    return _section("Goals", about, head, body, _failure(idle, "goals"))


def _short(what: str) -> str:
    """Return what a row of the goals measures, without what the section says for all of them."""
    what = what.replace(", processor seconds", "").replace(", complete", "").replace(", 10 % lost", "")
    what = re.sub(r"([\d,]+) clients, ([\d,]+) coordinates", r"\1 x \2", what)
    what = what.replace("round with all messages", "protocol round")
    what = what.replace("clients in two processes", "two processes")
    what = what.replace(
        "first command after the install: cold compilation, seconds more", "first command: compilation"
    )
    what = what.replace("MiB that all processes grow by from round 100 on", "MiB of growth from round 100")
    return what.replace("ledger of ", "ledger, ").replace(" releases", "").replace("one client", "client")


def _arithmetic(idle: Row, busy: Row) -> str:
    def key(row: Row) -> tuple[object, ...]:
        return row["what"], row["dimension"], row["threads"], row["peer"]

    rows, others = _rows(idle, "arithmetic"), {key(row): row for row in _rows(busy, "arithmetic")}
    largest = max((row["dimension"] for row in rows), default=0)
    shown = [row for row in rows if row["dimension"] == largest]
    threads = {row["what"]: row["ratio"] for row in shown if row["threads"] > 1}
    aimed = {row["what"] for row in shown if row["goal"] is not None}
    missed = {(row["what"], row["peer"]) for row in rows if row["met"] is False}
    body = [
        (
            *(row["what"], _number(row["rate"] / 1e6), _number(threads.get(row["what"])), _peer(row)),
            *(_number(row["ratio"]), _number(others.get(key(row), {}).get("ratio"))),
            row["peer_error"] or ("missed" if (row["what"], row["peer"]) in missed else _met(row)),
        )
        for row in shown
        if row["threads"] == 1 and (row["goal"] is not None or row["what"] not in aimed)
    ]
    head = ("what", "M/s", "speedup", "peer", "ratio", "busy", "goal")
    about = (
        f"Vectors of {largest:,}. *M/s*: millions of coordinates per second in one thread; *speedup*: by a second "
        "thread; *ratio*: our rate over the peer's. A tick holds for all sizes."
    )
    return _section("Arithmetic", about, head, body, _failure(idle, "arithmetic"))


def _secagg(idle: Row, busy: Row) -> str:
    others = iter(_rows(busy, "secagg"))
    body: list[tuple[str, ...]] = []
    scales = set()  # each is measured without signatures, then with them
    for row in _rows(idle, "secagg"):
        other: Row = next(others, {})
        scale = (row["implementation"], row["clients"], row["dimension"], row["dropouts"])
        is_signed = scale in scales
        scales.add(scale)
        if is_signed and row["implementation"] == "flower":
            continue  # it has no signatures
        sizes = (f"{row[name]:,}" for name in ("clients", "dimension", "dropouts"))
        costs = (_number(row[name]) for name in ("client_seconds", "server_seconds", "round_seconds"))
        sent = "" if row["upload_bytes"] is None else f"{row['upload_bytes']:,}"
        name = f"{row['implementation']}, signed" if is_signed else row["implementation"]
        body.append((name, *sizes, *costs, _number(other.get("round_seconds")), sent, row["error"]))
    head = (
        *("implementation", "clients", "coordinates", "lost", "client", "server", "round", "round, busy"),
        *("bytes sent", "note"),
    )
    about = (
        "Pair masks: processor seconds of one client and of the server, wall-clock seconds of a round. Rounds of 20 "
        "clients are signed."
    )
    return _section("Secure aggregation", about, head, body, _failure(idle, "secagg"))


def _protocols(found: Row) -> str:
    if not (rows := _rows(found, "protocols")):
        return ""
    columns = ("client_up", "client_down", "client_seconds", "member_up", "member_down", "member_seconds")
    body = []
    for row in rows:
        if row["dropouts"] and row["dimension"] >= 100_000:
            committee = re.search(r"committee of (\d+)", row["note"])
            scaled = " (scaled)" if "scaled" in row["note"] else ""
            sizes = (f"{row[name]:,}" for name in ("clients", "dimension", "dropouts"))
            costs = (_number(row[name]) for name in (*columns, "server_seconds"))
            body.append((row["protocol"] + scaled, *sizes, committee.group(1) if committee else "", *costs))
    head = (
        *("protocol", "clients", "coordinates", "lost", "committee", "client sends", "receives", "seconds"),
        *("member sends", "receives", "seconds", "server seconds"),
    )
    about = (
        f"`scripts/bench secagg`: bytes without the model, processor seconds, {rows[0]['bits']} bits per coordinate "
        "(Flower: 64, without signatures). Short rounds are medians of three; *scaled* rows are extrapolated. A "
        f"member of the committee is also a client.\n\n{_machine(found)}"
    )
    held = [
        (goal["what"], _number(goal["value"]), _number(goal["limit"]), _met(goal))
        for goal in found["benchmarks"]["protocols"]["goals"]
    ]
    goals = "\n".join(("", *_lines(("goal", "measured", "at most", ""), held), ""))
    return _section("Secure aggregation by protocol", about, head, body) + goals


def _training(idle: Row, busy: Row) -> str:
    def key(row: Row) -> tuple[object, ...]:
        return row["what"], row["dimension"], row["peer"]

    others = {key(row): row for row in _rows(busy, "training")}
    found: dict[tuple[object, ...], dict[bool, Row]] = {}
    for row in _rows(idle, "training"):
        is_private = row["what"].startswith("private")
        pair = (_peer(row), row["dimension"], is_private and "protocol" in row["what"])
        found.setdefault(pair, {})[is_private] = row
    body = []
    for (peer, dimension, messages), rows in found.items():
        (row, *_) = rows.values()
        cells = [
            f"{peer}; all messages" if messages else str(peer),
            f"{dimension:,}",
            _number(row["peer_seconds"]),
        ]
        for ours in (rows.get(False), rows.get(True)):
            other = others.get(key(ours), {}) if ours else {}
            numbers = (ours["seconds"], ours["ratio"], other.get("ratio")) if ours else (None, None, None)
            cells += map(_number, numbers)
        verdicts = {row["met"] for row in rows.values()}
        goal = _met({"met": False if False in verdicts else True in verdicts or None})
        body.append((*cells, row["peer_error"] or goal))
    head = (
        "peer",
        "parameters",
        "peer's",
        "not private",
        "ratio",
        "busy",
        "private",
        "ratio",
        "busy",
        "goal",
    )
    about = (
        "Seconds of a round of 100 clients in one process; ratios are the peer's seconds over ours. A client trains "
        "one epoch of 100 digits; at 19,354 parameters, three epochs of 80."
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
    head = ("backend", "clients", "first round", "round", "busy", "note")
    about = (
        "A private round of `mlp`, 51,370 parameters, 3 epochs of 80 digits. The first round includes the start."
    )
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
    head = ("what", "parameters", "milliseconds", "over DP-SGD", "busy", "goal")
    about = "A round by record over 20 silos, compared with Opacus on pooled records."
    return _section("Silos", about, head, body, _failure(idle, "silos"))


def _models(found: Row) -> str:
    """Return networks compared with a torch loop, and with Opacus by record; the linear layers are summarized."""
    if not (rows := _rows(found, "models")):
        return ""
    networks: dict[str, list[str]] = {}
    for row in found["benchmarks"]["models"]["networks"]:
        name = row["what"].partition(",")[0]
        cells = networks.setdefault(name, [name, f"{row['dimension']:,}", _number(row["peer_seconds"])])
        cells += [_number(row["seconds"]), _number(row["ratio"])]
    ours = [row for row in rows if row["goal"] is not None]
    linear = sorted((row for row in ours if row["what"].startswith("Linear")), key=lambda row: row["ratio"])
    chosen = {"median": linear[len(linear) // 2], "worst": linear[-1]} if linear else {}
    named = [
        (f"{row['what'].partition(':')[0]}, {name} of {len(linear)} widths", row) for name, row in chosen.items()
    ]
    named += [(row["what"].partition(":")[0], row) for row in ours if row not in linear]
    records = [
        (name, *(_number(row[key]) for key in ("dimension", "ratio", "processor_ratio")), _met(row))
        for name, row in named
    ]
    about = (
        "`scripts/bench models`: seconds of a round of 50 clients with 40 examples each, and of a torch loop in one "
        "thread. Second table: a round by record over 20 silos, as a multiple of Opacus' DP-SGD, with the run's files "
        f"in memory (a disk adds five syncs).\n\n{_machine(found)}"
    )
    head = ("network", "parameters", "loop", "not private", "speedup", "private", "speedup")
    beside = _lines(("by record", "parameters", "over DP-SGD", "processor", "goal"), records)
    return _section("Networks", about, head, networks.values()) + "\n".join(("", *beside, ""))


def _tightening(found: Row) -> str:
    if not (rows := _rows(found, "tightening")):
        return ""
    about = (
        "`scripts/bench tightening`: epsilon by an earlier bound / ours / a lower bound on the true value, at delta "
        "population^-1.1. Rows: zero-out under `fixed`; readers of the models under `once`; a client's account of two "
        "mechanisms; a ledger of two kinds of plans."
    )
    cells = {
        (row["bound"], row["population"], row["epsilon"]): " / ".join(
            _number(row[name]) for name in ("before", "after", "lower")
        )
        for row in rows
    }
    levels = sorted({epsilon for _, _, epsilon in cells})
    sizes: dict[str, list[int]] = {}
    for bound, size in dict.fromkeys(key[:2] for key in cells):
        sizes.setdefault(bound, []).append(size)
    body = [
        ("" if at else bound, f"{size:,}", *(cells.get((bound, size, epsilon), "") for epsilon in levels))
        for bound, of_bound in sizes.items()
        for at, size in enumerate(of_bound)
    ]
    head = ("bound", "population", *(f"epsilon {epsilon:g}" for epsilon in levels))
    return _section("Bounds on epsilon", about, head, body)


def _deployment(idle: Row, _busy: Row) -> str:
    rows = _rows(idle, "deployment")
    body = [
        (
            *(row["what"], row["executor"], str(row["clients"]), str(row["rounds"]), _number(row["seconds"])),
            row["error"],
        )
        for row in rows
    ]
    head = ("what", "executor", "clients", "rounds", "seconds", "note")
    about = "Median seconds of a round over Flower with TLS, all nodes on this machine."
    found = deployment.goals([deployment.DeploymentRow(**row) for row in rows])
    missed = [
        f"{goal.what} is {_number(goal.value)}, at most {_number(goal.limit)}" for goal in found if not goal.met
    ]
    met = f"{len(found) - len(missed)} of {len(found)}"
    goals = (
        f"\nGoals met (ratios of these rows, and the time of 500 rounds): {met}. {'; '.join(missed)}".rstrip()
        + "\n"
    )
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
    head = ("what", "from, to", "first", "last", "busy", "exponent")
    about = (
        f"Seconds at the first and last size; an exponent of 1 is linear.\n\n![How cost grows]({PLOT.as_posix()})"
    )
    return _section("Growth", about, head, body, _failure(idle, "growth"))


_SECTIONS = (_goals, _arithmetic, _secagg, _training, _engines, _silos, _deployment, _growth)


def _failure(results: Row, part: str) -> str:
    return str(results["benchmarks"].get(part, {}).get("error", ""))


def _peer(row: Row) -> str:
    """Return the peer's name, in few words."""
    peer = str(row["peer"]).replace(" of the vector", "").replace("the same without privacy", "ours, not private")
    return peer.replace("its default", "default")


def _section(title: str, about: str, head: Sequence[str], body: Iterable[Sequence[str]], failed: str = "") -> str:
    rows = list(body)
    if not rows and not failed:
        return ""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)] or range(len(head))
    lines = _lines([head[place] for place in kept], ([row[place] for place in kept] for row in rows))
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
    return {None: "", True: "✓", False: "missed"}[row["met"]]
