"""Odd calls of every public function and class, and odd command lines: each is answered, or refused in one line.

A call returns or raises an error of ours; TypeError is for arguments that do not fit its signature, and what a user's
own function raises is the user's. A command ends with a status that its help states, and without a traceback.
"""

import inspect
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch
from urllib.error import URLError

from d2pfed.cli import main as command_line
from d2pfed.errors import D2PFedError
from d2pfed.numerics.randomness import Stream, digest
from support.odd import UsersOwnError, odd
from support.odd_calls import CALLS, Call, prepare
from support.odd_lines import LINES, LOST, STATUSES, WORDS, prepare_files

SECONDS = 30  # that a case may take at most: what is asked for is small


class TooLong(BaseException):
    """A case that did not end."""


@contextmanager
def limited() -> Iterator[None]:
    """Stop what takes too long."""

    def stop(*_given: object) -> None:
        raise TooLong(f"it took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def odd_arguments(call: Call, stream: Stream) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return arguments of which one or two are odd, one is missing, or one is too many."""
    given = call.arguments()
    change = stream.below(20)
    if change == 0:
        return (), given | {"no_such_parameter": odd(stream, None)}
    if change == 1 and given:
        del given[list(given)[stream.below(len(given))]]
        return (), given
    if change == 2:
        return tuple(odd(stream, None) for _ in range(1 + stream.below(3))), {}
    known = list(given) + [name for name in call.optional if name not in given]
    for _ in range(1 + (stream.below(4) == 0)):
        if known:
            name = known[stream.below(len(known))]
            given[name] = odd(stream, given.get(name))
    return (), given


def fate_of_call(call: Call, stream: Stream) -> tuple[str, str]:
    """Return what became of an odd call, and what is wrong with that."""
    positional, named = odd_arguments(call, stream)
    told = f"{call.name}(*{positional!r:.300}, **{named!r:.600})"
    try:
        inspect.signature(call.function).bind(*positional, **named)
    except TypeError:
        is_bound = False
    else:
        is_bound = True
    try:
        with limited(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call.use(call.function(*positional, **named))
    except D2PFedError as error:
        return "refused", "" if len(str(error).splitlines()) == 1 else f"{told}: not one line: {error}"
    except UsersOwnError:
        return "stopped by the user's own error", ""
    except (Exception, TooLong) as error:
        if isinstance(error, TypeError) and not is_bound:
            return "of another signature", ""
        place = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(each.filename).name}:{each.lineno}" for each in place if "d2pfed" in each.filename]
        return "foreign", f"{told}: {error!r:.300} ({' '.join(own[-4:])})"
    return "answered", ""


def calls(count: int, seed: str) -> tuple[Counter[str], list[str]]:
    """Make so many odd calls, of each public name in turn."""
    fates, wrong = Counter[str](), []
    with tempfile.TemporaryDirectory() as place, chdir(place):
        prepare(Path(place))
        for number in range(count):
            stream = Stream(digest("odd call", seed, number))
            fate, fault = fate_of_call(CALLS[number % len(CALLS)], stream)
            fates[fate] += 1
            wrong += [f"case {number}: {fault}"] if fault else []
    return fates, wrong


def odd_line(stream: Stream) -> list[str]:
    """Return a command line that was good, with a few words changed, lost, doubled, swapped or added."""
    good = LINES[stream.below(len(LINES))].split()
    depth = next(at for at, word in enumerate([*good, "-"]) if not word.isalpha())
    for _ in range(1 + stream.below(2)):
        at, change = min(depth + stream.below(len(good)), len(good) - 1), stream.below(8)
        word = WORDS[stream.below(len(WORDS))]
        if change < 4:
            good[at : at + 1] = [f"{good[at].partition('=')[0]}={word}" if good[at].startswith("--") else word]
        elif change == 4:
            del good[at]
        elif change == 5:
            good.insert(at, good[at])
        elif change == 6:
            good.append(word)
        else:
            good[at:] = [*good[at + 1 :], *good[at : at + 1]]
    return good


def no_network(*_given: object, **_named: object) -> object:
    raise URLError("there is no network in this campaign")


def run_line(words: list[str], patches: list[str]) -> tuple[int, str, str]:
    """Return status and output of a command line in this process."""
    streams = io.StringIO(), io.StringIO()
    status: object = 0
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]), patch.object(sys, "argv", ["d2pfed", *words]):
        with patch("urllib.request.urlopen", no_network), limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                command_line()
            except SystemExit as ended:
                status = ended.code or 0
            except (Exception, TooLong) as error:
                traceback.print_exception(error, limit=-4, file=streams[1])
                status = -1
    return status if isinstance(status, int) else -1, *(stream.getvalue() for stream in streams)


def fault_of_line(words: list[str], status: int, out: str, err: str) -> str:
    """Return what is wrong with how a command ended."""
    said = [line for line in err.splitlines() if line.startswith("d2pfed: ")]
    if status not in STATUSES.get(" ".join(words[:2]), STATUSES.get(words[0], (0, 2)) if words else (0, 2)):
        return f"status {status}: {err[-900:]}"
    if "Traceback" in out + err:
        return f"a traceback: {err[-900:]}"
    if status == 2 and len(said) != 1:
        return f"not one line: {err[-900:]}"
    return ""


def commands(count: int, seed: str) -> tuple[Counter[str], list[str]]:
    """Run so many odd command lines."""
    fates, wrong = Counter[str](), []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        prepare_files(Path(place) / "good", lambda words: run_line(words, []))
        for number in range(count):
            words = odd_line(Stream(digest("odd line", seed, number)))
            own = Path(shutil.copytree(Path(place) / "good", Path(place) / "own", symlinks=True))
            with chdir(own), patch.dict(os.environ, {"HOME": str(own), "XDG_CACHE_HOME": str(own / "cache")}):
                status, out, err = run_line(words, [])
            shutil.rmtree(own)
            fates[f"status {status}"] += 1
            if fault := fault_of_line(words, status, out, err):
                wrong.append(f"case {number}: d2pfed {words!r:.600}: {fault}")
    return fates, wrong


def main(name: str, size: int, seed: str) -> int:
    """Run a campaign and print what was found."""
    campaign: Callable[[int, str], tuple[Counter[str], list[str]]] = {"calls": calls, "commands": commands}[name]
    fates, wrong = campaign(size, seed)
    for fault in wrong:
        sys.stderr.write(f"{fault}\n")
    counted = ", ".join(f"{number:,} {fate}" for fate, number in sorted(fates.items()))
    what = {"calls": "odd calls of public functions", "commands": "odd command lines"}[name]
    result = f"{size:,} {what}: {counted}; {len(wrong)} foreign exceptions, tracebacks or other statuses"
    print(json.dumps({"campaign": what, "result": result, "failed": len(wrong)}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[4]))
