"""How far a long command or call is: a bar, lines in a file, and a stop at the next safe point after a signal."""

import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOGGER = logging.getLogger("d2pfed")  # has all lines, whether they are shown or not
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Watcher:
    """Shows how far something is, on a terminal by a bar; use it as a context manager.

    The first Ctrl-C or SIGTERM sets `caught`, and the caller stops after the step it is in; a second one ends the
    process at once.
    """

    total: int  # may be set before it is entered
    counted: str  # such as `round`
    is_command: bool = True  # signals are caught and a file gets lines: for a command, not for a call
    is_shown: bool | None = True  # None: in a terminal or a notebook
    caught: int = 0  # the signal that asked for the stop; 128 more is the exit status of a command
    _console: Console = field(init=False, repr=False)
    _bar: Progress = field(init=False, repr=False)
    _tenths: int = field(init=False, repr=False, default=0)
    _before: dict[int, object] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        # To rich, NO_COLOR leaves bold and a moving bar; here it means no escape sequences.
        terminal = False if os.environ.get("NO_COLOR") else None
        self._console = Console(stderr=True, force_terminal=terminal, highlight=False, markup=False, emoji=False)
        if self.is_shown is None:
            self.is_shown = sys.stderr.isatty() or self._console.is_jupyter

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Print a line; `level` is that of its log where it is not shown."""
        LOGGER.log(logging.INFO if self.is_shown else level, text)
        if self.is_shown:
            self._console.print(text)

    def show(self, completed: int, text: str) -> None:
        """Move the bar to `completed` of `total`, with a text beside it; a file gets a command's lines."""
        LOGGER.info("%s %d of %d: %s", self.counted, completed, self.total, text)
        self._bar.update(self._bar.task_ids[0], completed=completed, description=text)
        tenths = 10 * completed // self.total
        if self.is_command and self._bar.disable and tenths > self._tenths:
            self._tenths = tenths
            self._console.print(f"{self.counted} {completed} of {self.total}: {text}")

    def __enter__(self) -> Self:
        if self.is_command:
            self._before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        columns = (TextColumn(self.counted), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        is_hidden = not self.is_shown or (self.is_command and not self._console.is_interactive)
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, disable=is_hidden)
        self._bar.add_task("planning", total=self.total)
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
        self._console.print(f"Stopping after this {self.counted}. A second signal stops at once.")
