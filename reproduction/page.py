"""The page on the reproduction, written from what the results left behind."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from d2pfed.errors import ConfigError
from reproduction.benchmarks_page import benchmarks_page, is_benchmark
from reproduction.catalogue import CATALOGUE
from reproduction.errata.finding import COLUMNS

_HEAD = """# The paper, reproduced and judged

The figures of the D2P-Fed paper ([arXiv 2006.13039](https://arxiv.org/abs/2006.13039)) made again, its theorems
computed, and both set beside what the paper says.

- **Epsilon.** *As published* is by the paper's sensitivity and accountant. *True* is what the library proves for the
  run that was made, an upper bound: for who sees the released models, and for the server at the plan's cap on
  participations. The paper has no cap, so all rounds count. cpSGD's bound is by its own theorem, which is loose.
  *Void*: no bound holds.
- **Accuracy** is on test data that was opened once, at the end of each run: the mean over seeds, the lowest and the
  highest. A table without a column of seeds is of one seed. Bands in the pictures run from the lowest seed to the
  highest. A seed decides the initial model, the cohorts, the order of examples and the noise, and is known, so these
  runs protect nobody.
- **The paper's numbers.** It prints few of its end points: those of figure 3 and the non-private lines. The others are
  the last values of its authors' public records, which do not always agree with it (erratum on the records).
- ***As the code ran*** is the authors' loop with what their public code does and the paper does not say; it was written
  anew from that code.

This page is written by `scripts/reproduce page` from the files in `results/`; `scripts/reproduce NAME --repeats N`
makes one of them, and goes on where it was stopped. What each training run came to is in `results/records`: with
`--out reproduction/results` a command runs only what has no record there, and with `--kept` nothing.
"""
_SERVER = "true epsilon, server"
_OLD = """
Tables without a column of seeds are of an older version, and count for the server the rounds of the client that took
part most.
"""
_LARGE = 1e5  # from here on floats in tables are written out, with commas


def page(folder: Path, pictures: str) -> str:
    """Return the page on the results whose JSON files lie in a folder; `pictures` is where the page finds it."""
    records = [record for record in _records(folder) if not is_benchmark(record)]
    old = any(
        _SERVER in _strings(each["columns"]) and "seeds" not in _strings(each["columns"]) for each in records
    )
    sections = [_section(record, folder, pictures) for record in records]
    return "\n".join([_HEAD + _OLD * old, *sections])


def benchmarks(folder: Path) -> str | None:
    """Return the page on the benchmarks whose JSON files lie in a folder; None if there are none."""
    found = [record for record in _records(folder) if is_benchmark(record)]
    return benchmarks_page(found) if found else None


def _records(folder: Path) -> list[Mapping[str, object]]:
    records = [_read(path) for path in sorted(folder.glob("*.json"), key=_rank)]
    if not records:
        raise ConfigError(f"no result was found in {folder}: make one with scripts/reproduce NAME --out {folder}")
    return records


def _rank(path: Path) -> tuple[int, str]:
    order = list(CATALOGUE)
    return (order.index(path.stem) if path.stem in order else len(order), path.stem)


def _read(path: Path) -> Mapping[str, object]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not the record of a result: {error}") from error
    missing = {"name", "title", "command", "date", "reduced", "words", "columns", "rows"} - set(record)
    if missing:
        raise ConfigError(f"{path} is not the record of a result: it lacks {', '.join(sorted(missing))}")
    return dict(record)


def _section(record: Mapping[str, object], folder: Path, pictures: str) -> str:
    name, title = str(record["name"]), str(record["title"])
    lines = [f"## {title}", ""]
    if (folder / f"{name}.png").exists():
        lines += [f"![{title}]({pictures}/{name}.png)", ""]
    lines += [f"{_filled(sentence)}\n" for sentence in _strings(record["words"])]
    rows, columns = record["rows"], _strings(record["columns"])
    if isinstance(rows, list) and tuple(columns) == COLUMNS:
        lines += [line for row in rows for line in _erratum(_strings(row))]
    elif isinstance(rows, list):
        lines += [_line(columns), _line(["---"] * len(columns))]
        lines += [_line([_shown(cell) for cell in row]) for row in rows]
    reduced = f" Reduced: {record['reduced']}." if record["reduced"] else ""
    made = f"Made by `{record['command']}` on {record['date']}.{reduced}{_time(record)}"
    lines += ["", _filled(made), ""]
    return "\n".join(lines)


def _time(record: Mapping[str, object]) -> str:
    """Say how long the runs took, where that was recorded."""
    ran = record.get("ran")
    found = (
        [each.get("seconds") for each in ran.values() if isinstance(each, dict)] if isinstance(ran, dict) else []
    )
    seconds = [float(one) for each in found if isinstance(each, list) for one in each]
    if not seconds:
        return ""
    return (
        f" {len(seconds)} training runs of {min(seconds):,.0f} to {max(seconds):,.0f} s each, by the clock, on a "
        "machine that may have had other work."
    )


def _filled(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _erratum(cells: Sequence[str]) -> list[str]:
    """Return a section of its own: claim, truth, demonstration, remedy, each a paragraph of short lines."""
    topic, claim, where, *rest = cells
    named = zip(("Truth", "Demonstration", "Remedy"), rest, strict=True)
    paragraphs = [f"**Claim** ({where}): {claim}.", *(f"**{name}**: {text}." for name, text in named)]
    return [
        f"### {topic[0].upper()}{topic[1:]}",
        "",
        *(f"{_filled(text)}\n" for text in paragraphs),
    ]


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Sequence) else []


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: object) -> str:
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:,.0f}" if abs(cell) >= _LARGE else f"{cell:.5g}"
    return str(cell).replace("|", "\\|")
