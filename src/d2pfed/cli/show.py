"""How results reach a person: a table on standard output, or JSON and nothing else."""

import dataclasses
import json
import math
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING

from d2pfed.accounting import Guarantee, Observer, Unit, round_up

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

OBSERVED = {
    "released": "who sees only the models",
    "server": "the server itself",
    "client": "another client of a cohort",
    "colluding": "the server and some clients",
    "alone": "the server and all other clients",
}


def print_json(value: object) -> None:
    """Print one JSON document."""
    print(json.dumps(plain(value), indent=2))


def plain(value: object) -> object:
    """Return a value as JSON has it; infinity, which JSON lacks, becomes null."""
    if isinstance(value, Observer):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    match value:
        case Enum():
            return value.value
        case Fraction():
            return float(value)
        case bytes():
            return value.hex()
        case float():
            return value if math.isfinite(value) else None
        case tuple() | list():
            return [plain(item) for item in value]
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case None | bool() | int() | str():
            return value
    return str(value)


def epsilons(spent: tuple[Guarantee, ...], when: str = "") -> "Table":
    """Return the table of one epsilon per observer, each with all that it depends on; bounds are rounded up."""
    from rich.table import Table  # noqa: PLC0415 - slow to load, and JSON needs no table

    unit = spent[0].unit if spent else Unit.CLIENT
    table = Table(title=f"What each observer can learn about one {unit}{when}", title_justify="left")
    for column, justify in (("observer", "left"), ("epsilon", "right"), ("delta", "right"), ("valid for", "left")):
        table.add_column(column, justify="right" if justify == "right" else "left")
    for item in spent:
        scope = f"{item.unit}, {item.adjacency}, {item.sampling}"
        if str(item.observer) != "released":
            scope += f", at most {item.max_participations} participation{'s' * (item.max_participations != 1)}"
        table.add_row(
            f"{item.observer}: {OBSERVED[item.observer.view]}",
            round_up(item.epsilon, 4),
            delta_as_given(item.delta),
            item.reason or scope,
        )
    return table


def delta_as_given(delta: float) -> str:
    """Return a delta as it was given, if it has few digits, else rounded up: as a float 1e-5 is a little more."""
    written = f"{delta:.3g}"
    return written if float(written) == delta else round_up(delta, 3)


def out() -> "Console":
    """Return the console for results; a file has no width of its own, so it gets enough for a table."""
    from rich.console import Console  # noqa: PLC0415 - as above

    console = Console()
    return console if console.is_terminal else Console(width=140)


def err() -> "Console":
    """Return the console for progress and notes."""
    from rich.console import Console  # noqa: PLC0415 - as above

    return Console(stderr=True)
