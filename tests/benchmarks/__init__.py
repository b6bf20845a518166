"""Benchmarks: run by hand, each prints the figures that the README quotes."""
