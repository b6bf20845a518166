"""Which calls in lockstep go together, where a model is divided among hosts and all of one host's wait for another.

On one host all do. On several each host would wait while others compute, so there are as many groups as hosts, each in
lockstep by itself: while one group is elsewhere, another has its turn. Each brings the weights that stream once for all
of its calls. Where nothing streams on any host there is nothing to share, and each call is a group by itself: none
waits for another then.

All hosts must have the same groups: else one might wait in a group for a call that waits elsewhere for another group.
So a call is in a group by its number, and the next of that number's group follows one that ends, whatever the others
have come to meanwhile. Where hosts may have the same calls at different times each goes by itself for the same reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

Task = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Grouping:
    """How many ``groups`` calls are divided in, null where each is one by itself; their ``numbers``."""

    groups: int | None = 1
    numbers: Iterator[int] = field(default_factory=count)


class Lanes:
    """The tasks that wait to join, at most ``size`` at a time, each by its number in the lane of its group."""

    def __init__(self, tasks: Iterable[Task | None], *, size: int, grouping: Grouping) -> None:
        self._tasks, self._numbers, self._size = iter(tasks), grouping.numbers, size
        self._count = None if grouping.groups is None else min(grouping.groups, size)
        self._waiting: dict[int, deque[tuple[int, Task]]] = {}
        self._under_way: Counter[int] = Counter()

    def next(self) -> tuple[int, int, Task] | None:
        """Return the number, the group and the task that joins now; null where there is no room, or none waits.

        Tasks are asked for as there is room for some.
        """
        ready = next((group for group, queue in self._waiting.items() if queue and self._has_room(group)), None)
        if ready is not None:
            number, task = self._waiting[ready].popleft()
            return self._joins(number, ready, task)
        while self._under_way.total() < self._size and (newcomer := next(self._tasks, None)) is not None:
            number = next(self._numbers)
            group = number if self._count is None else number % self._count
            if self._has_room(group):
                return self._joins(number, group, newcomer)
            self._waiting.setdefault(group, deque()).append((number, newcomer))
        return None

    def end(self, group: int) -> None:
        """Hear that one of ``group`` has ended."""
        self._under_way[group] -= 1
        if not self._under_way[group]:
            del self._under_way[group]

    def _has_room(self, group: int) -> bool:
        if self._count is None:
            return self._under_way.total() < self._size
        whole, rest = divmod(self._size, self._count)
        return self._under_way[group] < whole + (group < rest)

    def _joins(self, number: int, group: int, task: Task) -> tuple[int, int, Task]:
        self._under_way[group] += 1
        return number, group, task
