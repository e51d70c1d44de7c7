"""The names of mechanisms, rotations, observers and clips, as settings and command lines give them."""

from contextlib import suppress
from enum import StrEnum

from d2pfed.accounting import ALONE, CLIENT, RELEASED, SERVER, Observer, colluding
from d2pfed.errors import ConfigError

_LEAST_START = 1e-12  # of an adaptive clip; the most is its inverse


class MechanismName(StrEnum):
    """The mechanisms by name.

    Attributes:
        CENTERED: a discrete Gaussian centred at the client's real vector: rounding and noise in one step.
        SHARED: the paper's: one discrete Gaussian from a secret of the cohort, of which each adds a share.
        DDGAUSS: rounding, then an independent discrete Gaussian of each client.
        SKELLAM: rounding, then an independent Skellam variable of each client.
        BINOMIAL: cpSGD's: rounding, then a centred binomial of each client.
    """

    CENTERED = "centered"
    SHARED = "shared"
    DDGAUSS = "ddgauss"
    SKELLAM = "skellam"
    BINOMIAL = "binomial"


class RotationName(StrEnum):
    """The rotations by name."""

    HADAMARD = "hadamard"
    PHASE = "phase"


def observer_named(name: str) -> Observer:
    """Return the observer of that name."""
    known = {str(each): each for each in (RELEASED, SERVER, CLIENT, ALONE)}
    if name in known:
        return known[name]
    count = name.removeprefix("colluding(").removesuffix(")")
    if name == f"colluding({count})" and count.isdecimal() and count.isascii() and len(count) <= 9:
        return colluding(int(count))
    raise ConfigError(f"against must be released, server, client, alone or colluding(c), got {name[:80]!r}")


def initial_clip_named(name: str) -> float:
    """Return the clip that an adaptive one starts from: 1 for `auto`, c for `auto(c)`."""
    if name == "auto":
        return 1.0
    with suppress(ValueError):
        start = float(name.removeprefix("auto(").removesuffix(")"))
        if name.startswith("auto(") and name.endswith(")") and _LEAST_START <= start <= 1 / _LEAST_START:
            return start
    raise ConfigError(
        f"clip must be a positive number, auto, or auto(c) with c in [{_LEAST_START:g}, {1 / _LEAST_START:g}], "
        f"got {name[:80]!r}"
    )


def parse_clip(text: str) -> float | str:
    """Return a clip as it is written: a number, or the name of an adaptive one."""
    try:
        return float(text)
    except ValueError:
        initial_clip_named(text)
        return text
