"""Mixtures whose experts are modules in a list: of those only what a forward calls is read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from offstage.stages.dispatch.dispatch_plan import make_dispatch_plan
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton, parent
from offstage.stages.machine.devices import Devices
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.units import CPU, DeviceId
from tests.long_form import in_ci, in_turn
from tests.stages.dispatch.placed_models import to_disk
from tests.stages.listed_experts import LAYERS, STYLES, TOP, WORDS, HitExperts, Mixture, SortedExperts, mixture
from tests.stages.packed_models import ScaledRows, quantised, to_packed
from tests.stages.plan.plans import plan_by_hand
from tests.stages.shard_load.checkpoints import disk_weights

IN_ORDER = [HitExperts, SortedExperts]
"""These go through the experts in their order, and not token by token."""
READ_BEYOND = 1.05
"""Reads begin and end at multiples of 4 KiB: that is a thirtieth of an expert's matrix here."""
GUESSED = 1.1
"""A prompt calls nearly all experts in turn: the next is brought ahead, and a few of those aren't called."""
STAGING = {"one matrix": 140_000, "little": 400_000, "an expert": 700_000, "a layer": 2_000_000}


def made(style: type[HitExperts], codec: ScaledRows | None) -> Mixture:
    """Return a mixture, always the same."""
    return quantised(mixture(style), codec) if codec else mixture(style)


@cache
def described(style: type[HitExperts], codec: ScaledRows | None, *, rehearsed: bool) -> Skeleton:
    """Return what is known of that mixture without its data."""
    return describe(made(style, codec), rehearsed=rehearsed, call=lambda m: m(torch.ones((1, 8), dtype=torch.long)))


