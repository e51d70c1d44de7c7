"""Benchmarks against peers and the machine's limits."""
