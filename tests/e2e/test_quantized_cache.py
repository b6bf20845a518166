"""``generate.cache_implementation=quantized``: keys and values in fewer bits, transformers' tokens, in the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)  # fmt: skip
from transformers.cache_utils import QuantizedCache

import offstage as package
from offstage.pipeline.errors import ConfigError
from offstage.stages.dispatch.streaming import passes
from offstage.stages.generate import quantized_cache
from offstage.stages.generate.options import check_own_options, check_served
from offstage.stages.inputs.generate_options import read_generate
from offstage.stages.inputs.prompts import Prompt
from tests.benchmarks.caps import can_cap
from tests.e2e.conftest import Finished, Replay
from tests.long_form import in_ci

Run = Callable[..., Finished]
PROMPTS = [[place % 90 + 3 for place in range(80)], [place * 7 % 90 + 3 for place in range(48)]]
NEW = 13
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 100, "max_position_embeddings": 512,
    "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: Mapping[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
}
TWO_BITS = {"backend": "quanto", "nbits": 2, "q_group_size": 64, "residual_length": 4}
HQQ = {"backend": "hqq", "nbits": 4, "q_group_size": 32, "residual_length": 4}
QUANTIZED = "+generate.cache_implementation=quantized"


def save(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # far enough apart that a token hangs on what the cache keeps
        parameter.data.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_compiler() -> None:
    """Have quanto's kernels be torch's operators in transformers' own answers too: its are compiled for a minute."""
    quantized_cache.unpack_by_operators()


def config_node(config: Mapping[str, Any]) -> str:
    return f"+generate.cache_config={{{', '.join(f'{name}: {value}' for name, value in config.items())}}}"


def asked(checkpoint: Path, config: Mapping[str, Any] = TWO_BITS, *, new: int = NEW) -> tuple[str, ...]:
    return (
        f"model.path={checkpoint}", f"generate.prompts={PROMPTS}", f"generate.max_new_tokens={new}", QUANTIZED,
        config_node(config),
    )  # fmt: skip


def of_transformers(checkpoint: Path, **options: Any) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    answers = (model.generate(torch.tensor([ids]), max_new_tokens=NEW, **options)[0, len(ids) :] for ids in PROMPTS)
    return [answer.tolist() for answer in answers]


WAYS = {
    "in memory": ("generate.lockstep=1",),
    "streamed": ("generate.lockstep=1", "max_memory={cpu: 200kB}"),
    "in lockstep": ("generate.lockstep=2", "max_memory={cpu: 200kB}"),
}


@pytest.mark.parametrize(("family", "way"), in_ci(("llama", "in lockstep"), of=product(FAMILIES, WAYS)))
def test_tokens_are_those_of_transformers_with_the_same_options(
    family: str, way: str, offstage_here: Run, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path / "checkpoint", FAMILIES[family])
    options = {"cache_implementation": "quantized", "cache_config": dict(TWO_BITS)}
    expected = of_transformers(checkpoint, **options)
    assert expected != of_transformers(checkpoint), "two bits must show"
    done = offstage_here(*asked(checkpoint), *WAYS[way])
    assert (done.code, done.tokens) == (0, expected), done.err
    assert (done.record["metrics"]["streamed_bytes_per_token"] > 0) == (way != "in memory")


@pytest.mark.parametrize(
    ("dtype", "new"), in_ci((torch.bfloat16, 64), of=product([torch.float32, torch.bfloat16], [8, 64, 112]))
)
@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_the_plan_has_the_bytes_that_the_cache_takes(
    dtype: torch.dtype, new: int, backend: str, offstage_here: Run, tmp_path: Path
) -> None:
    pytest.importorskip({"quanto": "optimum.quanto"}.get(backend, backend))
    checkpoint, prompt = save(tmp_path / "checkpoint", FAMILIES["llama"], dtype), PROMPTS[0]
    config = {"backend": backend, "nbits": 4, "q_group_size": 32, "residual_length": 40}
    done = offstage_here(
        *asked(checkpoint, config, new=new), f"generate.prompts={[prompt]}", "generate.lockstep=1", "stages=plan_only"
    )
    assert done.code == 0, done.err
    plan = json.loads(Path(done.record["stages"][-1]["artifact"], "plan.json").read_text())
    cache, sizes = QuantizedCache(config=FAMILIES["llama"], **config), list[int]()
    states = torch.randn(1, 2, len(prompt), 64, dtype=dtype)
    for number in range(new):
        for index in range(4):
            cache.update(states if not number else states[:, :, :1], states if not number else states[:, :, :1], index)
        sizes.append(sum(map(layer_bytes, cache.layers)))
    planned = plan["devices"]["cpu"]["ledger"]["cache"]
    assert max(sizes) * 0.98 <= planned <= max(sizes) * 1.02, (max(sizes), planned)


