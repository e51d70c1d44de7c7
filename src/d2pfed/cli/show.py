"""How results reach a person: a table on standard output, or JSON and nothing else."""

import dataclasses
import json
import math
import os
import sys
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from d2pfed.accounting import Guarantee, Observer, round_up

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

OBSERVED = {
    "released": "anyone who sees only the models",
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


def headline(spent: tuple[Guarantee, ...], against: Observer) -> str:
    """Return the guarantee that was asked for, in one sentence."""
    item = next(each for each in spent if each.observer == against)
    most = item.max_participations
    cap = "" if str(against) == "released" else f", at most {most} participation{'s' * (most != 1)}"
    return (
        f"Guarantee against {item.observer} ({OBSERVED[item.observer.view]}): epsilon {round_up(item.epsilon, 4)} at "
        f"delta {delta_as_given(item.delta)} for one {item.unit} ({item.adjacency}{cap})."
    )


def epsilons(spent: tuple[Guarantee, ...], when: str = "") -> "Table":
    """Return the table of one epsilon per observer, each with all that it depends on; bounds are rounded up."""
    from rich import box  # noqa: PLC0415 - slow to load, and JSON needs no table
    from rich.table import Table  # noqa: PLC0415

    unit = spent[0].unit if spent else "client"
    groups: dict[str, list[str]] = {}  # of observers to whom the same sampling and comparison apply
    for item in spent:
        groups.setdefault(f"{item.adjacency}, {item.sampling}", []).append(str(item.observer))
    scopes = [f"{', '.join(names)}: {scope}" for scope, names in groups.items()]
    table = Table(
        title=f"What each observer can learn about one {unit}{when}",
        title_justify="left",
        caption="\n".join([*scopes, "cap: on the participations of one client"]),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for column in ("observer", "", "epsilon", "delta", "cap"):
        table.add_column(column, justify="right" if column in {"epsilon", "delta"} else "left")
    for item in spent:
        most = "" if str(item.observer) == "released" else str(item.max_participations)
        table.add_row(
            str(item.observer),
            OBSERVED[item.observer.view],
            round_up(item.epsilon, 4),
            delta_as_given(item.delta),
            item.reason or most,
        )
    return table


def delta_as_given(delta: float) -> str:
    """Return a delta as it was given, if it has few digits, else rounded up: as a float 1e-5 is a little more."""
    written = f"{delta:.3g}"
    return written if float(written) == delta else round_up(delta, 3)


def out(*, stderr: bool = False) -> "Console":
    """Return the console for results, which prints text as it is: no markup, and numbers are not painted."""
    from rich.console import Console  # noqa: PLC0415 - as above

    # To rich, NO_COLOR leaves bold and a moving bar; here it means no escape sequences.
    terminal = False if os.environ.get("NO_COLOR") else None
    # A file has no width of its own, so it gets enough for a table.
    width = None if stderr or sys.stdout.isatty() else 100
    return Console(stderr=stderr, width=width, force_terminal=terminal, highlight=False, markup=False, emoji=False)


err = partial(out, stderr=True)  # for progress and notes
