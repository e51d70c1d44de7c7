"""What a client remembers of positions: its own, and those at which it has met others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from d2pfed.secagg.position import Position
from d2pfed.secagg.wire import ClientId


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """A client's memory when it joins a signed session.

    Attributes:
        position: its own after the row that says that this session has begun, signed by itself.
        contains: says whether its chain of rows has this head at this count.
        known: the latest position at which it has met each other client, before this session.
        colluders: how many of the cohort it expects to collude by its own reckoning, whatever the session says.
    """

    position: Position
    contains: Callable[[int, bytes], bool]
    known: Mapping[ClientId, Position] = field(default_factory=dict)
    colluders: int = 0
