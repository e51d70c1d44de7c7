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
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch
from urllib.error import URLError

from d2pfed.api.fitting import _execute as execute
from d2pfed.api.job import Job
from d2pfed.cli import main as command_line
from d2pfed.errors import ConfigError, D2PFedError
from d2pfed.numerics.randomness import Stream, digest
from support.odd import UsersOwnError, odd, raising
from support.odd_calls import CALLS, Call, prepare
from support.odd_lines import LINES, STATUSES, WORDS, command_of, options, prepare_files

SECONDS = 30  # of the processor, that a case may take at most: what is asked for is small


FUNCTIONS_OF_USERS = ("aggregate", "meter")  # raise what they like: one stands for all


class TooLong(BaseException):
    """A case that did not end."""


@contextmanager
def limited() -> Iterator[None]:
    """Stop what takes too long."""

    def stop(*_given: object) -> None:
        raise TooLong(f"it took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def odd_arguments(call: Call, stream: Stream) -> tuple[tuple[object, ...], dict[str, object], str]:
    """Return arguments of which one or two are odd, one is missing, or one is too many, and which ones these are."""
    given = call.arguments()
    change = stream.below(40)
    if change == 0:
        return (), given | {"no_such_parameter": odd(stream, None)}, "one more"
    if change == 1 and given:
        del given[name := list(given)[stream.below(len(given))]]
        return (), given, f"without {name}"
    if change == 2:
        return tuple(odd(stream, None) for _ in range(1 + stream.below(3))), {}, "others"
    known = list(given) + [name for name in call.optional if name not in given]
    told = ""
    for _ in range(min(len(known), 1 + (stream.below(4) == 0))):
        name = known.pop(stream.below(len(known)))
        value = odd(stream, given.get(name))
        given[name] = raising if name in FUNCTIONS_OF_USERS and callable(value) else value
        told += f" {name}={' '.join(repr(given[name]).split())[:200]}"
    return (), given, told


def fate_of_call(call: Call, stream: Stream) -> tuple[str, str]:
    """Return what became of an odd call, and what is wrong with that."""
    positional, named, changed = odd_arguments(call, stream)
    told = f"{call.name}: {changed}"
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
    except (Exception, TooLong) as error:  # noqa: BLE001 - this is what is looked for
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
        Path("here").mkdir()  # an odd path may lead out of it
        os.chdir("here")
        prepare(Path())
        for number in range(count):
            stream = Stream(digest("odd call", seed, number))
            fate, fault = fate_of_call(CALLS[number % len(CALLS)], stream)
            fates[fate] += 1
            wrong += [f"case {number}: {fault}"] if fault else []
    return fates, wrong


def odd_line(stream: Stream, stand_for: dict[str, str]) -> list[str]:
    """Return a command line that was good, with a few words changed, lost, doubled, moved or added."""
    line = LINES[stream.below(len(LINES))]
    command, words = command_of(line), [word.format(**stand_for) for word in line.split()]
    for _ in range(1 + (stream.below(3) == 0)):
        at = min(len(command.split()) + stream.below(len(words)), len(words) - 1)
        word = WORDS[stream.below(len(WORDS))]
        match stream.below(8):
            case 0 | 1:
                words[at] = word
            case 2 | 3:
                own = (*options()[command], "--help")
                words.append(f"{own[stream.below(len(own))]}={word}")
            case 4:
                del words[at]
            case 5:
                words.insert(at, words[at])
            case 6:
                words.append(word)
            case _:
                words.append(words.pop(at))
    return words


def no_network(*_given: object, **_named: object) -> object:
    raise URLError("there is no network in this campaign")


def run_line(words: list[str]) -> tuple[int, str, str]:
    """Return status and output of a command line in this process; what it prints must be text that can be written."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    status: object = 0
    with ExitStack() as stack:
        for each in (redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(), limited()):
            stack.enter_context(each)
        stack.enter_context(patch.object(sys, "argv", ["d2pfed", *words]))
        stack.enter_context(patch("urllib.request.urlopen", no_network))
        stack.enter_context(patch("d2pfed.api.fitting._execute", execute_small))
        warnings.simplefilter("ignore")
        try:
            command_line()
        except SystemExit as ended:
            status = ended.code or 0
        except (Exception, TooLong) as error:  # noqa: BLE001 - this is what is looked for
            traceback.print_exception(error, limit=-5, file=err)
            status = -1
    for each in (out, err):
        each.flush()
    found = [each.buffer.getvalue().decode() for each in (out, err)]  # type: ignore[attr-defined]
    return status if isinstance(status, int) else -1, found[0], found[1]


def execute_small(job: Job, *given: object, **named: object) -> object:
    """Train what is small; of the rest, a plan is all that is wanted here."""
    if job.sampling.cohort_size * job.settings.rounds * job.details.local.epochs > 100:  # type: ignore[union-attr]
        raise ConfigError("a campaign trains small runs only")
    return execute(job, *given, **named)  # type: ignore[arg-type]


def fault_of_line(words: list[str], status: int, out: str, err: str) -> str:
    """Return what is wrong with how a command ended."""
    said = [line for line in err.splitlines() if line.startswith("d2pfed: ")]
    if status not in STATUSES.get(words[0] if words else "", (0, 2)):
        return f"status {status}: {err[-900:]}"
    if "Traceback" in out + err:
        return f"a traceback: {err[-900:]}"
    if status == 2 and len(said) != 1:
        return f"not one line: {err[-900:]}"
    return ""


def commands(count: int, seed: str) -> tuple[Counter[str], list[str]]:
    """Run so many odd command lines, each in a directory as the first found it."""
    fates, wrong = Counter[str](), []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        kept, here = Path(place) / "kept", Path(place) / "here"
        here.mkdir()
        environment = {"HOME": str(here / "home"), "XDG_CACHE_HOME": str(here / "home"), "D2PFED_DATA": ""}
        with patch.dict(os.environ, environment):
            with chdir(here):
                stand_for = prepare_files(run_line)
            here.rename(kept)
            for number in range(count):
                words = odd_line(Stream(digest("odd line", seed, number)), stand_for)
                shutil.copytree(kept, here, symlinks=True)
                with chdir(here):
                    status, out, err = run_line(words)
                shutil.rmtree(here)
                fates[f"with status {status}"] += 1
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
