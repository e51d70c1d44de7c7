"""Tests run against a changed package in forks of one warm process, the quickest first, up to the first that fails.

The process has imported the large libraries and nothing of the package, so that a fork has the changed package alone.
Each test may use ten times the processor time that it took before, and ten seconds at least. What it starts counts.
"""

import compileall
import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "d2pfed"
WARM = (
    "numpy numpy.testing numpy.random scipy.stats scipy.special scipy.fft scipy.optimize scipy.signal numba "
    "numba.core.caching cryptography.hazmat.primitives.ciphers.aead dp_accounting dp_accounting.rdp dp_accounting.pld "
    "torch mpmath hypothesis.strategies hypothesis.stateful safetensors.numpy sqlite3 typer rich.console "
    "flwr.app flwr.clientapp flwr.serverapp "
    "opendp.prelude _hypothesis_pytestplugin pytest_cov.plugin anyio.pytest_plugin _pytest.junitxml pdb"
)
LEAST_SECONDS, FACTOR = 10.0, 10.0  # of processor time that one test may use
LARGEST = 1e6
QUICK_SECONDS = (0.1, 0.5, 2.0)  # tests are run in the order of these limits
COLLECTION = 60.0  # that importing all tests may use
PATIENCE = 900.0  # seconds of the clock for all tests of a mutant: longer is a deadlock
LOST = 98
STATUS = {0: "survived", 1: "killed", 2: "killed"}  # pytest's exit status; 2 if a module cannot be imported


def warm() -> None:
    """Import what tests need; what is not installed is left to the tests that skip without it."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    sys.dont_write_bytecode = False  # or each fork compiles all of the package
    for name in WARM.split():
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    strategies.text().validate()
    strategies.characters(codec="utf-8").validate()
    if any(name.partition(".")[0] == "d2pfed" for name in sys.modules):
        raise RuntimeError("the package must not be imported before it is changed")
    gc.freeze()  # collections in a fork look at its own objects only


@dataclass
class Found:
    """What came of tests: pytest's exit status, the test that ended them, and processor seconds by test."""

    status: int
    killer: str = ""
    times: dict[str, float] = field(default_factory=dict)
    is_slow: bool = False  # the test was stopped for its time


def _used() -> float:
    """Return the processor time of this process and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@dataclass
class Watch:
    """A plugin of pytest: sorts tests by their known times, notes the first failure, and stops those that hang."""

    known: Mapping[str, float]
    only: Collection[str]
    most: float  # processor seconds for all tests
    unknown: float  # the same for one whose time is not known
    report: Callable[[Found], None]
    found: Found = field(default_factory=lambda: Found(1))
    begun: float = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what was not asked for; the quick tests of all modules come first."""
        if self.only:
            items[:] = [item for item in items if item.nodeid in self.only]
        items.sort(key=lambda item: bisect(QUICK_SECONDS, self.known.get(item.nodeid, 0.0)))
        self.begun = _used()  # importing tests is not running them

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Time a test; a signal that nobody handles ends the process if it takes far too long."""
        known = self.known.get(item.nodeid)
        if _used() - self.begun + (known or 0.0) > self.most:
            self.found.status = 0  # all that follow take as long
            self.report(self.found)
            os._exit(0)
        limit = max(LEAST_SECONDS, FACTOR * known) if known is not None else self.unknown
        signal.setitimer(signal.ITIMER_PROF, limit)
        self.found.killer, before = item.nodeid, _used()
        self.report(Found(1, item.nodeid))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.found.times[item.nodeid] = _used() - before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """At the first failure there is nothing left to do."""
        if report.failed:
            self.found.killer = report.nodeid
            self.report(self.found)
            os._exit(0)


def run_forked(
    package: Path,
    tests: Sequence[str],
    known: Mapping[str, float],
    *,
    only: Collection[str] = (),
    most: float = LARGEST,
    unknown: float = LARGEST,
) -> Found:
    """Run tests on the package in a directory, all or only those of these names, for at most `most` seconds.

    A mutant that has lived through the quickest tests for so long has survived, whatever is left. A test whose time is
    not known may take `unknown` seconds.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        try:
            _child(package, tests, Watch(known, only, most, unknown, lambda found: _send(writing, found)))
        finally:
            os._exit(99)
    os.close(writing)
    return _result(child, reading)


