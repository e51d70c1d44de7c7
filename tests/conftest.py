"""Hypothesis profiles: `ci` repeats itself, `nightly` explores (HYPOTHESIS_PROFILE=nightly). What the suite saves."""

import os
import shutil
from pathlib import Path

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
