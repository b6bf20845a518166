"""What shows whether calls at some depth map memory for their frames: pages that they touch for the first time."""

import resource

CALLS = 2000


def most_faults() -> int:
    """Return the most pages that ``CALLS`` calls bring in, at the worst of four hundred depths below this one."""
    return max(_faults_at(depth) for depth in range(400))


def _faults_at(depth: int) -> int:
    return _faults_at(depth - 1) if depth else _faults_of_calls()


def _faults_of_calls() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _one_call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _one_call() -> None:
    return _another()


def _another() -> None:
    return None
