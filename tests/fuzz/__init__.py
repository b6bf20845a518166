"""A fuzzer of everything that offstage reads: ``python -m tests.fuzz --cases 1000 --seed 0``."""
