"""Streaming to a real accelerator: the resident model's answers, no waiting in the model's thread, exact memory."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from offstage.pipeline.errors import BudgetError
from offstage.stages.calls.results import kept_cache
from offstage.stages.dispatch.streaming.places import data_of
from offstage.stages.dispatch.transfer.cuda_link import CudaLink, CudaMemory
from offstage.stages.dispatch.transfer.link import pin
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.dispatch.transfer.values import send_to_device
from offstage.stages.machine.aligned_memory import HostBlock, private_bytes
from offstage.stages.machine.devices import Devices
from offstage.stages.units import DeviceId
from tests.e2e.pipelines import dispatched
from tests.stages.dispatch.placed_models import LAYOUTS, Setup, net

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

WIDTH = 1024
"""A layer's weights take several reads."""

everywhere = pytest.mark.parametrize("where", LAYOUTS)
two_accelerators = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")


def inputs(device: str = "cuda:0") -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(3, WIDTH).to(device)


def resident() -> torch.Tensor:
    """Return what the model answers with all its weights on the accelerator."""
    return net(WIDTH).to("cuda:0")(inputs())


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    opened: list[Setup] = []

    def make(homes: Callable[[str], DeviceId], **options: Any) -> Setup:
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        opened.append(Setup(net(WIDTH), homes, folder, devices=Devices(), example=inputs("cpu"), **options))
        return opened[-1]

    yield make
    for one in opened:
        one.streamer.remove()


def asked_for(when: str = "current") -> int:
    """Return the bytes that were asked of torch's allocator, before it rounds them up."""
    requested: int = torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]
    return requested


