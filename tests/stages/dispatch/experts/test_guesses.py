"""Experts are read before the router has spoken where that comes true, behind all that is certain; no bit changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offstage
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.experts import routed_experts
from offstage.stages.dispatch.experts.expert_slots import Bank, ExpertLayer, ExpertSlots, SlotRows
from offstage.stages.dispatch.experts.guess_precision import WORTH, GuessPrecision
from offstage.stages.dispatch.experts.router_guess import RouterGuess
from offstage.stages.dispatch.experts.slot_memory import RowShape, SlotMemory
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.dispatch.transfer.links import HostLink
from offstage.stages.dispatch.transfer.mover import Mover
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers
from offstage.stages.dispatch.transfer.reading_threads import reader_pool
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.empty_init.experts import is_experts
from offstage.stages.machine.probes import READING_THREADS
from offstage.stages.plan.expert_slots import bank_bounds
from tests.stages.dispatch.experts.mixtures import mixture
from tests.stages.reading_threads import settle

ROW = 5000
LAYERS, EXPERTS = 2, 6
KIND = (("up", RowShape((ROW,), torch.uint8)), ("down", RowShape((ROW,), torch.uint8)))
GUESSING = ["Mixtral", "Qwen3-MoE", "OLMoE", "DeepSeek-V3", "gpt-oss", "Granite-MoE"]


def value(layer: int, expert: int) -> int:
    return 10 * layer + expert + 1


@contextmanager
def pool_of(
    folder: Path, slots: int = 12, *, missing: tuple[int, int] | None = None
) -> Iterator[tuple[ExpertSlots, Any]]:
    """Yield a pool over a file, and its traffic; what is ``missing`` of the experts lies beyond the file's end."""
    path = folder / "weights"
    rows: dict[int, dict[str, list[tuple[Extent, ...]]]] = {}
    keys = [(layer, name, expert) for layer in range(LAYERS) for name, _ in KIND for expert in range(EXPERTS)]
    path.write_bytes(b"".join(bytes([value(layer, expert)]) * ROW for layer, _, expert in keys))
    file = ShardFile(path.name, path, path.stat().st_size, path.stat().st_mtime_ns, "")
    for number, (layer, name, expert) in enumerate(keys):
        begin = (number if (layer, expert) != missing else 2 * len(keys)) * ROW
        rows.setdefault(layer, {}).setdefault(name, []).append((Extent(file, begin, "uint8", (ROW,)),))
    layers = [ExpertLayer(layer, f"layers.{layer}", rows[layer]) for layer in range(LAYERS)]
    link, traffic = HostLink(), Traffic()
    bounds = bank_bounds(slots, layers=LAYERS, largest=EXPERTS, together=2)
    memory = SlotMemory(KIND, bounds[-1][1], link, room=slots * 2 * ROW)
    banks = [Bank(SlotRows(memory, begin, end)) for begin, end in bounds]
    places = [place for layer in layers for row in layer.rows.values() for found in row for place in found]
    buffers = PinnedBuffers(link, count=4, size=4 * 4096)
    pool = ExpertSlots(
        layers, {layer: banks[layer % len(banks)] for layer in range(LAYERS)},
        Mover(link, places, buffers=buffers, traffic=traffic),
    )  # fmt: skip
    try:
        yield pool, traffic
    finally:
        pool.close()
        buffers.close()


@contextmanager
def idle_readers() -> Iterator[None]:
    """Have no read begin."""
    release = threading.Event()
    busy = [reader_pool().submit(release.wait) for _ in range(READING_THREADS)]
    try:
        yield
    finally:
        release.set()
        for job in busy:
            job.result()


def call(pool: ExpertSlots, layer: int, *experts: int) -> None:
    """Call ``layer`` for ``experts``, and fail where something else lies in their slots."""
    wanted = [(layer, expert) for expert in experts]
    guessed = pool.judge(layer, wanted)
    hits = [expert for expert in wanted if pool.has(expert) and expert not in guessed]
    missing = [expert for expert in wanted if not pool.has(expert)]
    pool.count(layer, hits=hits, guessed=guessed, misses=len(missing))
    for name, _ in KIND:
        for expert in missing:
            assert pool.ask(expert, (name,), wanted)
    for name, _ in KIND:
        pool.wait(wanted, name)
        stacks, places = pool.stack(wanted)
        for (_, expert), place in zip(wanted, places, strict=True):
            assert bool((stacks[name][place] == value(layer, expert)).all())
    pool.give_up(layer)


