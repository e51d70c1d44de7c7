"""Every line of d2pfed that a client runs for one request, and the same request with an error at one of them."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType

import d2pfed
from d2pfed.round import Participant

_ROOT = str(Path(d2pfed.__file__).parent)

Visit = Callable[[FrameType], None]


class Stage(StrEnum):
    """How far a client is: its data untouched, touched, or in a vector that has its noise."""

    BEFORE = "before"
    TOUCHED = "touched"
    ENCODED = "encoded"


@dataclass(frozen=True)
class Line:
    """A line that is reached in one stage of a request."""

    stage: Stage
    code: CodeType
    number: int

    @property
    def function(self) -> str:
        """The module and the outermost function that the line is in."""
        module = self.code.co_filename[len(_ROOT) + 1 : -len(".py")].replace("/", ".")
        return f"{module}.{self.code.co_qualname.partition('.<locals>')[0]}"


@dataclass
class Progress:
    """Where a client is in a request; the user's function says when it is called."""

    stage: Stage = Stage.BEFORE
    woken: Callable[[], None] | None = None  # a trace that begins where data are touched: it costs time

    def touch(self) -> None:
        if self.stage is Stage.BEFORE:
            self.stage = Stage.TOUCHED
            if self.woken is not None:
                self.woken()

    def record(self, request: Callable[[], object]) -> Counter[Line]:
        """How often each line is reached, in the order of their first times."""
        found: Counter[Line] = Counter()

        def count(frame: FrameType) -> None:
            found[Line(self.stage, frame.f_code, frame.f_lineno)] += 1

        with self._traced(None, Stage.BEFORE, count):
            request()
        return found

    def fail(self, request: Callable[[], object], line: Line, time: int, error: BaseException) -> bool:
        """Make the request, with an error when a line is reached for this time; say whether it came to that."""
        left = time

        def count_down(frame: FrameType) -> None:
            nonlocal left
            if frame.f_lineno == line.number and frame.f_code is line.code and self.stage is line.stage:
                left -= 1
                if not left:
                    raise error

        with self._traced(line.code, line.stage, count_down):
            request()
        return left <= 0

    @contextmanager
    def _traced(self, wanted: CodeType | None, stage: Stage, visit: Visit) -> Iterator[None]:
        """Visit each line of one function, or of all of d2pfed, from a stage on; note when the vector is complete."""
        encode = Participant.encode.__code__
        self.stage = Stage.BEFORE

        def follow(frame: FrameType, event: str, given: object):
            if event == "line":
                visit(frame)
            elif event == "return" and frame.f_code is encode and given is not None:
                self.stage = Stage.ENCODED
            return follow

        def begin(frame: FrameType, _event: str, _given: object):
            code = frame.f_code
            if code is wanted or code is encode or (wanted is None and code.co_filename.startswith(_ROOT)):
                return follow
            return None

        def wake() -> None:
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                if begin(frame, "call", None) is not None:
                    frame.f_trace = follow
                frame = frame.f_back
            sys.settrace(begin)

        before = sys.gettrace()  # that of coverage, say
        self.woken = None if stage is Stage.BEFORE else wake
        sys.settrace(begin if stage is Stage.BEFORE else None)
        try:
            yield
        finally:
            self.woken = None
            sys.settrace(before)
