"""A progress bar that turns the first Ctrl-C or SIGTERM into a stop at the next safe point."""

import signal
from dataclasses import dataclass, field
from types import FrameType
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from d2pfed.cli.show import err

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Watcher:
    """Shows how far a long command is, on a terminal by a bar; use it as a context manager.

    The first Ctrl-C or SIGTERM sets `caught`, and the caller stops after the step it is in; a second one ends the
    process at once.

    Attributes:
        total: How many there are of what is counted.
        counted: What is counted, such as `round`.
        caught: The signal that asked for the stop, 0 if there was none.
    """

    total: int
    counted: str
    caught: int = 0
    _tenths: int = field(init=False, repr=False, default=0)
    _bar: Progress = field(init=False, repr=False)
    _before: dict[int, object] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        console = err()
        columns = (TextColumn(self.counted), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_interactive)
        self._bar.add_task("planning", total=self.total)

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked for a stop."""
        return self.caught != 0

    @property
    def exit_status(self) -> int:
        """The exit status of a command that a signal has stopped: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.caught

    def show(self, completed: int, text: str) -> None:
        """Move the bar to `completed` of `total`, with a text beside it; a file gets a line for each tenth."""
        self._bar.update(self._bar.task_ids[0], completed=completed, description=text)
        if self._bar.disable and (tenths := 10 * completed // self.total) > self._tenths:
            self._tenths = tenths
            err().print(f"{self.counted} {completed} of {self.total}: {text}")

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.caught = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        err().print("Stopping after this round; the same command resumes. A second signal stops at once.")
