"""What happens after each round of `fit`: a progress bar, and the user's callbacks."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from d2pfed.learning import Model, Module
from d2pfed.runs import Listener, RoundRecord, Run

# Called with each round's record and a function that returns the module as it is after the round.
Callback = Callable[[RoundRecord, Callable[[], Module]], object]


@dataclass(frozen=True, slots=True)
class Watch:
    """Shows notes and rounds to a person, or nothing."""

    console: Console | None
    bar: Progress | None

    def say(self, note: str) -> None:
        """Print a line."""
        if self.console is not None:
            self.console.print(note, highlight=False, markup=False, emoji=False)

    def show(self, record: RoundRecord) -> None:
        """Move the bar."""
        if self.bar is not None:
            text = "  ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
            update = {"description": text} if text else {}
            self.bar.update(self.bar.task_ids[0], completed=record.round, **update)  # type: ignore[arg-type]


@contextmanager
def watching(rounds: int, *, progress: bool | None) -> Iterator[Watch]:
    """Show a bar for so many rounds: if asked to, or if standard error is a terminal or a notebook."""
    # To rich, NO_COLOR leaves a moving bar; here it means no escape sequences, so the bar is shown once, at the end.
    console = Console(stderr=True, force_terminal=False if os.environ.get("NO_COLOR") else None)
    if not (sys.stderr.isatty() or console.is_jupyter if progress is None else progress):
        yield Watch(None, None)
        return
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
        bar.add_task("", total=rounds)
        yield Watch(console, bar)


def listener(run: Run, model: Model, watch: Watch, callbacks: Sequence[Callback]) -> Listener:
    """Return what hears of each round of a run; a callback that returns False interrupts it."""

    def listen(record: RoundRecord, /) -> bool:
        watch.show(record)
        answers = [callback(record, lambda: model.load(run.last_model())) for callback in callbacks]
        return all(answer is not False for answer in answers)

    return listen
