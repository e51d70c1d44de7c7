"""Copies of the package in which a text is changed, and tests run against them."""

import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # that tests may take before a change counts as killed by a hang
VERDICTS = {0: "survived", 1: "killed"}  # pytest's exit statuses; any other: the tests did not run


def run_tests(package: Path, tests: list[str], seconds: float = SECONDS) -> int:
    """Run tests against the package in a directory; return pytest's exit status, 1 for a hang."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(package), str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(package / ".hypothesis"),
    }
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *options, *(f"{ROOT / 'tests'}/{test}" for test in tests)]
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


class Copies:
    """Copies of the package, each used by one thread at a time; compiled kernels stay between uses."""

    def __init__(self, directory: Path, count: int) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            copy = directory / str(number)
            shutil.copytree(
                ROOT / "src" / "d2pfed", copy / "d2pfed", ignore=shutil.ignore_patterns("__pycache__", "*.nb?")
            )
            self._free.put(copy)

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[Path]:
        """Lend a copy in which a file has another text; it is as it was afterwards, its time of change included."""
        copy = self._free.get()
        place = copy / "d2pfed" / file
        before, times = place.read_text(), place.stat()
        place.write_text(text)
        try:
            yield copy
        finally:
            place.write_text(before)
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
            self._free.put(copy)
