"""How tensors are served, by where they lie and where they compute."""

from dataclasses import replace

import pytest
from torch import nn

from offstage.stages.empty_init.describe import describe
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.serving import Io, choose_io
from offstage.stages.plan.traffic import PLAIN_STEP, traffic
from offstage.stages.units import CPU, DeviceId
from tests.stages.plan.plans import make_plan
from tests.stages.plan.skeletons import stack


class Scaled(nn.Embedding):
    """An embedding of a class of its own, as some models have."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scaled, self.head = nn.Embedding(8, 4), Scaled(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("angles", self.head.weight[0].detach().clone(), persistent=False)


def served(home: DeviceId, computes: DeviceId, io: Io = "direct") -> dict[str, str]:
    outline = Outline(describe(Model(), rehearsed=False))
    homes = dict.fromkeys(outline.sizes, home)
    return dict(
        lay_out(outline, Placement(homes, CPU), execution=dict.fromkeys(outline.direct, computes), io=io).serving
    )


TABLES = ("table.weight", "scaled.weight")


def test_what_lies_where_it_computes_is_resident() -> None:
    assert served("cpu", "cpu") == served(1, 1) == {}


def test_the_host_looks_up_rows_and_reads_or_maps_the_rest() -> None:
    assert served("disk", "cpu") == {**dict.fromkeys(TABLES, "rows"), "head.weight": "direct"}
    assert served("disk", "cpu", "mmap") == {**dict.fromkeys(TABLES, "rows"), "head.weight": "map"}


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_an_accelerator_gets_what_is_on_disk_whole_and_copies_what_is_in_memory(io: Io) -> None:
    weights = (*TABLES, "head.weight")
    assert served("disk", 0, io) == {**dict.fromkeys(weights, "direct"), "angles": "copy"}
    assert served("cpu", 0, io) == served(1, 0, io) == dict.fromkeys((*weights, "angles"), "copy")


def test_the_bytes_that_a_policy_goes_by_are_those_of_the_serving() -> None:
    outline = Outline(describe(Model(), rehearsed=False))
    homes: dict[str, DeviceId] = {tensor.name: "disk" for tensor in outline.skeleton.unique}
    assert traffic(lay_out(outline, Placement(homes, "cpu")), PLAIN_STEP).at_rest == {
        "disk": outline.sizes["head.weight"]
    }


def test_embeddings_that_other_modules_read_are_streamed() -> None:
    skeleton = replace(describe(Model(), rehearsed=False), borrowers={"table": ("head",)})
    outline = Outline(skeleton)
    layout = lay_out(
        outline,
        Placement(dict.fromkeys(outline.sizes, "disk"), CPU),
        execution=dict.fromkeys(outline.direct, "cpu"),
        io="direct",
    ).serving
    assert (layout["table.weight"], layout["scaled.weight"]) == ("direct", "rows")


@pytest.mark.parametrize(
    ("asked", "free", "chosen"),
    [("auto", 125, "mmap"), ("auto", 124, "direct"), ("mmap", 0, "mmap"), ("direct", 999, "direct")],
)
def test_auto_maps_what_fits_in_four_fifths_of_the_free_memory(asked: str, free: int, chosen: str) -> None:
    assert choose_io(asked, streamed_bytes=100, free_bytes=free) == chosen


@pytest.mark.parametrize(("asked", "beside", "serving"), [
    ("auto", 210, "map"), ("auto", 22, "direct"), ("mmap", 22, "map"), ("direct", 210, "direct"),
])  # fmt: skip
def test_a_plan_says_how_each_tensor_is_read_by_the_memory_that_was_free(asked: str, beside: int, serving: str) -> None:
    host = {"memory": f"{PROCESS_BYTES // 10**6 + beside}MB"}
    config = {"max_memory": {"cpu": "20MB"}, "device_map": "sequential", "hardware": {"host": host}}
    plan = make_plan(stack(4, 10**7), {**config, "generate": {}, "storage": {"io": asked}})
    assert set(plan.serving.values()) == {serving}
    assert plan.serving.keys() == {name for name, home in plan.homes.items() if home == "disk"}
    assert plan.forecast["streamed_bytes_per_token"] == sum(10**7 for _ in plan.serving)
    stays = serving == "map" and asked == "auto"
    assert plan.forecast["bottleneck"] == ("host memory" if stays else "storage"), "pages that stay aren't read again"
