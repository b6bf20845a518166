"""Plans of a model under a config, on the machine that this describes: made as the stage makes them, without a run."""

from __future__ import annotations

from dataclasses import replace

from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import read
from offstage.stages.machine.hardware import hardware
from offstage.stages.machine.kernels import NOMINAL, Kernels
from offstage.stages.machine.rates import Rates, read_rates
from offstage.stages.plan.inputs import gather_inputs
from offstage.stages.plan.lossless import choose_packing, possible_packing, with_copies
from offstage.stages.plan.options import PlanConfig
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.stage import plan_from


def make_plan(
    outline: Outline,
    config: Config,
    *,
    rates: Rates | None = None,
    kernels: Kernels = NOMINAL,
) -> Plan:
    """Return the plan of the model under ``config`` on the machine that it describes; see ``plan_from``.

    ``rates`` and ``kernels`` are those of the machine; by default what the config gives, or nominal ones.
    """
    rates = rates or read_rates(config.get("hardware") or {})
    storage, machine = read(PlanConfig, config).storage, hardware(config)
    packing = choose_packing(storage, possible_packing(storage, outline, config), outline, rates)
    inputs = gather_inputs(with_copies(outline, packing), config, machine=machine, rates=rates, kernels=kernels)
    return plan_from(replace(inputs, packing=packing))
