"""Benchmarks: what things cost. Not part of the tests."""