def layer_bytes(layer: Any) -> int:
    kept = (layer._quantized_keys, layer._quantized_values, layer.keys, layer.values)
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in tensors_in(kept)}
    return sum(storages.values())


def tensors_in(parts: Any) -> list[torch.Tensor]:
    """Return the plain tensors in ``parts``, those that quanto's consist of among them."""
    if type(parts) is torch.Tensor:
        return [parts]
    if isinstance(parts, torch.Tensor):
        parts = [getattr(parts, name) for name in parts.__tensor_flatten__()[0]]
    values = parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def test_it_is_asked_for_from_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[tuple[bool, bool]] = set()
    monkeypatch.setattr(passes, "take_again", lambda again, *, decodes: told.add((again, decodes)))
    checkpoint = save(tmp_path / "checkpoint", FAMILIES["llama"])
    options = {"cache_implementation": "quantized", "cache_config": dict(TWO_BITS)}
    given = {"max_memory": {"cpu": "200kB"}, "cache": tmp_path / "cache", "max_length": 2048}
    with package.load(checkpoint, **given, **options) as loaded:
        answers = loaded.generate(PROMPTS, max_new_tokens=NEW, batch_size=1)
        assert loaded.traffic.streamed_bytes > 0
        assert options["cache_config"] == TWO_BITS
        expected = of_transformers(checkpoint, cache_implementation="quantized", cache_config=dict(TWO_BITS))
        assert [list(answer.token_ids) for answer in answers] == expected
        ids = torch.tensor([PROMPTS[0]])
        tokens = loaded.model.generate(
            ids, max_new_tokens=NEW, cache_implementation="quantized", cache_config=dict(TWO_BITS)
        )
        assert tokens[0, len(PROMPTS[0]) :].tolist() == expected[0]
        assert told == {(False, False), (False, True)}, "what a token frees is given back: each leaves more unused"
        with pytest.raises(ConfigError, match=r"generate\.cache_implementation: 'dynamic' isn't what the model was"):
            loaded.generate(PROMPTS, cache_implementation="dynamic")
        with pytest.raises(ConfigError, match=r"generate\.cache_config: \{'nbits': 4\} isn't .* cache_config=\{"):
            loaded.generate(PROMPTS, cache_config={"nbits": 4})
        quantised = loaded.plan.predicted["cpu"]
    with package.load(checkpoint, **given) as loaded:
        line = r"generate\.cache_implementation: 'quantized' isn't .*; load it with cache_implementation='quantized'"
        with pytest.raises(ConfigError, match=line):
            loaded.generate(PROMPTS, **options)
        whole = loaded.plan.predicted["cpu"]
    assert (quantised["cache"] < whole["cache"] / 4, quantised["process"] > whole["process"]) == (True, True)
    with pytest.raises(ConfigError, match=r"generate\.cache_config\.nbits: 7"):
        package.load(checkpoint, cache_implementation="quantized", cache_config={"nbits": 7})


@pytest.mark.long_form
def test_a_run_stays_within_its_plan_and_is_replayed(tmp_path: Path, offstage: Run, replay: Replay) -> None:
    wide = {**SIZES, "num_key_value_heads": 16, "num_attention_heads": 16, "max_position_embeddings": 4096}
    checkpoint = save(tmp_path / "checkpoint", LlamaConfig(**wide))
    done = offstage(
        f"model.path={checkpoint}", f"generate.prompts=[{[7] * 1920}]", "generate.max_new_tokens=17", QUANTIZED,
        config_node({**TWO_BITS, "residual_length": 16}), "max_memory.cpu=1MB",
        f"enforce_memory={str(can_cap()).lower()}",
    )  # fmt: skip
    assert done.code == 0, done.err
    memory = done.record["memory"]
    assert memory["measured"]["cpu"] <= memory["predicted"]["cpu"], memory
    code, _, err = replay(next(iter(sorted(tmp_path.glob("**/outputs/runs/*/*/run.json")))).parent)
    assert code == 0, err


