"""What a quantised KV cache can't go with, told by name before weights are read; and how quanto unpacks one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.library import Library
from transformers.cache_utils import DynamicLayer

from offstage.pipeline.errors import Fault
from offstage.stages.empty_init.identity import read_config
from offstage.stages.generate.shared_cache import why_strange
from offstage.stages.inputs.generate_options import CACHE, QUANTIZED
from offstage.stages.inputs.quantized_cache import CACHE_CONFIG, QuantizedCache, config_faults, read_cache_config
from offstage.stages.plan.request.geometry import geometry_of

_MODULES = {"quanto": "optimum.quanto", "hqq": "hqq"}
_INSTALLED_BY = {"quanto": "pip install 'offstage-pipeline[quantized-cache]'", "hqq": "pip install hqq"}
_BITS = {"quanto": (2, 4), "hqq": (1, 2, 4, 8)}
_AXES = {"quanto": (0, -1), "hqq": (0, 1)}


def quantized_faults(options: Mapping[str, Any], architecture: str, folder: Path) -> Iterator[Fault]:
    """Yield why the model of the checkpoint ``folder`` can't decode with a quantised cache, as ``options`` ask for it.

    Nothing where they ask for no cache at all.
    """
    if options.get("use_cache") is False:
        return
    faults = list(config_faults(options[CACHE_CONFIG])) if options.get(CACHE_CONFIG) is not None else []
    cache = read_cache_config(options)
    yield from faults or _of_backend(cache)
    if read_config(folder).get("is_encoder_decoder"):
        why = f"{architecture} has an encoder, whose positions its decoder keeps too"
    else:
        why = why_strange(architecture, folder, (DynamicLayer,)) or ""
    if why:
        yield Fault(
            f"generate.{CACHE}", f"{QUANTIZED!r} asks for keys and values in fewer bits, and {why}; leave it out"
        )
    elif not faults and (numbers := geometry_of(read_config(folder)).cached // 2) % cache.q_group_size:
        yield Fault(
            f"generate.{CACHE_CONFIG}.q_group_size",
            f"{cache.q_group_size} doesn't divide the {numbers} numbers of a position's keys; give a divisor of them",
        )
    beside = {
        "num_beams": "reorders a cache, which not every transformers does with a quantised one",
        "guidance_scale": "has a second cache, which isn't quantised",
    }
    for name in (name for name in beside if options.get(name) not in (None, 1)):
        message = f"{options[name]!r} {beside[name]}: it can't go with generate.{CACHE}={QUANTIZED}"
        yield Fault(f"generate.{name}", f"{message}; leave one of them out")


def _of_backend(cache: QuantizedCache) -> Iterator[Fault]:
    """Yield what the ``cache``'s backend doesn't have, itself among it."""
    name, key = cache.backend, f"generate.{CACHE_CONFIG}"
    if cache.nbits not in _BITS[name]:
        yield Fault(f"{key}.nbits", f"{cache.nbits} isn't among {name}'s; give one of {_listed(_BITS[name])}")
    for axis in ("axis_key", "axis_value"):
        if (value := getattr(cache, axis)) not in _AXES[name]:
            yield Fault(f"{key}.{axis}", f"{value} isn't among {name}'s; give one of {_listed(_AXES[name])}")
        elif value == -1:
            yield Fault(f"{key}.{axis}", f"{value} has groups across positions, which most lengths don't fill; give 0")
    try:
        spec = find_spec(_MODULES[name])
    except ModuleNotFoundError:  # the package that it is in
        spec = None
    if spec is None:
        yield Fault(f"{key}.backend", f"{name} isn't installed, which quantises the cache: {_INSTALLED_BY[name]}")


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


@cache
def unpack_by_operators() -> Library:
    """Have quanto unpack by torch's operators in this process, while what is returned lives.

    Its own kernels are compiled at their first use, into the installed package: a minute of a processor, where there
    are a compiler and ninja. The host's consists of the same operators. What it would import for models of diffusers,
    where these are installed, is eight times what it takes itself.
    """
    with _as_if_missing("diffusers"):
        import_module(_MODULES["quanto"])
    library = Library("quanto", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # it tells of what is meant
        for key in ("CPU", "CUDA"):
            library.impl("unpack", _unpack, key, allow_override=True)  # type: ignore[no-untyped-call]
    return library


@contextmanager
def _as_if_missing(package: str) -> Iterator[None]:
    """Have ``package`` not be found, unless it was imported."""
    if package in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules[package] = None  # which Python takes for one that isn't there
    try:
        yield
    finally:
        del sys.modules[package]


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of so many ``bits`` in the bytes ``packed``: the lowest of each byte first, then the next."""
    return torch.cat([(packed >> place).bitwise_and_(2**bits - 1) for place in range(0, 8, bits)])
