"""Who trains the clients of a cohort: this process, or workers elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from d2pfed.noise.codec import FloatVector
from d2pfed.simulation.engine import Encode, Updates

# From the model's parameters, some clients and a round's seed to the clients' updates, in their order.
Learn = Callable[[FloatVector, Sequence[int], int], Iterator[FloatVector]]


class Crew(Protocol):
    """Trains, and perhaps encodes, the clients of one round after the other."""

    def updates(self, params: FloatVector, seed: int) -> Updates:
        """Return the function that trains clients of this round."""
        ...

    def encode(self, params: FloatVector, seed: int) -> Encode | None:
        """Return the function that trains and encodes clients of this round; None: encode where the updates come."""
        ...


class InProcess:
    """A crew of one: this process."""

    def __init__(self, learn: Learn) -> None:
        self._learn = learn

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def updates(self, params: FloatVector, seed: int) -> Updates:
        """Return the function that trains clients of this round, here."""
        return lambda clients: self._learn(params, clients, seed)

    def encode(self, params: FloatVector, seed: int) -> Encode | None:  # noqa: ARG002 - a crew's signature
        """Return nothing: updates are encoded as they come."""
        return None


Hire = Callable[[Learn], AbstractContextManager[Crew]]
