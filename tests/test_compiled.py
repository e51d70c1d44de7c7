"""Kernels compile when they are first called, with or without a place for their code."""

import subprocess
import sys

from numba.core.caching import CacheImpl

from d2pfed.numerics.compiled import compiled, is_kept


def double(value):
    return 2 * value


def test_kernels_compile_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    kernel = compiled(double)
    assert kernel(21) == 42
    assert not is_kept(kernel)
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


def test_a_kernel_is_kept_once_it_has_run_where_there_is_a_place(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    @compiled
    def twice(value):
        return 2 * value

    assert not is_kept(twice)
    assert twice(3) == 6
    assert is_kept(twice)
    assert not is_kept(len)
