"""What a forward is said to hold is what a real one holds, at shapes that no probe had."""

from __future__ import annotations

import weakref
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig

from offstage.stages.calls.results import kept_cache
from offstage.stages.checkpoints.codecs.packed_matrices import GgmlMatrix, as_text
from offstage.stages.checkpoints.codecs.products import multiply_packed
from offstage.stages.empty_init.activation_peaks import kernel_of, weigh
from offstage.stages.empty_init.describe import describe
from tests.long_form import in_ci
from tests.stages.empty_init.test_describe import CONFIGS, Branching, on_meta

SHAPES = [(1, 60), (2, 37), (5, 90)]


class Counting(TorchDispatchMode):
    """Counts the bytes of real tensors, each from its birth to its death."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.known:
                self.meet(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def meet(self, storage: torch.UntypedStorage, *, counts: bool = True) -> None:
        key = storage._cdata
        self.known[key] = storage.nbytes() if counts else 0
        self.live += self.known[key]
        weakref.finalize(storage, lambda: setattr(self, "live", self.live - self.known.pop(key)))


def real_forward_peak(model: nn.Module, sequences: int, length: int) -> int:
    """Return the peak of a forward on padded prompts, without the keys and values that it leaves."""
    tokens = torch.ones((sequences, length), dtype=torch.long)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    counting = Counting()
    for tensor in [*model.parameters(), *model.buffers(), tokens, mask]:
        counting.meet(tensor.untyped_storage(), counts=False)
    with torch.no_grad(), counting:
        output = model(input_ids=tokens, attention_mask=mask, logits_to_keep=1)
    cache = [kept for kept in kept_cache(output).values() if hasattr(kept.layers[0], "keys")]
    del output
    return counting.peak - (counting.live if cache else 0)


def real_token_peak(model: nn.Module, sequences: int, length: int) -> int:
    """Return the peak of a forward of one more token of padded prompts, without what is kept after it."""
    tokens = torch.ones((sequences, length), dtype=torch.long)
    with torch.no_grad():
        kept = kept_cache(model(input_ids=tokens, attention_mask=torch.ones_like(tokens)))
    mask = torch.ones((sequences, length + 1), dtype=torch.long)
    mask[0, :7] = 0  # where nothing is padded some versions of transformers attend without a mask, which takes less
    (cache,) = kept.values()
    counting = Counting()
    for tensor in [*model.parameters(), *model.buffers(), tokens, mask]:
        counting.meet(tensor.untyped_storage(), counts=False)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            counting.meet(tensor.untyped_storage())
    del layer, tensor
    with torch.no_grad(), counting:
        output = model(input_ids=tokens[:, :1], attention_mask=mask, **kept)
    del output
    return counting.peak - counting.live


DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("Llama", "OPT", "BLOOM", "GPT-2", "Qwen2", "Mixtral")


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_ci(*product(["Llama"], DTYPES), *product(["BLOOM", "Mixtral"], DTYPES[1:]), of=product(NAMES, DTYPES)),
    ids=str,
)
def test_a_real_forward_holds_what_was_weighed(name: str, dtype: torch.dtype) -> None:
    config = deepcopy(CONFIGS[name])  # which is given the dtype
    real = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    moments = weigh(on_meta(config).to(dtype).requires_grad_(False), real._no_split_modules).moments
    for shape in SHAPES:
        weighed = max(moment.at(*shape, {})[0] for moment in moments)
        assert weighed == pytest.approx(real_forward_peak(real, *shape), rel=0.05, abs=2000), shape


@pytest.mark.parametrize("name", in_ci("Llama", "BLOOM", "Mixtral", of=NAMES))
def test_a_real_token_after_a_long_prompt_holds_what_was_weighed(name: str) -> None:
    config = deepcopy(CONFIGS[name])
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    decoding = weigh(on_meta(config).to(torch.float32).requires_grad_(False), real._no_split_modules).decoding
    for shape in [(1, 400), (5, 300)]:
        weighed = max(moment.at(*shape, {})[0] for moment in decoding)
        assert weighed == pytest.approx(real_token_peak(real, *shape), rel=0.15), shape


def test_blocks_of_one_kind_are_weighed_once() -> None:
    config = CONFIGS["Llama"]
    few = weigh(on_meta(config), ["LlamaDecoderLayer"]).moments
    config.num_hidden_layers = 9
    try:
        many = weigh(on_meta(config), ["LlamaDecoderLayer"]).moments
    finally:
        config.num_hidden_layers = 2
    assert many == few


def test_the_model_has_all_its_blocks_afterwards() -> None:
    config = CONFIGS["Llama"]
    config.num_hidden_layers = 5
    try:
        model = on_meta(config)
        before = [id(module) for module in model.modules()]
        weigh(model, ["LlamaDecoderLayer"])
    finally:
        config.num_hidden_layers = 2
    assert [id(module) for module in model.modules()] == before


def test_a_model_that_refuses_fake_tensors_has_no_moments() -> None:
    assert weigh(Branching(), ()).moments == ()
    assert describe(Branching()).moments == ()


RECURRENT = {
    "Mamba": MambaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=500),
    "Mamba-2": Mamba2Config(hidden_size=64, num_hidden_layers=3, vocab_size=500, num_heads=8, head_dim=16),
}
"""Models that run other operators for other lengths: a step for each token, a product for each 256."""


@pytest.mark.parametrize("name", in_ci("Mamba-2", of=RECURRENT))
def test_what_a_recurrent_model_holds_grows_with_the_tokens(name: str) -> None:
    real = AutoModelForCausalLM.from_config(RECURRENT[name]).eval().requires_grad_(False)
    moments = weigh(on_meta(RECURRENT[name]), real._no_split_modules).moments
    for shape in ((1, 500), (2, 750)):
        weighed = max(moment.at(*shape, {})[0] for moment in moments)
        assert weighed == pytest.approx(real_forward_peak(real, *shape), rel=0.1), shape


def test_a_batch_counts_what_is_neither_contiguous_nor_transposed_or_else_one_of_its_products() -> None:
    bmm = torch.ops.aten.bmm.default
    weight, states = torch.ones(9, 5, dtype=torch.bfloat16), torch.ones(3, 1, 5, dtype=torch.bfloat16)
    expanded = weight.t().expand(3, 5, 9)
    assert kernel_of(bmm, (states, expanded), states @ expanded) == ("strided bmm bfloat16", (0, 3 * 5 * 9 * 2, 0))
    for plain in (expanded.contiguous(), expanded.mT.contiguous().mT):
        assert kernel_of(bmm, (states, plain), states @ plain) == ("bmm bfloat16", (5 * 2, 5 * 9 * 2, 9 * 2))


def test_a_product_counts_its_operands_and_its_result_and_other_operators_nothing() -> None:
    left, right, bias = torch.ones(2, 3), torch.ones(3, 4), torch.ones(4)
    expected = "mm float32", (2 * 3 * 4, 3 * 4 * 4, 2 * 4 * 4)
    assert kernel_of(torch.ops.aten.mm.default, (left, right), left @ right) == expected
    assert kernel_of(torch.ops.aten.addmm.default, (bias, left, right), left @ right) == expected
    assert kernel_of(torch.ops.aten.add.Tensor, (bias, bias), bias) == ("", (0, 0, 0))


def test_so_does_one_with_a_weight_that_stays_packed() -> None:
    given, codes = torch.ones(2, 64), torch.zeros(5, 68, dtype=torch.uint8)
    product = multiply_packed(given, [codes], as_text(GgmlMatrix(5, 64, "q8_0")))
    packed = torch.ops.offstage.multiply_packed.default
    assert kernel_of(packed, (given, [codes]), product) == ("packed", (2 * 64 * 4, 5 * 68, 2 * 5 * 4))


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "BLOOM"])
def test_whatever_a_machines_kernels_take_the_widest_moment_is_kept(name: str) -> None:
    """A machine whose kernels are dear in one operator alone has its peak where that operator is at work."""
    model = on_meta(CONFIGS[name]).to(torch.bfloat16).requires_grad_(False)
    moments = weigh(model, model._no_split_modules).moments
    named = {moment.kernel for moment in moments if moment.kernel}
    assert {"mm bfloat16", "strided bmm bfloat16"} <= named
    for kernel in named:
        widest = max(moments, key=lambda moment: sum(moment.at(4, 512, {kernel: (10**6,) * 3})))
        assert widest.kernel == kernel