def guess(pool: ExpertSlots, layer: int, *experts: int) -> None:
    pool.guess(layer, [(layer, expert) for expert in experts], [])


def test_a_guess_that_comes_true_is_read_once_and_counts_as_brought(tmp_path: Path) -> None:
    with pool_of(tmp_path) as (pool, traffic):
        guess(pool, 1, 4, 2)
        settle()
        call(pool, 1, 2, 4, 5)
        assert (traffic.expert_guesses, traffic.expert_guesses_used) == (2, 2)
        assert (traffic.expert_hits, traffic.expert_misses) == (0, 3)
        assert traffic.streamed_bytes == pool.uses[1].streamed_bytes == 3 * 2 * ROW
        read = traffic.storage_bytes
        call(pool, 1, 2, 4, 5)
        assert (traffic.expert_hits, traffic.storage_bytes) == (3, read)


def test_a_guess_that_comes_to_nothing_is_kept_until_its_slot_is_needed(tmp_path: Path) -> None:
    with pool_of(tmp_path, slots=4) as (pool, traffic):
        call(pool, 1, 0, 1)
        guess(pool, 1, 4, 5)
        settle()
        call(pool, 1, 0, 1)
        assert (traffic.expert_guesses, traffic.expert_guesses_used) == (2, 0)
        assert pool.has((1, 4))
        read = traffic.storage_bytes
        call(pool, 1, 2, 3)
        assert [expert for expert in range(EXPERTS) if pool.has((1, expert))] == [0, 1, 2, 3]
        assert traffic.streamed_bytes == 4 * 2 * ROW < traffic.storage_bytes
        assert traffic.storage_bytes > read


def test_a_guess_that_is_there_when_a_later_call_wants_it_is_found(tmp_path: Path) -> None:
    with pool_of(tmp_path) as (pool, traffic):
        guess(pool, 1, 4)
        settle()
        call(pool, 1, 0)
        call(pool, 1, 4)
        assert (traffic.expert_hits, traffic.expert_misses) == (1, 1)


def test_of_what_has_not_begun_to_come_nothing_is_read_but_what_came_true(tmp_path: Path) -> None:
    with pool_of(tmp_path) as (pool, traffic):
        with idle_readers():
            guess(pool, 1, 3, 4)
            assert pool.judge(1, [(1, 4)]) == [(1, 4)]
            assert not pool.has((1, 3))
        pool.wait([(1, 4)], "up")
        pool.wait([(1, 4)], "down")
        settle()
        assert (traffic.expert_guesses, traffic.streamed_bytes) == (0, 2 * ROW)


def test_a_guess_takes_no_slot_of_what_is_in_use_and_gives_its_own_to_what_is_certain(tmp_path: Path) -> None:
    with pool_of(tmp_path, slots=1) as (pool, traffic):
        call(pool, 0, 0)
        pool.guess(1, [(1, 0)], [(0, 0)])
        assert pool.has((0, 0))
        guess(pool, 1, 1)
        call(pool, 0, 3)
        assert traffic.expert_misses == 2


@pytest.mark.parametrize("wanted", [(0,), (0, 4)])
def test_a_guess_that_fails_fails_no_call_but_one_that_needs_it(wanted: tuple[int, ...], tmp_path: Path) -> None:
    with pool_of(tmp_path, missing=(1, 4)) as (pool, _):
        guess(pool, 1, 4)
        settle()
        if 4 in wanted:
            with pytest.raises(CheckpointError):
                call(pool, 1, *wanted)
        else:
            call(pool, 1, *wanted)
        pool.begin_pass()
        assert not pool.has((1, 4))
        call(pool, 1, 0)


def test_a_pass_that_never_reaches_the_layer_of_a_guess_holds_no_slot_for_it(tmp_path: Path) -> None:
    with pool_of(tmp_path, slots=2) as (pool, _):
        guess(pool, 1, 0, 1)
        pool.begin_pass()
        call(pool, 0, 2, 3)


def test_a_place_among_the_choices_is_read_ahead_as_long_as_it_comes_true() -> None:
    precision = GuessPrecision()
    experts = [(1, 0), (1, 1)]
    assert precision.worth_reading(1, experts) == experts
    for _ in range(3):
        precision.judge(1, [(1, 0), (1, 7)])
        worth = precision.worth_reading(1, experts)
    assert worth == [(1, 0)]
    for _ in range(16):
        precision.judge(1, experts)
        worth = precision.worth_reading(1, experts)
    assert worth == experts


