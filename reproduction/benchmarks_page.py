"""The page on the benchmarks that others use, written from what their results left behind."""

import re
from collections.abc import Mapping, Sequence
from textwrap import fill

from d2pfed.errors import ConfigError

COLUMNS = (
    *("benchmark", "clients", "cohort", "rounds", "rounds per client", "parameters", "delta"),
    *("epsilon, released", "epsilon, server", "epsilon, another client", "epsilon, alone"),
    *("bits", "kB per round", "accuracy", "lowest", "highest", "seeds"),
    *("not private", "its lowest", "its highest"),
)
_SETTINGS = ("clients", "cohort", "rounds", "rounds per client", "parameters", "bits", "kB up", "kB down")
_PRIVACY = ("delta", "epsilon, released", "epsilon, server", "epsilon, another client", "epsilon, alone")
_HEAD = """# Benchmarks

What does privacy cost on tasks that others use? The guarantee is for a whole client, against the server. Each row is
one command, `scripts/reproduce NAME --data DIR`; `scripts/reproduce page` writes this page.

- Accuracy is measured once, on test data opened at the end of each run: mean over seeds (lowest to highest).
- Runs without privacy use the settings of the private runs, unclipped. They show what privacy costs this training, not
  the best accuracy. Where a grid is named, private and other runs each took their own learning rates from it.
- Settings were chosen by validation accuracy, which epsilon does not cover. Some earlier settings were
  also measured on test data: `writers` and `speakers` without privacy (below the private runs), `idx28` (87 % with and
  without privacy), `cifar10-server` with half the filters (65.8 %).
- Adjacency is replace-one, the clip 1. No client drops out, none colludes. *Alone*: against the server and all other
  clients.
- `DIR` holds the official files, plain or `.gz`: `mnist/*-ubyte`, `qmnist/*`, `cifar-10-batches-bin/*.bin`,
  `shakespeare/tinyshakespeare.txt` (the task is the next character), and in `idx28/*-ubyte` any 28 x 28 images in
  MNIST's format.
"""


def is_benchmark(record: Mapping[str, object]) -> bool:
    """Tell whether a result is a benchmark's."""
    columns = record["columns"]
    return isinstance(columns, Sequence) and tuple(columns) == COLUMNS


def benchmarks_page(records: Sequence[Mapping[str, object]]) -> str:
    """Return the page: accuracies, settings, privacy, then each benchmark in words."""
    rows = {}
    for record in records:
        found = record["rows"]
        if not isinstance(found, Sequence) or len(found) != 1:
            raise ConfigError(f"the result {record['name']} must have one row to be a benchmark's")
        row = dict(zip(COLUMNS, found[0], strict=True))
        # A client is sent the model in 32-bit floats.
        row |= {"kB up": row["kB per round"], "kB down": round(4 * row["parameters"] / 1e3, 1)}
        rows[str(record["name"])] = row
    outcome = [
        [
            f"`{name}`",
            _shown(row["epsilon, server"]),
            _range(row, ("accuracy", "lowest", "highest")),
            _range(row, ("not private", "its lowest", "its highest")),
            _shown(row["seeds"]),
        ]
        for name, row in rows.items()
    ]
    parts = [
        _HEAD,
        _table(["name", "epsilon, server", "accuracy, %", "not private, %", "seeds"], outcome),
        "## Settings\n",
        _table(["name", *_SETTINGS], _cells(rows, _SETTINGS)),
        "## Epsilon by observer\n",
        _table(["name", *_PRIVACY], _cells(rows, _PRIVACY)),
    ]
    for record in records:
        words = record["words"]
        told = " ".join(_own(str(word)) for word in words) if isinstance(words, Sequence) else ""
        made = f"`{record['command']}`, {record['date']}."
        parts += [f"## `{record['name']}`\n", f"{_filled(told)}\n", f"{made}\n"]
    return "\n".join(parts)


def _own(words: str) -> str:
    """Return what a text says of its benchmark alone, without what the tables and the head of the page have."""
    words = words.partition(" Test accuracy ")[0].partition(" Full cohorts, ")[0]
    words = re.sub(r", [\d,]+ parameters, updates clipped to 1\.", ".", words)
    words = words.replace(" Without privacy the same, unclipped.", "").replace(
        "; that choice is not accounted", ""
    )
    return words.replace(
        "by validation accuracy with the first seed from the same grid of learning rates",
        "from a grid of learning rates",
    )


def _cells(rows: Mapping[str, Mapping[str, object]], columns: Sequence[str]) -> list[list[str]]:
    return [[f"`{name}`", *(_shown(row[column]) for column in columns)] for name, row in rows.items()]


def _range(row: Mapping[str, object], names: tuple[str, str, str]) -> str:
    mean, low, high = (f"{row[name]:.2f}" for name in names)
    return f"{mean} ({low} to {high})" if row["seeds"] != 1 else mean


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _shown(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _filled(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)
