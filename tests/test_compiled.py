"""Kernels compile with or without a place for their code."""

from numba.core.caching import CacheImpl

from d2pfed.compiled import compiled


def double(value):
    return 2 * value


def test_kernels_compile_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    kernel = compiled(double)
    assert kernel(21) == 42
    assert len(kernel.signatures) == 1
