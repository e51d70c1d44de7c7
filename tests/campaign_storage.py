"""Servers, clients and resumed runs that are killed, and disks on which each write in turn fails.

`kills 10000` kills children at random moments between and within durable operations. `writes 1` lets every call that
changes a file fail (no space, an error of the device, not synced) or kill, once each, and `writes 5` every fifth. After
each, what has left is compared with what is recorded, and the work must come to its end.
"""

import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from d2pfed.errors import D2PFedError
from d2pfed.numerics.randomness import Entropy, Stream
from support.storage import SCENARIOS, OutsideError, Scenario, participate

SHARES = {"server": 5, "resume": 3, "client": 2}  # of ten kills
LIVES = 10  # that one directory is killed in
ONE_ROUND = SCENARIOS | {"client": replace(SCENARIOS["client"], live=partial(participate, attempts=1))}
CALLS = (
    "write",
    "pwrite64",
    "fdatasync",
    "fsync",
    "ftruncate",
    "rename",
    "renameat",
    "unlink",
    "unlinkat",
    "mkdir",
)
SYNCS = ("fdatasync", "fsync")
FAULTS = {
    "no space": ("error=ENOSPC", [call for call in CALLS if call not in SYNCS]),
    "device": ("error=EIO", [call for call in CALLS if call not in SYNCS]),
    "not synced": ("error=EIO", list(SYNCS)),
    "killed": ("signal=KILL", list(CALLS)),
}


def forked(work: Callable[[], None]) -> int:
    """Start a process that does the work; it ends with 0, with 1 by an error of ours, and with 2 by any other."""
    child = os.fork()
    if child == 0:
        status = 0
        try:
            work()
        except (D2PFedError, OutsideError):
            status = 1
        except BaseException as error:  # noqa: BLE001 - a fork must never return into its parent's code
            os.write(2, f"{error!r}\n".encode())
            status = 2
        os._exit(status)
    return child


def killed(scenario: Scenario, directory: Path, stream: Stream) -> bool:
    """Kill a life some events after its start and a part of the next one; return False if it was done before."""
    events, end = os.pipe()
    child = forked(lambda: scenario.live(directory, end))
    os.close(end)
    gap, last = 0.004, time.monotonic()
    for _ in range(stream.below(6)):
        if not os.read(events, 1):
            break
        gap, last = time.monotonic() - last, time.monotonic()
    time.sleep(2 * gap * stream.below(1000) / 1000)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(events)
    if status not in (0, signal.SIGKILL):
        raise AssertionError(f"a life in {directory} failed by itself")
    return status == signal.SIGKILL


