"""Hypothesis profiles: `ci` repeats itself, `nightly` explores (HYPOTHESIS_PROFILE=nightly)."""

import os

from hypothesis import HealthCheck, settings

# Kernels compile on their first call, so no example has a deadline.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile(
    "nightly", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
