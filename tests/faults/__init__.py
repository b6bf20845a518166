"""Faults of the storage, one at a time: each system call that a run makes there fails in each way that it can.

By hand: ``python -m tests.faults --help``. A seeded sample runs with the tests.
"""
