"""Kernels compile when they are first called, with or without a place for their code."""

import subprocess
import sys

from numba.core.caching import CacheImpl

from d2pfed.numerics.compiled import compiled


def double(value):
    return 2 * value


def test_kernels_compile_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    kernel = compiled(double)
    assert kernel(21) == 42
    assert len(kernel.code.signatures) == 1


@compiled
def half(value):
    return value / 2


@compiled
def quarter(value):
    return half(half(value))


def test_kernels_call_kernels():
    assert quarter(84) == 21
    assert half(42) == 21


def test_what_is_slow_to_load_waits_until_it_is_needed():
    slow = "{'numba', 'scipy', 'dp_accounting', 'mpmath', 'torch', 'matplotlib'}"
    script = f"import sys, d2pfed; print(sorted({slow} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
