"""Benchmarks: `rcd bench decode` and `rcd bench train`."""
