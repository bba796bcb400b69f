"""Benchmarks and the demo: run from the repository, never installed."""
