"""What is measured of a round of training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """The best of several rounds, and a peer's in the same run; `goal` is the least ratio, where one is set."""

    what: str
    clients: int
    examples: int  # of one client
    epochs: int
    dimension: int
    seconds: float
    processor_seconds: float | None  # of all threads of this process
    peer: str
    peer_seconds: float | None
    peer_processor_seconds: float | None
    goal: float | None
    peer_error: str = ""  # one line, where the peer is absent or has failed

    @property
    def rounds_per_second(self) -> float:
        """Return the rate."""
        return 1 / self.seconds

    @property
    def ratio(self) -> float | None:
        """Return how many times as fast as the peer it is, or None without a peer."""
        return None if self.peer_seconds is None else self.peer_seconds / self.seconds

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met, or None if there is none to meet."""
        return None if self.ratio is None or self.goal is None else self.ratio >= self.goal