def test_what_comes_to_nothing_is_a_small_share_however_guesses_turn_out() -> None:
    random = torch.Generator().manual_seed(0)
    for share in (0.0, 0.5, 0.8, 1.0):
        precision, read, vain = GuessPrecision(), 0, 0
        for _ in range(2000):
            worth = precision.worth_reading(1, [(1, 0)])
            right = torch.rand((), generator=random).item() < share
            precision.judge(1, [(1, 0)] if right else [])
            read += len(worth)
            vain += len(worth) * (not right)
        assert vain <= (1 - WORTH) * 2000, share
        assert (read == 2000) == (share == 1.0)


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [each for each in model.modules() if any(map(is_experts, each.children()))]


@pytest.mark.parametrize("name", GUESSING)
def test_a_router_that_is_asked_ahead_answers_as_in_its_turn_and_nobody_notices(name: str) -> None:
    model = mixture(name)
    block = blocks(model)[0]
    (experts,) = filter(is_experts, block.children())
    given, routed, called = [], [], []
    hooks = [block.register_forward_pre_hook(lambda _m, args: given.append(args[0]))]
    hooks.append(experts.register_forward_pre_hook(lambda _m, args: routed.append(args[1])))
    with torch.inference_mode():
        model(torch.tensor([[5]]))
        for hook in hooks:
            hook.remove()
        for module in block.modules():
            module.register_forward_pre_hook(lambda module, _args: called.append(module))
        assert RouterGuess(block, experts).choose(given[0]) == routed[0].flatten().tolist()
    assert not called


def test_a_block_that_cannot_be_asked_is_left_alone() -> None:
    (block, *_) = blocks(mixture("Mixtral"))
    guess = RouterGuess(block, block.experts)
    assert guess.choose(torch.zeros(3)) == []
    block.forward = block.forward
    assert RouterGuess(block, block.experts).choose(torch.zeros(1, 1, 64, dtype=torch.bfloat16)) == []


@pytest.mark.parametrize("name", GUESSING)
def test_no_guess_changes_a_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture(name)
    model.save_pretrained(tmp_path / "checkpoint")
    places = [place for place, module in model.named_modules() if is_experts(module)]
    tokens, given = torch.arange(2, 8)[None], {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True}
    one = sum(parameter[0].nbytes for parameter in model.get_submodule(places[0]).parameters())
    whole = sum(parameter.nbytes for place, parameter in model.named_parameters() if ".experts." not in place)

    def answer(model: Any) -> torch.Tensor:
        torch.manual_seed(0)
        found: torch.Tensor = model.generate(tokens, **given)
        return found

    expected = answer(model)
    with offstage.load(
        tmp_path / "checkpoint", cache=tmp_path / "cache", max_length=64, storage={"io": "direct"},
        max_memory={"cpu": whole + 14 * one}, device_map={"": "cpu", **dict.fromkeys(places, "disk")},
        hardware={"devices": []},
    ) as loaded:  # fmt: skip
        traffic = loaded.traffic
        monkeypatch.setattr(routed_experts, "_GUESSED_FROM", 2)  # a call wants a quarter of these few experts
        assert torch.equal(answer(loaded.model), expected)
        assert traffic.expert_guesses > 0
        uses = streamer_of(loaded.model).routed.uses.values()
        assert traffic.expert_guesses == sum(use.guesses for use in uses)
        assert traffic.expert_guesses_used == sum(use.guesses_used for use in uses) <= traffic.expert_guesses
        assert traffic.streamed_bytes <= traffic.expert_misses * one
        monkeypatch.setattr(RouterGuess, "choose", lambda self, hidden: [7, 6, 5, 4, 3, 2, 1, 0])
        assert torch.equal(answer(loaded.model), expected)
        before = traffic.expert_guesses
        offstage.lockstep(loaded.model, [lambda: answer(loaded.model)] * 2)
        loaded.model(tokens)
        assert traffic.expert_guesses == before, "neither in lockstep nor with gradients"
        monkeypatch.setattr(routed_experts, "_GUESSED_FROM", 8)
        assert torch.equal(answer(loaded.model), expected)
        assert traffic.expert_guesses == before, "nor where slots are too few"
