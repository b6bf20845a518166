"""transformers' ``from_pretrained`` as its users call it, over ``load``: one line of imports changes.

What they name otherwise is translated, what would change nothing here is taken without a word, and what can't be
followed is refused by its name, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import Fault, closest, raise_faults
from offstage.stages.checkpoints.quantization import QUANTISES
from offstage.stages.dispatch.loaded_model import LoadedModel, PathLike, known_options, load
from offstage.stages.units import DeviceId, tier

if TYPE_CHECKING:
    import torch
    from torch import nn

_IDLE = (
    "low_cpu_mem_usage", "offload_state_dict", "offload_buffers", "use_safetensors", "weights_only", "disable_mmap",
    "resume_download", "mirror",
)  # fmt: skip
"""Arguments that say how transformers brings weights in; here they are read from where they lie, whatever these say."""

_QUANTISED = (
    f"weights are quantised by quantize={', '.join(map(repr, QUANTISES))}, and what doesn't fit streams; give that, "
    "or a checkpoint that is quantised already, as GPTQ, AWQ, FP8, MXFP4, compressed-tensors, bitsandbytes or GGUF"
)
_SAME_WEIGHTS = "weights are those of the checkpoint; leave it out"
_FETCHED = "what is fetched and kept is huggingface_hub's; set"
_REFUSED: Mapping[str, str] = {
    "quantization_config": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "cache_dir": f"{_FETCHED} HF_HOME in the environment",
    "token": f"{_FETCHED} HF_TOKEN in the environment, or log in once",
    "local_files_only": f"{_FETCHED} HF_HUB_OFFLINE=1 in the environment",
    "force_download": f"{_FETCHED} nothing: delete its copy",
    "proxies": f"{_FETCHED} HTTPS_PROXY in the environment",
    "subfolder": "give the path of that folder",
    "variant": "give the path of a folder with these files alone, by their plain names",
    "config": "the model is what the checkpoint's config.json says; change a copy of that, or model.config afterwards",
    "state_dict": _SAME_WEIGHTS,
    "key_mapping": _SAME_WEIGHTS,
    "ignore_mismatched_sizes": _SAME_WEIGHTS,
    "output_loading_info": "what differs is refused by name, or strict=False says it in the log; leave it out",
    "generation_config": "set model.generation_config afterwards",
    "tp_plan": "one process runs all of it; give device_map='auto' and max_memory",
    "tp_size": "one process runs all of it; give device_map='auto' and max_memory",
    "device_mesh": "one process runs all of it; give device_map='auto' and max_memory",
}
"""Arguments of transformers that aren't followed, and what to do instead."""

_GGUF = "gguf_file"
_OFF = (None, False, "")


def from_pretrained(
    pretrained_model_name_or_path: PathLike,
    *,
    device_map: str | int | torch.device | Mapping[str, Any] | None = "auto",
    max_memory: Mapping[DeviceId, int | str] | int | str | None = None,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Load a checkpoint as ``AutoModelForCausalLM.from_pretrained`` is called, and return the model itself.

    The class is the one that the checkpoint names. It is ``load`` in other words: ``options`` are those of ``load``
    (``offload_folder``, ``attn_implementation``, ``revision``, ``trust_remote_code``, ``max_length``, …), and the
    arguments of transformers that have another name here or change nothing. ``device_map=None`` leaves the placement to
    the plan. What lies where is ``model.hf_device_map``; what doesn't fit the budgets is streamed.

    The model has one method more: ``model.close()`` gives back what streaming holds, as ``LoadedModel.close`` does, and
    ``contextlib.closing(model)`` closes it in the end of a ``with``.

    Raises ``ConfigError`` for arguments that can't be followed, by name, and else as ``load`` does.

    >>> model = offstage.from_pretrained(checkpoint, max_memory={"cpu": "3MB"})
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 3072])
    >>> model.close()
    """
    raise_faults(list(_faults(dtype, torch_dtype, options)))
    given = {name: value for name, value in options.items() if name not in (*_IDLE, *_REFUSED, _GGUF)}
    if options.get("revision") == "main":
        del given["revision"]  # what transformers takes it for where nobody says it
    if options.get(_GGUF):
        pretrained_model_name_or_path = Path(pretrained_model_name_or_path, options[_GGUF])
    chosen = next((each for each in (dtype, torch_dtype) if each is not None), "auto")
    if device_map is not None:
        given["device_map"] = device_map
    loaded = load(pretrained_model_name_or_path, max_memory=max_memory, dtype=chosen, **given)
    model: Any = loaded.model
    # transformers' pipelines take its first device for the one that computes
    shown = sorted(loaded.plan.device_map.items(), key=lambda entry: tier(entry[1]))
    model.hf_device_map, model.close = dict(shown), ModelClosing(loaded)
    return loaded.model


class ModelClosing:
    """What ``model.close()`` of a model of ``from_pretrained`` is. That of a copy closes nothing."""

    def __init__(self, loaded: LoadedModel | None = None) -> None:
        self._loaded = loaded

    def __call__(self) -> None:
        """Close the model, if this is its own."""
        if self._loaded is not None:
            self._loaded.close()

    def __deepcopy__(self, memo: object) -> ModelClosing:
        return ModelClosing()

    def __reduce__(self) -> tuple[type[ModelClosing], tuple[()]]:
        return ModelClosing, ()


def _faults(dtype: object, torch_dtype: object, options: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the arguments that aren't followed, and those that nobody knows."""
    if dtype is not None and torch_dtype is not None and dtype != torch_dtype:
        yield Fault("torch_dtype", f"{torch_dtype!r} isn't dtype, {dtype!r}; give one of them")
    for name in (name for name, reason in _REFUSED.items() if options.get(name) not in _OFF):
        value = options[name]
        shown = repr(value) if isinstance(value, (str, int)) and name != "token" else type(value).__name__
        yield Fault(name, f"{shown} isn't followed: {_REFUSED[name]}")
    names = [*known_options(), *_IDLE, *_REFUSED, _GGUF, "torch_dtype"]
    for name in (name for name in options if name not in names):
        yield Fault(name, f"unknown option{closest(name, names)}")