class Listed:
    """A mixture on disk that is streamed to ``computes``, and the same in memory; every pass is compared.

    With a ``codec`` its matrices rest packed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        staging: int,
        style: type[HitExperts] = HitExperts,
        rehearsed: bool = True,
        computes: DeviceId = "cpu",
        codec: ScaledRows | None = None,
    ) -> None:
        self.plain, self.model = made(style, codec), made(style, codec)
        skeleton = described(style, codec, rehearsed=rehearsed)
        homes: dict[str, DeviceId] = {tensor.name: "disk" for tensor in skeleton.tensors}
        execution = {parent(name): computes for name in homes}
        serving = lay_out(Outline(skeleton), Placement(homes, CPU), execution=execution, io="direct").serving
        plan = plan_by_hand(homes, execution, serving, main=computes)
        dispatch = replace(make_dispatch_plan(skeleton, plan), staging_bytes=staging, reserves={0: staging})
        store = to_packed(codec) if codec else to_disk
        extents = store(self.model, set(homes), folder / "weights", begin=64)
        devices = Devices({} if computes == "cpu" else {0: 10**8})
        self.streamer = Streamer(self.model, dispatch, stored=disk_weights(extents), devices=devices)
        self.called: set[str] = set()
        for name, module in self.plain.named_modules():
            module.register_forward_pre_hook(lambda _m, _a, name=name: self.called.add(name))
        self.words = torch.Generator().manual_seed(1)

    def routed_bytes(self) -> int:
        """Return the bytes of what the last pass called: all but the embedding, of which rows are looked up."""
        sizes = {name: sum(p.nbytes for p in m.parameters(recurse=False)) for name, m in self.plain.named_modules()}
        return sum(sizes[name] for name in self.called if name != "embed")

    def answer(self, tokens: int) -> tuple[int, int, int]:
        """Return the bytes streamed and those read for a pass of so many ``tokens``, and what it called."""
        traffic = self.streamer.traffic
        streamed, read = traffic.streamed_bytes, traffic.storage_bytes
        given = torch.randint(WORDS, (tokens,), generator=self.words)
        self.called.clear()
        expected = self.plain(given)
        assert torch.equal(self.model(given), expected)
        return traffic.streamed_bytes - streamed, traffic.storage_bytes - read, self.routed_bytes()


@pytest.fixture
def listed(tmp_path: Path) -> Iterator[Callable[..., Listed]]:
    made: list[Listed] = []

    def make(**options: object) -> Listed:
        made.append(Listed(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.streamer.remove()


def norms(model: Mixture) -> int:
    """Return the bytes that a pass brings twice: a layer uses its norm for the attention, and for the mixture."""
    return sum(parameter.nbytes for layer in model.layers for parameter in layer.norm.parameters())


CASES = [(style, memory) for style in STYLES for memory in STAGING]
IN_CI = [(style, memory) for style, memory in CASES if style is HitExperts or memory == "one matrix"]


@pytest.mark.parametrize(("style", "memory"), in_ci(*IN_CI, of=CASES))
def test_a_token_reads_what_is_dense_and_the_experts_it_is_routed_to(
    style: type[HitExperts], memory: str, listed: Callable[..., Listed]
) -> None:
    stage = listed(style=style, staging=STAGING[memory])
    streamed, read, routed = stage.answer(40)
    assert read <= GUESSED * max(streamed, routed)
    for _ in range(4):  # the first of them follows a pass that called nearly all experts
        streamed, read, routed = stage.answer(1)
        assert streamed == routed + norms(stage.plain)
        assert read <= READ_BEYOND * routed
    assert stage.streamer.traffic.overflow_bytes == 0


@pytest.mark.parametrize("staging", STAGING.values(), ids=STAGING)
def test_so_it_is_where_the_order_is_that_of_registration(staging: int, listed: Callable[..., Listed]) -> None:
    stage = listed(rehearsed=False, staging=staging)
    stage.answer(40)
    stage.answer(1)
    for _ in range(3):
        _, read, routed = stage.answer(1)
        assert read <= READ_BEYOND * routed


@pytest.mark.parametrize("staging", [*STAGING.values()][1:], ids=[*STAGING][1:])
def test_so_it_is_on_an_accelerator(staging: int, listed: Callable[..., Listed]) -> None:
    stage = listed(computes=0, staging=staging)
    stage.answer(40)
    for _ in range(4):
        streamed, read, routed = stage.answer(1)
        assert streamed == routed + norms(stage.plain) + stage.plain.embed.weight.nbytes
        assert read <= READ_BEYOND * (routed + stage.plain.embed.weight.nbytes)


def test_experts_that_fit_the_staging_memory_are_read_once(listed: Callable[..., Listed]) -> None:
    stage = listed(staging=30_000_000)
    stage.answer(40)
    stage.answer(40)
    traffic = stage.streamer.traffic
    before = traffic.storage_bytes
    stage.answer(40)
    assert traffic.storage_bytes - before < 0.05 * traffic.streamed_bytes


@pytest.mark.parametrize("computes", ["cpu", 0])
def test_what_was_found_in_a_slot_is_counted_by_list_and_no_expert_is_there_in_part(
    computes: DeviceId, listed: Callable[..., Listed]
) -> None:
    stage = listed(staging=6_000_000, computes=computes)
    slots = stage.streamer._caches[0].experts
    assert slots is not None
    traffic, uses = stage.streamer.traffic, stage.streamer.routed.uses
    assert list(uses) == [f"layers.{layer}.mlp.experts" for layer in range(LAYERS)]
    for tokens in (40, 1, 1, 1):
        before = traffic.expert_hits + traffic.expert_misses
        stage.answer(tokens)
        called = sum(name.rpartition(".")[0].endswith(".experts") for name in stage.called)
        assert traffic.expert_hits + traffic.expert_misses - before == called
        assert all(len(entry.pieces) == 3 for entry in slots._entries.values())
    assert (traffic.expert_hits, traffic.expert_misses) == (
        sum(use.hits for use in uses.values()), sum(use.misses for use in uses.values())
    )  # fmt: skip
    assert sum(use.evictions for use in uses.values()) > 0


def test_slots_for_less_than_a_pass_uses_find_experts_all_the_same(listed: Callable[..., Listed]) -> None:
    stage = listed(staging=3_500_000)
    slots, given = stage.streamer._caches[0].experts, torch.tensor([5])
    assert slots is not None
    for _ in range(4):
        stage.model(given)
    traffic = stage.streamer.traffic
    before = traffic.expert_hits, traffic.expert_misses
    stage.model(given)
    hits, misses = traffic.expert_hits - before[0], traffic.expert_misses - before[1]
    assert len(slots._entries) < hits + misses == LAYERS * TOP
    assert hits > 0, "by the rule that gives up what was used longest ago none would be"


def test_a_pass_that_was_broken_off_leaves_experts_that_can_be_called(listed: Callable[..., Listed]) -> None:
    stage = listed(staging=STAGING["a layer"])
    handle = stage.model.layers[2].mlp.shared.register_forward_pre_hook(lambda _m, _a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stage.model(torch.ones(1, dtype=torch.long))
    handle.remove()
    stage.answer(40)
    stage.answer(1)


@pytest.mark.parametrize("style", IN_ORDER)
def test_calls_in_lockstep_bring_the_experts_of_all_of_them_once(
    style: type[HitExperts], listed: Callable[..., Listed]
) -> None:
    stage = listed(style=style, staging=STAGING["one matrix"])
    stage.answer(40)
    prompts = [torch.randint(WORDS, (count,), generator=stage.words) for count in (1, 3, 1, 2, 7)]
    stage.called.clear()
    expected, answers, before = [stage.plain(ids) for ids in prompts], [], stage.streamer.traffic.streamed_bytes
    stage.streamer.passes.go_together([lambda ids=ids: answers.append(stage.model(ids)) for ids in prompts], size=5)
    assert all(any(torch.equal(answer, each) for answer in answers) for each in expected)
    assert stage.streamer.traffic.streamed_bytes - before == stage.routed_bytes() + norms(stage.plain)


@pytest.mark.parametrize("computes", ["cpu", 0])
def test_a_backward_brings_the_experts_again_that_were_called(computes, listed) -> None:
    stage, embedded = listed(staging=STAGING["little"], computes=computes), {}

    def gradient(model: torch.nn.Module) -> torch.Tensor:
        handle = model.embed.register_forward_hook(lambda _m, _a, out: embedded.update(x=out.requires_grad_()))
        model(torch.arange(8)).square().sum().backward()
        handle.remove()
        return embedded["x"].grad

    for _ in range(2):
        assert torch.equal(gradient(stage.model), gradient(stage.plain))
    assert stage.streamer.traffic.overflow_bytes == 0


@pytest.mark.parametrize(
    ("codec", "computes"), in_turn([ScaledRows(block_rows=40), ScaledRows(turned=True)], ["cpu", 0])
)
def test_experts_that_rest_packed_are_read_in_their_bytes_at_rest(
    codec: ScaledRows, computes: DeviceId, listed: Callable[..., Listed]
) -> None:
    stage = listed(staging=STAGING["a layer"], codec=codec, computes=computes)
    stage.answer(40)
    for _ in range(3):
        streamed, read, routed = stage.answer(1)
        assert max(streamed, read) < 0.3 * (routed + stage.plain.embed.weight.nbytes)