@contextmanager
def no_synchronising() -> Iterator[None]:
    """Have whatever makes the host wait for the accelerator raise an error; it counts for all threads."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@everywhere
def test_it_answers_bit_for_bit_like_the_resident_model(where: str, setup: Callable[..., Setup]) -> None:
    expected, stage = resident(), setup(LAYOUTS[where])
    answers = [stage.model(inputs()) for _ in range(8)]
    assert all(torch.equal(answer, expected) for answer in answers)
    assert stage.streamer.traffic.overflow_bytes == 0
    assert torch.equal(stage.model(inputs("cpu")), expected.cpu()), "the output is where the input was"


@everywhere
def test_it_waits_for_computing_that_is_slow(where: str, setup: Callable[..., Setup]) -> None:
    expected, stage = resident(), setup(LAYOUTS[where])
    for module in stage.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _module, _args: torch.cuda._sleep(3_000_000))
    answers = [stage.model(inputs()) for _ in range(5)]
    assert all(torch.equal(answer, expected) for answer in answers)


@everywhere
def test_nothing_synchronises_inside_a_pass(where: str, setup: Callable[..., Setup]) -> None:
    stage, x = setup(LAYOUTS[where]), inputs()
    stage.model(x)
    with no_synchronising():
        answers = [stage.model(x) for _ in range(5)]
    assert all(torch.equal(answer, resident()) for answer in answers)


def test_the_host_runs_on_while_the_accelerator_computes(setup: Callable[..., Setup]) -> None:
    stage, x = setup(LAYOUTS["host"]), inputs()
    stage.model(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    asked = torch.cuda.Event()
    asked.record()
    answer = stage.model(x)
    assert not asked.query(), "all was asked for before the accelerator came to it"
    assert torch.equal(answer, resident())


@everywhere
def test_memory_is_flat_over_passes_and_within_weights_reserve_and_activations(
    where: str, setup: Callable[..., Setup]
) -> None:
    model, x = net(WIDTH).to("cuda:0"), inputs()
    model(x)
    before = asked_for()
    torch.cuda.reset_peak_memory_stats()
    model(x)
    activations = asked_for("peak") - before
    del model
    gc.collect()
    before = asked_for()
    stage = setup(LAYOUTS[where])
    requested = asked_for()
    assert requested - before == stage.resident + stage.reserve
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        stage.model(x)
    assert asked_for("peak") - requested <= activations
    torch.cuda.synchronize()
    assert asked_for() == requested
    stage.streamer.remove()
    assert asked_for() - before == stage.resident


def test_weights_on_the_host_are_pinned_where_they_are_until_the_hooks_go(
    setup: Callable[..., Setup],
) -> None:
    stage = setup(LAYOUTS["host"])
    weights = [data_of(weight).detach() for weight in stage.model.parameters()]
    assert all(weight.is_pinned() for weight in weights)
    stage.model(inputs())
    stage.streamer.remove()
    assert not any(weight.is_pinned() for weight in weights)


def test_what_is_pinned_is_exactly_as_large_as_it_was_asked_to_be() -> None:
    link, memory = CudaLink(torch.device("cuda", 0)), private_bytes(5 * 4096)
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    unpin = pin(link, memory)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert (tensor[:1].is_pinned(), tensor[-1:].is_pinned()) == (True, True)
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before, "none of torch's own"
    unpin()
    assert not tensor.is_pinned()
    again = pin(link, memory)
    again()


def test_the_buffers_for_reads_are_no_more_than_the_plan_knows_of(setup: Callable[..., Setup]) -> None:
    stage = setup(LAYOUTS["disk"])
    buffers = stage.streamer._caches[0]._mover._buffers
    assert buffers is not None
    assert 0 < buffers._memory.nbytes <= stage.reserve
    assert buffers._memory.nbytes % 4096 == 0


@everywhere
def test_memory_that_cannot_be_pinned_serves_all_the_same(
    where: str, setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaLink, "register", lambda _link, _memory: False)
    stage = setup(LAYOUTS[where])
    assert all(torch.equal(stage.model(inputs()), resident()) for _ in range(3))


def test_a_refusal_to_pin_is_no_error_of_the_next_kernel() -> None:
    link, memory = CudaLink(torch.device("cuda", 0)), private_bytes(4096)
    assert link.register(memory)
    assert not link.register(memory), "it is registered already"
    assert torch.ones(3, device="cuda:0").sum().item() == 3
    link.unregister(memory.ctypes.data)


@everywhere
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_forward_the_model_can_be_called_again(
    where: str, error: type[BaseException], setup: Callable[..., Setup]
) -> None:
    def throw(*_: Any) -> None:
        raise error

    stage, expected = setup(LAYOUTS[where]), resident()
    for module in list(stage.model.modules()):
        hook = module.register_forward_pre_hook(throw)
        with pytest.raises(error):
            stage.model(inputs())
        hook.remove()
        assert torch.equal(stage.model(inputs()), expected)
    assert stage.streamer.traffic.overflow_bytes == 0


@everywhere
def test_calls_from_different_streams_are_kept_apart(where: str, setup: Callable[..., Setup]) -> None:
    stage, x, expected, side = setup(LAYOUTS[where]), inputs(), resident(), torch.cuda.Stream()
    torch.cuda.synchronize()
    answers = []
    for number in range(8):
        with torch.cuda.stream(side if number % 2 else torch.cuda.default_stream()):
            torch.cuda._sleep(3_000_000)
            answers.append(stage.model(x))
    torch.cuda.synchronize()
    assert all(torch.equal(answer, expected) for answer in answers)


@everywhere
def test_a_backward_brings_weights_again_and_has_the_gradient_of_the_resident_model(
    where: str, setup: Callable[..., Setup]
) -> None:
    def gradient(model: nn.Module) -> torch.Tensor:
        x = inputs().requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    stage, expected = setup(LAYOUTS[where]), gradient(net(WIDTH).to("cuda:0"))
    assert all(torch.equal(gradient(stage.model), expected) for _ in range(4))
    assert stage.streamer.traffic.overflow_bytes == 0


def test_a_call_in_inference_mode_leaves_memory_that_other_calls_can_use(setup: Callable[..., Setup]) -> None:
    stage, expected = setup(LAYOUTS["mixed"]), resident()
    with torch.inference_mode():
        assert torch.equal(stage.model(inputs()), expected)
    assert torch.equal(stage.model(inputs().requires_grad_()), expected)


def test_a_region_is_free_when_its_last_view_is_gone() -> None:
    memory = CudaMemory(torch.device("cuda", 0), 2048)
    region, watched = memory.lend(512, 1000)
    view = region[8:16].view(torch.float32)
    assert (region.device, region.nbytes) == (torch.device("cuda", 0), 1000)
    assert region.data_ptr() % 512 == 0
    gone = weakref.ref(watched)
    del region, watched
    assert gone() is not None, "a tensor still sees it"
    del view
    assert gone() is None


def test_a_full_accelerator_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=r"max_memory\.0: accelerator 0 is full"):
        CudaMemory(torch.device("cuda", 0), 10**15)
    assert torch.ones(1, device="cuda:0").item() == 1


def test_inputs_come_over_without_waiting_from_pinned_memory_alone() -> None:
    block = HostBlock([4096])
    tensor = block.hold(torch.arange(1024.0))
    unpin = pin(CudaLink(torch.device("cuda", 0)), block.memory)
    with no_synchronising():
        on_device = send_to_device(tensor, torch.device("cuda", 0))
        with pytest.raises(RuntimeError, match="synchronizing"):
            send_to_device(torch.arange(1024.0), torch.device("cuda", 0))
    torch.cuda.synchronize()
    unpin()
    assert torch.equal(on_device.cpu(), tensor)


def test_copies_stand_on_the_time_line(setup: Callable[..., Setup]) -> None:
    trace = Trace()
    stage = setup(LAYOUTS["mixed"], trace=trace)
    stage.model(inputs())
    stage.streamer.remove()
    assert {event["cat"] for event in trace._events} >= {"read", "copy", "compute"}


@two_accelerators
def test_two_accelerators_stream_each_for_itself(setup: Callable[..., Setup]) -> None:
    def half(module: str) -> int:
        return int(module[0]) // 2

    stage = setup(lambda name: half(name) if "bias" in name else "cpu", execution=half)
    model = net(WIDTH)
    model[:2].to("cuda:0")
    model[2:].to("cuda:1")
    expected = model[2:](model[:2](inputs()).to("cuda:1")).to("cuda:0")
    assert all(torch.equal(stage.model(inputs()), expected) for _ in range(5))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="20MB")
    return folder


def decode(model: Any, steps: int) -> torch.Tensor:
    """Return the logits of ``steps`` greedy steps after a prompt; nothing in here makes the host wait."""
    tokens, logits = torch.arange(5, 13, device="cuda:0")[None], []
    cache: dict[str, Any] = {}
    with torch.no_grad():
        for _ in range(steps):
            out = model(input_ids=tokens, **cache, use_cache=True)
            tokens, cache = out.logits[:, -1:].argmax(-1), kept_cache(out)
            logits.append(out.logits[:, -1])
    return torch.stack(logits)


MAPS: dict[str, Callable[[str], DeviceId]] = {
    "host": lambda name: 0 if "norm" in name else "cpu",
    "disk": lambda name: 0 if "norm" in name else "disk",
    "mixed": lambda name: 0 if "norm" in name else ["cpu", "disk", 0][sum(map(ord, name)) % 3],
}


@pytest.mark.parametrize("where", MAPS)
def test_a_pipeline_decodes_what_the_resident_model_decodes_and_never_synchronises(
    where: str, checkpoint: Path, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint).to("cuda:0")
    names = [name for name, _ in plain.named_parameters()] + [name for name, _ in plain.named_buffers()]
    placement = {name: MAPS[where](name) for name in names}
    live = dispatched(checkpoint, tmp_path, device_map=placement, max_memory={0: "1GB", "cpu": "1GB"})
    expected = decode(plain, 10)
    assert torch.equal(decode(live.model, 10), expected)
    with no_synchronising():
        try:
            decode(plain, 10)
        except RuntimeError:
            pytest.skip("the resident model itself synchronises here")
        again = decode(live.model, 10)
    assert torch.equal(again, expected)
    ids = torch.arange(5, 13, device="cuda:0")[None]
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(live.model.generate(ids, **options), plain.generate(ids, **options))
    live.streamer.remove()