def _send(writing: int, found: Found) -> None:
    """Say what is known by now; the last line counts, and a child that is ended has sent one before."""
    raw = json.dumps([found.status, found.killer, found.times]).encode() + b"\n"
    while raw:
        raw = raw[os.write(writing, raw) :]


def _child(package: Path, tests: Sequence[str], watch: Watch) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, COLLECTION)
    places = [str(package), str(ROOT), str(ROOT / "tests")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(places),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(package / ".hypothesis"),
    }
    sys.path[:] = places + [each for each in sys.path if each not in (*places, str(PACKAGE.parent))]
    importlib.invalidate_caches()
    os.chdir(ROOT)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*options, *(str(ROOT / "tests" / test) for test in tests)], plugins=[watch])
    watch.found.status = int(status)
    watch.report(watch.found)
    os._exit(0)


def _result(child: int, reading: int) -> Found:
    end, raw = time.monotonic() + PATIENCE, b""
    os.set_blocking(reading, False)
    while True:
        try:
            part = os.read(reading, 1 << 16)
        except BlockingIOError:
            part = None
        if part == b"":
            break
        raw += part or b""
        if time.monotonic() > end:
            break
        if part is None:
            time.sleep(0.02)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and whatever the tests have left behind
    _, status = os.waitpid(child, 0)
    lines = raw.split(b"\n")[:-1]
    found = Found(*json.loads(lines[-1])) if lines else Found(2, "an import that does not end")
    found.is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    if part == b"" and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        found.status = LOST  # the system has ended it, for want of memory: nothing is known of the mutant
    return found


def require_importable(package: Path, tests: Sequence[str]) -> None:
    """Refuse tests that cannot be imported: they would kill everything."""
    found = run_forked(package, tests, {}, only={"none"})
    if found.status != pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit(f"tests must be importable without a change, got pytest's status {found.status}")


class Packages:
    """Changed copies of the package that share all other files, kernels included, with one warm copy."""

    def __init__(self, directory: Path) -> None:
        self._warm, self._changed = directory / "warm", directory / "changed"
        shutil.copytree(PACKAGE, self._warm / "d2pfed", symlinks=True)
        compileall.compile_dir(self._warm, quiet=1)
        self._forgotten: set[tuple[Path, str]] = set()
        self._kernels = {
            path: path.read_text()
            for path in (self._warm / "d2pfed").rglob("*.py")
            if "@compiled" in path.read_text()
        }

    @property
    def unchanged(self) -> Path:
        """The warm copy, where baselines are run."""
        return self._warm

    def changed(self, file: str, text: str) -> Path:
        """Return a copy in which a file has another text; it lasts until the next one is made."""
        shutil.rmtree(self._changed, ignore_errors=True)
        shutil.copytree(self._warm / "d2pfed", self._changed / "d2pfed", copy_function=os.link)
        place = self._changed / "d2pfed" / file
        place.unlink()
        place.write_text(text)
        self._forgotten = self._forget_kernels(file)
        return self._changed

    def keep_kernels(self) -> None:
        """Take over what was compiled of files that the change does not concern, so that it is compiled once."""
        for cached in self._changed.rglob("*.nb*"):
            kept = self._warm / cached.relative_to(self._changed)
            if (cached.parent, cached.name.partition(".")[0]) not in self._forgotten and not (
                kept.exists() and kept.samefile(cached)
            ):
                kept.unlink(missing_ok=True)
                kept.parent.mkdir(exist_ok=True)
                os.link(cached, kept)

    def _forget_kernels(self, file: str) -> set[tuple[Path, str]]:
        """Drop compiled code of the file and of those that may have compiled its kernels into their own."""
        own, forgotten = self._warm / "d2pfed" / file, set()
        names = re.findall(r"@compiled\ndef (\w+)", self._kernels.get(own, ""))
        for path, text in self._kernels.items():
            if path == own or any(re.search(rf"\b{name}\b", text) for name in names if not name.startswith("_")):
                stale = self._changed / path.parent.relative_to(self._warm) / "__pycache__"
                forgotten.add((stale, path.stem))
                for cached in stale.glob(f"{path.stem}.*.nb*"):
                    cached.unlink()
        return forgotten
