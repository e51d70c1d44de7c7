"""Kernels compile with or without a place for their code."""

import os
import subprocess
import sys

PROGRAM = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []  # as on a machine where nothing can be written
from d2pfed.compiled import compiled

@compiled
def double(value):
    return 2 * value

assert double(21) == 42
print("compiled", len(double.signatures))
"""


def test_kernels_compile_where_nothing_can_be_written():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.stdout == "compiled 1\n", done.stderr
