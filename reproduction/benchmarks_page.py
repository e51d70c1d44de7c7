"""The page on the benchmarks that others use, written from what their results left behind."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from d2pfed.errors import ConfigError

COLUMNS = (
    *("benchmark", "clients", "cohort", "rounds", "rounds per client", "parameters", "delta"),
    *("epsilon, released", "epsilon, server", "epsilon, another client", "epsilon, alone"),
    *("bits", "kB per round", "accuracy", "lowest", "highest", "seeds"),
    *("not private", "its lowest", "its highest"),
)
_SETTINGS = (
    "benchmark",
    "clients",
    "cohort",
    "rounds",
    "rounds per client",
    "parameters",
    "bits",
    "kB up",
    "kB down",
)
_PRIVACY = (
    *("benchmark", "delta", "epsilon, released", "epsilon, server", "epsilon, another client", "epsilon, alone"),
)
_HEAD = """# Benchmarks

Tasks that others use, with a guarantee for a whole client against the server, beside the same training without privacy.
Every row is one command, `scripts/reproduce NAME --data DIR`, and every number is read from
`reproduction/results/NAME.json`; this page is written by `scripts/reproduce page`. Accuracies are of test data that was
opened once, at the end of each run: the mean over seeds, the lowest and the highest. Runs with and without privacy take
their learning rates from one grid, each by its own validation accuracy. Earlier settings whose test accuracy was seen
are these: `writers` and `speakers` without privacy had others, given up as they were below the private runs; `idx28`
had others that came to 87 % with and without privacy, and `cifar10-server` half the filters, which came to 65.8 %.
Adjacency is replace-one;
epsilon *alone* is against the server together with all other clients. `DIR` holds the data in its official files:
`mnist/*-ubyte`, `qmnist/*`, `cifar-10-batches-bin/*.bin`, `shakespeare/tinyshakespeare.txt`, and `idx28/*-ubyte` for
any other 28 x 28 images in MNIST's format (Fashion-MNIST, say), all plain or as `.gz`.
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
        _table(["name", *_PRIVACY[1:]], _cells(rows, _PRIVACY[1:])),
    ]
    for record in records:
        words = record["words"]
        told = [_filled(str(word)) for word in words] if isinstance(words, Sequence) else []
        made = f"Made by `{record['command']}` on {record['date']}."
        parts += [f"## {record['title']}\n", *(f"{text}\n" for text in (*told, made))]
    return "\n".join(parts)


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
