"""One row of the benchmark of silos, which can be shown without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloRow:
    """Seconds of a round by the clock and of the processor, and how many times those of DP-SGD they are."""

    what: str
    dimension: int
    rounds: int
    seconds: float
    processor_seconds: float
    ratio: float | None = None
    processor_ratio: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached, where there is one."""
        return None if self.goal is None or self.ratio is None else self.ratio <= self.goal
