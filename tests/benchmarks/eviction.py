"""The rules by which kept experts give up their slots, side by side on traces of routing.

    python -m tests.benchmarks.eviction --minutes 5

Three traces: experts drawn alike for every token, drawn by Zipf's law with some that stay from token to token (both in
the shape of Qwen3-30B-A3B, a quarter of its layers), and recorded from a small mixture that first learns for
``--minutes`` on the processors that are there (``tests/benchmarks/trained_mixture.py``). The table has the share of the
wanted experts that were in a slot, for slots that hold 1/16 to 1/2 of all experts: shared by all layers, split evenly,
or in the banks of a run. ``optimum`` is Belady's rule, which knows the future: what no rule can beat.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from tests.benchmarks.eviction_rules import POLICIES
from tests.benchmarks.offload import say
from tests.benchmarks.routing import (
    Clairvoyant,
    OptimalSlots,
    RoutingTrace,
    Shape,
    Slots,
    hit_rate,
    in_banks,
    shared_by_all,
    skewed,
    split_evenly,
    uniform,
)
from tests.benchmarks.trained_mixture import learn, record

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
LAYOUTS: Mapping[str, Callable[[RoutingTrace, float, Callable[[int], Slots]], Mapping[int, Slots]]] = {
    "shared": shared_by_all,
    "split": split_evenly,
    "banks": in_banks,
}
FULL = Shape(layers=12, experts=128, chosen=8, tokens=400)
SHORT = Shape(layers=3, experts=16, chosen=2, tokens=40)


def main(given: Sequence[str] | None = None) -> None:
    """Make the traces and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the small mixture learns")
    parser.add_argument("--texts", type=int, default=12, help="how many it continues")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each")
    parser.add_argument("--short", action="store_true", help="small traces and next to no learning: does it run?")
    arguments = parser.parse_args(given)
    for line in table(traces(arguments)):
        say(line)


def traces(arguments: argparse.Namespace) -> Iterator[RoutingTrace]:
    """Yield the traces that were asked for."""
    shape = SHORT if arguments.short else FULL
    yield uniform(shape)
    yield skewed(shape)
    learnt = learn(arguments.minutes, 2 if arguments.short else None, say)
    say(f"the small mixture learnt {learnt.steps} steps, to {learnt.loss:.2f} nats a token")
    yield record(learnt, *((2, 8) if arguments.short else (arguments.texts, arguments.tokens)))


def table(traces: Iterator[RoutingTrace]) -> Iterator[str]:
    """Yield the lines of the table, each when its figures are there."""
    yield f"{'trace':10} {'slots':>6} {'layers':8}" + "".join(f"{name:>13}" for name in [*POLICIES, "optimum"])
    for trace in traces:
        rules = {name: Slots.with_rule(policy) for name, policy in POLICIES.items()}
        rules["optimum"] = OptimalSlots.with_rule(partial(Clairvoyant, trace))
        for share in SHARES:
            for layout, slots in LAYOUTS.items():
                rates = [hit_rate(trace, slots(trace, share, rule)) for rule in rules.values()]
                shares = "".join(f"{rate:13.1%}" for rate in rates)
                yield f"{trace.name:10} {f'1/{round(1 / share)}':>6} {layout:8}{shares}"


if __name__ == "__main__":
    main()
