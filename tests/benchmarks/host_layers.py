"""Where layers compute on the host (``execution: fastest``), by the rates of host and link: a table of plans.

    python -m tests.benchmarks.host_layers

A Llama of 13B on one accelerator of 12 GB and of 70B on two of 22 GB, beside a host that holds the rest. Each row has
the predicted seconds of a token under ``exact`` and ``fastest``, how many layers compute on the host, and what trying
every number of them finds.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.policies import host_layers
from offstage.stages.plan.policies.host_layers import with_host_layers
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.traffic import Step, forecast
from offstage.stages.units import CPU, DISK, DeviceId
from tests.benchmarks.link_plans import SHAPES, outline_of

GB = 10**9
BUDGETS: dict[str, dict[DeviceId, int | None]] = {
    "13B": {0: 12 * GB, CPU: 100 * GB, DISK: None},
    "70B": {0: 22 * GB, 1: 22 * GB, CPU: 160 * GB, DISK: None},
}
RATES = Rates(storage=5 * GB, host_to_device=25 * GB, device=900 * GB)
HOSTS = (5, 12, 25, 50, 80, 200)
"""Gigabytes a second of the host's memory, beside links of 25."""


def row(name: str, outline: Outline, host: int) -> str:
    """Return the line of the table for a host whose memory gives so many gigabytes a second."""
    budgets, rates = BUDGETS[name], replace(RATES, host=host * GB)
    step = Step(output_bytes=2 * SHAPES[name]["hidden_size"])
    placements = [Search(rates).optimal(outline, budgets), with_host_layers(outline, budgets, rates, step=step)]
    search, host_layers._FEW = host_layers._FEW, len(outline.layers)
    placements.append(with_host_layers(outline, budgets, rates, step=step))
    host_layers._FEW = search
    exact, fastest, tried = (forecast(lay_out(outline, one, budgets), step, rates).seconds for one in placements)
    layers = (
        f"{len(placements[1].computes):3} of {len(outline.layers)}  {tried:7.3f} s  {len(placements[2].computes):3}"
    )
    return f"{name:4} {host:4} GB/s  {exact:7.3f} s  {fastest:7.3f} s  {layers}"


def main() -> None:
    """Print the table."""
    sys.stdout.write("     host memory  exact  fastest  layers on the host  every number tried\n")
    with tempfile.TemporaryDirectory() as work:
        for name in BUDGETS:
            outline = outline_of(name, Path(work, name))
            for host in HOSTS:
                sys.stdout.write(f"{row(name, outline, host)}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
