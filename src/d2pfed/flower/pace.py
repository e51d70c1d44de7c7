"""Pauses between two looks for work: short while work comes, longer the longer none does."""

import time
from dataclasses import dataclass, field

SHORTEST = 0.05
GROWTH = 1.25  # waiting for something that takes t seconds ends at most about t / 4 seconds late


@dataclass(slots=True)
class Pace:
    """A pause that begins at `shortest` seconds and grows up to `longest` until something comes."""

    longest: float
    shortest: float = SHORTEST
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        self.hurry()

    def hurry(self) -> None:
        """Something came: look again soon."""
        self._next = min(self.shortest, self.longest)

    def pause(self, most: float) -> None:
        """Wait, for no longer than `most` seconds."""
        time.sleep(max(0.0, min(self._next, most)))
        self._next = min(self._next * GROWTH, self.longest)
