"""Hypothesis profiles: `ci` repeats itself, `nightly` explores (HYPOTHESIS_PROFILE=nightly). What the suite saves."""

import os
import re
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Kernels compile on their first call and machines are busy, so neither an example nor its making has a deadline.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", untimed, derandomize=True, max_examples=60)
settings.register_profile("nightly", untimed, max_examples=5000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Ledgers and logs sync every row, and a disk takes milliseconds for it. No test cuts the power, so memory will do.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1 << 31:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

DRAWN = ("test_report", "test_report_reading", "test_clipping")  # tests of what a report's plots show


@cache
def _draw(plot):
    from d2pfed.runs.report.plots import draw  # noqa: PLC0415 - the plotter takes a second to load

    return draw(plot)


def _outline(plot):
    """Draw a plot with its words, but without numbers and with one point for each line."""
    lines = (
        replace(line, name=re.sub(r"[\d.,]+", "0", line.name), xs=(1.0,) if line.xs else (), ys=(0.5,))
        for line in plot.lines
    )
    return _draw(replace(plot, lines=tuple(lines), caption=""))


@pytest.fixture(scope="module", autouse=True)
def outlines(request):
    """Draw equal outlines once: every run ends with plots, which take longer than most runs of tests."""
    with pytest.MonkeyPatch.context() as patch:
        if "d2pfed.runs" in sys.modules and request.module.__name__ not in DRAWN:
            patch.setattr("d2pfed.runs.report.draw", _outline)
        yield
