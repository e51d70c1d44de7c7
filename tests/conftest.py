"""Hypothesis profiles: `ci` repeats itself, `nightly` explores (HYPOTHESIS_PROFILE=nightly)."""

import os

from hypothesis import HealthCheck, settings

# Kernels compile on their first call and machines are busy, so neither an example nor its making has a deadline.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", untimed, derandomize=True, max_examples=60)
settings.register_profile("nightly", untimed, max_examples=5000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