def kills(count: int, directory: Path, seed: str) -> dict[str, object]:
    """Kill so many lives of servers, resumed runs and clients, the three kinds side by side: most of it is waiting."""
    with ProcessPoolExecutor(len(SHARES), get_context("fork")) as pool:
        found = pool.map(
            partial(_killed_lives, directory=directory, seed=seed),
            SHARES,
            [-(-count * share // 10) for share in SHARES.values()],
        )
        done, ended, wrong = zip(*found, strict=True)
    titles = {"server": "a server", "resume": "resumed runs", "client": "clients"}
    counts = ", ".join(f"{number:,} of {titles[name]}" for name, number in zip(SHARES, done, strict=True))
    return {
        "campaign": "kills at durable operations",
        "command": f"scripts/campaign storage-kills {count} --seed {seed}",
        "result": f"{sum(done):,} kills ({counts}), {sum(ended):,} directories brought to their end afterwards: "
        f"{sum(wrong)} releases or vectors lost, opened twice or under-reported",
        "failed": sum(wrong),
    }


def _killed_lives(name: str, wanted: int, directory: Path, seed: str) -> tuple[int, int, int]:
    """Kill so many lives of one kind; return how many, how many directories came to their end, and what was wrong."""
    stream = Entropy.replay(seed.encode()).child(name).stream()
    scenario, place = SCENARIOS[name], directory / name
    _warm(scenario, place)
    done = ended = wrong = 0
    while done < wanted:
        place.mkdir()
        scenario.prepare(place)
        for _ in range(LIVES):
            done += killed(scenario, place, stream)
            if done >= wanted:
                break
        wrong += scenario.wrong(place)
        scenario.live(place, None)  # it still comes to its end
        wrong += scenario.wrong(place)
        ended += 1
        shutil.rmtree(place)
    return done, ended, wrong


def _warm(scenario: Scenario, directory: Path) -> None:
    """Live once to the end here, so that what is computed once is there for all children."""
    directory.mkdir()
    scenario.prepare(directory)
    scenario.live(directory, None)
    shutil.rmtree(directory)
    gc.freeze()  # collections in a child look at its own objects only


def traced(scenario: Scenario, directory: Path, *options: str) -> int:
    """Live once under strace, attached before anything is done; return the exit status."""

    def wait_then_live() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        scenario.live(directory, None)

    child = forked(wait_then_live)
    os.waitpid(child, os.WUNTRACED)
    command = ["strace", "-p", str(child), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as tracer:
        assert tracer.stderr is not None
        tracer.stderr.readline()  # it says when it is attached
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
        tracer.stderr.read()
    return status


def calls_of(scenario: Scenario, directory: Path) -> list[tuple[str, int]]:
    """Return the calls that an undisturbed life makes, each with its number among those of its name."""
    directory.mkdir()
    scenario.prepare(directory)
    log = directory.with_suffix(".trace")
    traced(scenario, directory, "-o", str(log), "-e", f"trace={','.join(CALLS)}")
    seen, calls = Counter[str](), []
    for name in re.findall(r"^(\w+)\(", log.read_text(), re.MULTILINE):
        seen[name] += 1
        calls.append((name, seen[name]))
    shutil.rmtree(directory)
    return calls


def writes(step: int, directory: Path, seed: str) -> dict[str, object]:
    """Let each step-th call of each scenario fail in each way, the scenarios side by side."""
    del seed  # nothing is drawn
    with ProcessPoolExecutor(len(SCENARIOS), get_context("fork")) as pool:
        found = pool.map(partial(_failing_writes, step=step, directory=directory), SCENARIOS)
        points, refused, wrong, unexplained = zip(*found, strict=True)
    each = sum(points, start=Counter[str]())
    counts = ", ".join(f"{number} {fault}" for fault, number in each.items())
    return {
        "campaign": "every write fails",
        "command": f"scripts/campaign storage-writes {step}",
        "result": f"{each.total():,} lives of a server, a resumed run and clients, in each of which one call "
        f"that changes a file failed or killed ({counts}; {sum(refused)} ended by an error of ours): {sum(wrong)} lost "
        f"or under-reported, {sum(unexplained)} other errors",
        "failed": sum(wrong) + sum(unexplained),
    }


def _failing_writes(name: str, step: int, directory: Path) -> tuple[Counter[str], int, int, int]:
    """Return how often each fault was tried, lives that ended by an error of ours, what was lost, and other errors."""
    scenario, place = ONE_ROUND[name], directory / name
    _warm(scenario, place)
    calls = calls_of(scenario, place)
    points, refused, wrong, unexplained = Counter[str](), 0, 0, 0
    for fault, (injection, among) in FAULTS.items():
        for call, number in [each for each in calls if each[0] in among][::step]:
            place.mkdir()
            scenario.prepare(place)
            inject = f"inject={call}:{injection}:when={number}"
            status = traced(scenario, place, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
            points[fault] += 1
            refused += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) > 1:
                unexplained += 1
                sys.stderr.write(f"{name} {fault} {call} {number}: an error that is not ours\n")
            lost = scenario.wrong(place)
            scenario.live(place, None)
            lost += scenario.wrong(place)
            if lost:
                sys.stderr.write(f"{name} {fault} {call} {number}: {lost} lost\n")
            wrong += lost
            shutil.rmtree(place)
    return points, refused, wrong, unexplained


def main(name: str, size: int, directory: Path, seed: str) -> int:
    """Run a campaign by its name and print what was found."""
    logging.disable()  # clients say at length that their disk has failed
    found = {"kills": kills, "writes": writes}[name](size, directory, seed)
    print(json.dumps(found))
    return int(found["failed"] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
