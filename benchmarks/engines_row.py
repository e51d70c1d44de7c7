"""What is measured of an engine of the simulation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """Seconds of a round once the engine runs, and of its start; None and an error if it could not run."""

    engine: str
    clients: int
    start_seconds: float | None
    round_seconds: float | None
    error: str = ""
