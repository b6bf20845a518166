"""Plans of a model under a config, on the machine that this describes: made as the stage makes them, without a run."""

from __future__ import annotations

from dataclasses import replace

from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import read
from offstage.stages.machine.hardware import hardware
from offstage.stages.machine.kernels import NOMINAL, Kernels
from offstage.stages.machine.rates import Rates, read_rates
from offstage.stages.plan.inputs import gather_inputs
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.lossless import choose_packing, possible_packing, with_copies
from offstage.stages.plan.options import PlanConfig
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.predict import predict
from offstage.stages.plan.serving import Io
from offstage.stages.plan.stage import plan_from
from offstage.stages.plan.work import Work


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


def predicted(outline: Outline, plan: Plan, needs: Work, rates: Rates, *, io: Io = "direct") -> Plan:
    """Return ``plan`` with what is predicted of it where a request takes ``needs``."""
    leaders = {name: home for name, home in plan.homes.items() if outline.skeleton.leader(name) == name}
    packed = frozenset(name for name in plan.packed_on_host if outline.skeleton.leader(name) == name)
    placement = Placement(leaders, plan.main_device, packed, unpacks=frozenset(plan.unpacking))
    layout = lay_out(outline, placement, plan.budgets, io=io, homes=plan.homes, execution=plan.execution)
    return predict(layout, plan, needs, rates)