@pytest.mark.skipif(find_spec("hqq") is None, reason="quantises the cache")
def test_hqq_gives_transformers_tokens_too(offstage_here: Run, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoint", FAMILIES["llama"])
    expected = of_transformers(checkpoint, cache_implementation="quantized", cache_config=dict(HQQ))
    done = offstage_here(*asked(checkpoint, HQQ), *WAYS["in lockstep"])
    assert (done.code, done.tokens) == (0, expected), done.err


def faults_of(folder: Path, **options: Any) -> list[str]:
    """Return what a run with a quantised cache is refused for under these ``options``, once a config stands there."""
    given = read_generate({"prompts": [[3, 4]], "cache_implementation": "quantized", **options})
    return [str(fault) for fault in check_served(given, {"kind": "pretrained", "path": str(folder)})]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache_config": {"nbits": 7}}, "generate.cache_config.nbits: 7"),
        ({"cache_config": {"nbits": 8}}, "generate.cache_config.nbits: 8 isn't among quanto's; give one of 2, 4"),
        ({"cache_config": {"bits": 4}}, "generate.cache_config.bits: unknown key (did you mean 'nbits'?)"),
        ({"cache_config": 4}, "generate.cache_config: 4 is no mapping"),
        ({"cache_config": {"backend": "fp8"}}, "generate.cache_config.backend: 'fp8'"),
        ({"cache_config": {"axis_key": -1}}, "generate.cache_config.axis_key: -1"),
        ({"cache_config": {"q_group_size": 48}}, "48 doesn't divide the 128 numbers of a position's keys"),
        ({"num_beams": 2}, "generate.num_beams: 2 reorders a cache"),
        ({"guidance_scale": 1.5}, "generate.guidance_scale: 1.5 has a second cache"),
        ({"prompt_lookup_num_tokens": 3}, "generate.cache_implementation: 'quantized' can't go with"),
    ],
)
def test_what_it_cant_be_or_go_with_is_one_line_by_name(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    FAMILIES["llama"].save_pretrained(tmp_path)
    (fault,) = faults_of(tmp_path, **given)
    assert message in fault


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (MistralConfig(**SIZES, sliding_window=32), "DynamicSlidingWindowLayer"),
        (Gemma2Config(**SIZES, sliding_window=32), "DynamicSlidingWindowLayer"),
        (BartConfig(vocab_size=100, d_model=64, encoder_layers=1, decoder_layers=1), "has an encoder"),
    ],
    ids=["mistral", "gemma2", "bart"],
)
def test_a_model_that_transformers_has_none_for_is_refused(
    config: PreTrainedConfig, layer: str, tmp_path: Path
) -> None:
    config.architectures = [{"bart": "BartForConditionalGeneration"}.get(config.model_type, "MistralForCausalLM")]
    config.save_pretrained(tmp_path)
    (fault,) = faults_of(tmp_path)
    assert fault.startswith("generate.cache_implementation: 'quantized' asks for keys and values in fewer bits")
    assert layer in fault


def test_a_missing_library_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FAMILIES["llama"].save_pretrained(tmp_path)
    monkeypatch.setattr(quantized_cache, "find_spec", lambda _: None)
    (fault,) = faults_of(tmp_path)
    assert fault.startswith("generate.cache_config.backend: quanto isn't installed")
    assert "pip install 'offstage-pipeline[quantized-cache]'" in fault


def test_quanto_unpacks_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from optimum.quanto.library.extensions import get_extension
    from optimum.quanto.tensor.packed import PackedTensor

    monkeypatch.setattr(type(get_extension("quanto_cpp")), "lib", property(lambda _: pytest.fail("compiles")))
    for bits in (2, 4):
        numbers = torch.arange(96, dtype=torch.uint8).view(32, 3) % 2**bits
        assert torch.equal(PackedTensor.pack(numbers, bits).unpack(), numbers)


def test_a_prompt_alone_has_no_other_kind_of_cache(tmp_path: Path) -> None:
    FAMILIES["llama"].save_pretrained(tmp_path)
    given = read_generate({"prompts": [[3, 4]]})
    own = {"generate.prompts[0]": Prompt([3, 5], options={"cache_implementation": "quantized"})}
    (fault,) = check_own_options(own, given, {"kind": "pretrained", "path": str(tmp_path)})
    assert str(fault).startswith("generate.prompts[0].cache_implementation: 'quantized' is for all prompts or none")
