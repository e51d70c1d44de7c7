"""Who drops out of a simulated round, and before which exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy

EXCHANGES = ("advertise", "share", "masked", "unmask")


@dataclass(frozen=True, slots=True)
class Dropouts:
    """Independent losses: the fraction of clients that is lost before each of the four exchanges."""

    advertise: Fraction = Fraction(0)
    share: Fraction = Fraction(0)
    masked: Fraction = Fraction(0)
    unmask: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        for name in EXCHANGES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"the dropouts of {name} must be in [0, 1], got {getattr(self, name)}")

    def left(self, clients: Sequence[int], exchange: str, entropy: Entropy) -> tuple[int, ...]:
        """Return the clients that still answer in this exchange: a fair choice, blind to who they are."""
        rate = Fraction(getattr(self, exchange))
        if not rate:
            return tuple(clients)
        coins = entropy.child("dropouts", exchange).stream().below_each(rate.denominator, len(clients))
        keep = np.flatnonzero(coins >= rate.numerator)
        return tuple(clients[int(place)] for place in keep)
