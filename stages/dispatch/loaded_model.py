"""One call from Python that does what a run does up to dispatch: a checkpoint in, a model that can be called out.

It goes through the same stages, with the same config keys, cache and engine; so it is as fast as the command, and what
was worked out for one load is found by the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from inspect import Parameter, signature
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex

from offstage.pipeline.cache import user_cache
from offstage.pipeline.errors import ConfigError, Fault, closest, raise_faults
from offstage.pipeline.kept_memory import keep_little
from offstage.pipeline.stage import Config, Stage
from offstage.pipeline.stage_chain import StageChain
from offstage.pipeline.typed_config import NO_DEVICE, defaults, expanded, key_names, type_faults
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.checkpoints.model_source import ModelSource, located
from offstage.stages.checkpoints.tokenizers import load_tokenizer
from offstage.stages.dispatch.answers import Generation, Score, ask, asked_faults, generations, score_of
from offstage.stages.dispatch.config_values import as_budgets, as_device_map, as_list, as_text
from offstage.stages.dispatch.stage import DispatchStage
from offstage.stages.empty_init.identity import MODEL_KEYS
from offstage.stages.empty_init.stage import EmptyInitStage
from offstage.stages.inputs.generate_options import CACHE
from offstage.stages.inputs.quantized_cache import CACHE_CONFIG
from offstage.stages.plan import plan as plans
from offstage.stages.plan.stage import PlanStage
from offstage.stages.plan.table import render, summary
from offstage.stages.shard_load.stage import ShardLoadStage
from offstage.stages.units import DeviceId

if TYPE_CHECKING:
    import torch
    from torch import nn

    from offstage.stages.dispatch.call_queue import SubmittedCall
    from offstage.stages.dispatch.stage import Dispatched
    from offstage.stages.dispatch.transfer.traffic import Traffic

PathLike = str | os.PathLike[str]
_CLOSED = "this model was closed, and its streamed weights are gone; load it again"
_STAGES = (EmptyInitStage, PlanStage, ShardLoadStage, DispatchStage)
_ASKING = ("generate", "score")
_MOST = 2**24
"""The most sequences, tokens and calls that are planned for."""
_OPTIONS = {name: default for name, default in MODEL_KEYS.items() if name not in ("kind", "path")}
"""The keys below ``model`` that say what a checkpoint is, with their defaults."""


class LoadedModel:
    """A checkpoint that was loaded: its ``model``, ready to call wherever its weights lie, and its ``tokenizer``.

    ``plan`` says what lies where and why, and what is predicted of it: ``plan.predicted`` has the bytes of each device
    at its peak by what they are for, ``plan.forecast`` the bytes streamed and the seconds of a token. Printed, it says
    the same in a few lines; ``report()`` is what a run shows. It is a context manager, and unpacks as ``model,
    tokenizer``.
    """

    def __init__(self, chain: StageChain, *, together: int = 1, max_waiting: int = 64) -> None:
        from offstage.stages.dispatch.call_queue import CallQueue  # after the stages, which may not need torch

        self._chain = chain
        self._dispatched: Dispatched = chain.live(DispatchStage.name)
        self._turn, self._is_closed, self._together = RLock(), False, together
        self._calls = CallQueue(self._dispatched.streamer.passes, size=together, most_waiting=max_waiting)

    @property
    def model(self) -> nn.Module:
        """The model. ``generate`` of transformers works on it; it can't be moved or cast."""
        return self._dispatched.model

    @property
    def device(self) -> torch.device:
        """Where inputs are best, and where what is streamed computes."""
        return self._dispatched.device

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded when it is first asked for; null if it has none."""
        return load_tokenizer(ModelSource.of(self._chain.config["model"]))

    @cached_property
    def plan(self) -> plans.Plan:
        """What lies where, and what is predicted of it."""
        return self._chain.artifact(PlanStage.name).read(plans.Plan, plans.FILE_NAME)

    @property
    def traffic(self) -> Traffic:
        """What streaming has cost so far: bytes brought in, seconds waited."""
        self._dispatched.streamer.traffic.settle()
        return self._dispatched.streamer.traffic

    @property
    def load_seconds(self) -> float:
        """How long loading the resident weights took."""
        return self._dispatched.load_seconds

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> SubmittedCall:
        """Have ``call(*arguments, **options)``, which uses the model, be made when its turn comes; return its future.

        This is for servers: threads hand over what they want, and all of it is made by one thread, in the order in
        which it came, one after another, or with ``load(…, concurrency="lockstep")`` several at once, which share what
        streams. Each has the bits that it has alone, and gradients are off. Random numbers are each call's own, and
        other ones each time: a call that is to be repeated seeds torch itself. The future is one of
        ``concurrent.futures``: ``result()`` waits, ``asyncio.wrap_future`` awaits. ``cancel()``, by which a client that
        goes away frees its place, ends one under way too, before its next token.

        Raises ``BusyError`` where ``max_waiting`` calls wait. A call that waits for anything else holds up the others.

        >>> loaded.submit(loaded.model.generate, torch.tensor([[1, 2]]), max_new_tokens=2).result().shape
        torch.Size([1, 4])
        """
        return self._calls.submit(partial(call, *arguments, **options))

    def generate(
        self,
        prompts: Sequence[Any] | str,
        *,
        max_new_tokens: int = 24,
        do_sample: bool = False,
        seed: int = 0,
        logprobs: bool = False,
        batch_size: int | Literal["auto"] | None = None,
        lockstep: int | Literal["auto"] | None = None,
        progress: PathLike | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Return what the model answers to each of ``prompts``, in their order, as ``offstage stages=generate`` does.

        A prompt is text, a list of token ids, or a mapping as the config takes it (``{"messages": […]}``, and options
        of its own). Each has the answer that it has alone: where weights stream several go in ``lockstep``, by default
        as many as the budgets of the load have room for, else one after another. A ``batch_size`` computes so many
        together, which changes the last bits. ``options`` are the other keys of the config's ``generate``: those of
        transformers' ``GenerationConfig`` by their own names, ``chat``, ``system``, ``assistant_model``, …. Where
        tokens are sampled the first prompt has ``seed``, the next ``seed + 1``, and so on.

        ``progress`` is a file in which answers are kept as they come: the same call goes on there where a script was
        killed. With ``num_return_sequences`` a prompt has so many answers, one after another. Raises ``ConfigError``
        for options and prompts that can't be followed, for a file of something else, and after ``close()``.

        >>> [len(answer.token_ids) for answer in loaded.generate(["Once", "Twice"], max_new_tokens=8)]
        [8, 8]
        """
        options = _cache_kind(self._chain.config["generate"]) | options
        options |= {"max_new_tokens": max_new_tokens, "do_sample": do_sample, "output_logprobs": logprobs}
        options |= {"prompts": as_list(prompts), "batch_size": batch_size, "lockstep": lockstep}
        is_open = "auto" in (batch_size, lockstep) or batch_size is lockstep is None
        if is_open and self.plan.hosts and batch_size is None:  # as the load was planned for, on all of them
            options["lockstep"], is_open = self._together, False
        plans_anew = is_open and (batch_size == "auto" or bool(self.plan.serving))
        keys, file = {"generate": options, "seed": seed}, None if progress is None else Path(progress)
        session, _, rows = self._ask("generate", keys, plans_anew=plans_anew, progress=file)
        return generations(session, rows)

    def score(
        self,
        texts: Sequence[Any] | str,
        *,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int | Literal["auto"] = 1,
    ) -> list[Score]:
        """Return how likely the model finds each of ``texts``, in their order, as ``offstage stages=score`` does.

        A text is a string, a list of token ids, or ``{"context": …, "continuation": …}``, of which the continuation is
        scored. ``window`` are the tokens that the model sees at once, ``stride`` those from one window to the next, and
        ``batch_size`` how many windows are computed together. Raises as ``generate`` does.
        """
        node = {"texts": as_list(texts), "window": window, "stride": stride, "batch_size": batch_size}
        _, result, _ = self._ask("score", {"score": node}, plans_anew=batch_size == "auto")
        return [score_of(text) for text in result.content["texts"]]

    def embed(
        self,
        texts: Sequence[Any] | str,
        *,
        pooling: Literal["mean", "cls", "last"] = "mean",
        normalize: bool = True,
        batch_size: int | None = None,
        truncation: bool = False,
    ) -> torch.Tensor:
        """Return one vector of each of ``texts``, of shape (texts, dimensions), as ``stages=forward`` with pooling.

        The model must be one without a head: ``load(path, **{"class": "AutoModel"})`` loads a checkpoint so. A text
        is a string, or a pair of strings that the model reads together. ``batch_size`` is how many go through the model
        together, by default all; ``truncation`` cuts those beyond its context, which are refused otherwise. Raises
        as ``generate`` does.
        """
        node = {"texts": as_list(texts), "pooling": pooling, "normalize": normalize}
        node |= {"batch_size": batch_size, "truncation": truncation}
        _, result, _ = self._ask("forward", {"forward": node})
        (tensors,) = result.files.values()
        embeddings: torch.Tensor = tensors["embeddings"]
        return embeddings

    def _ask(
        self, stage: str, keys: Config, *, plans_anew: bool = False, progress: Path | None = None
    ) -> tuple[Any, Any, Any]:
        with self._turn:
            if self._is_closed:
                raise ConfigError(f"{stage}: this model was closed; load it again")
            return ask(self._chain, stage, keys, plans_anew=plans_anew, progress=progress)

    def report(self) -> str:
        """Return the plan as a run shows it: which modules lie where, what each device has at its peak, and why."""
        return render(self.plan)

    def __repr__(self) -> str:
        path, computes = self._chain.config["model"]["path"], self.device
        name = f"{type(self).__name__}({type(self.model).__name__} from {str(path)!r}, computes on {computes})"
        return f"{name}\n{summary(self.plan)}"

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        raise TypeError(
            "a LoadedModel can't be pickled or copied: it holds threads and open files; load the checkpoint again, or "
            "save it with loaded.model.save_pretrained(folder)"
        )

    def close(self) -> None:
        """Give back what streaming holds: hooks, threads, open files, staging and pinned memory.

        It waits for the pass that another thread is in; calls that were submitted end before their next. What was
        streamed is on meta then, so a model that had such weights refuses all use. Closing again does nothing.
        """
        self._is_closed = True
        self._calls.close(_CLOSED)
        streamed = bool(self.plan.serving) and self._dispatched.streamer.is_attached
        self._dispatched.streamer.remove(refusal=_CLOSED if streamed else None)
        self._chain.release()


def load(
    path_or_hub_id: PathLike,
    *,
    max_memory: Mapping[DeviceId, int | str] | int | str | None = None,
    device_map: str | int | torch.device | Mapping[str, Any] = "optimal",
    execution: Literal["exact", "fastest"] = "exact",
    dtype: str | torch.dtype = "auto",
    batch_size: int = 1,
    max_length: int = 512,
    concurrency: Literal["queue", "lockstep"] = "queue",
    max_waiting: int = 64,
    asks: Literal["generate", "score"] = "generate",
    cache_implementation: str | None = None,
    cache_config: Mapping[str, Any] | None = None,
    hosts: Literal["auto"] | None = None,
    cache: PathLike | None = None,
    **options: Any,
) -> LoadedModel:
    """Load the checkpoint in a folder, or of a Hub id, and return it dispatched: what doesn't fit is streamed.

    ``max_memory`` are the bytes of weights that each device may hold (``{0: "12GB", "cpu": "20GB"}``), or one size:
    that of the first accelerator, or of the host where there is none, and no other memory is used. Without it they are
    worked out from what is free, cgroups included, beside what ``batch_size`` sequences of ``max_length`` tokens take,
    half of these as a prompt, or all as windows that are scored where ``asks`` is ``"score"``; as that needs it, the
    C library gives freed blocks of a MiB or more back at once from then on, and few compiled kernels are kept.
    ``cache_implementation`` and ``cache_config`` are transformers': the kind of KV cache that there is room for, and
    that ``generate`` of what is returned has; another one is refused there.
    ``device_map`` is a policy, a map of module names to devices, the path of a ``device_map.json``, or one device.
    With ``execution="fastest"`` layers that lie on the host compute there where that is predicted to be faster than
    copying them to an accelerator. ``concurrency`` is how calls go that threads ``submit``: one after another, or
    ``batch_size`` of them in lockstep, and ``max_waiting`` how many may wait. With ``hosts="auto"``, by torchrun, the
    model is divided among the hosts: all must make the same calls in one order, and each has the answer. ``cache`` is
    where plans, measured rates and converted weights are kept: ``$XDG_CACHE_HOME/offstage``, or an ``outputs/cache``.

    ``options`` are keys of the config by their own names, nested ones as dicts: ``offload_folder``, ``strict``,
    ``storage={"io": "direct"}``, ``hardware``, …; and those of its ``model``: ``revision``, ``tokenizer``,
    ``trust_remote_code``, ``adapter``, ``attn_implementation``, ``quantize``, ….

    Raises ``ConfigError`` for options that can't be followed, ``CheckpointError`` for a checkpoint that is missing,
    damaged or not the model's, ``BudgetError`` for budgets that can't hold the plan, ``StorageError`` for a disk.

    >>> with offstage.load(checkpoint, max_memory={"cpu": "3MB"}) as loaded:
    ...     loaded.generate("If the memory", max_new_tokens=4)[0].text
    ' layout is not available'
    """
    counts = {"batch_size": batch_size, "max_length": max_length, "max_waiting": max_waiting}
    raise_faults(list(_faults(max_memory, asks, concurrency, cache, counts)))
    keep_little()
    stages: list[Stage[Any]] = [stage() for stage in _STAGES]
    config = _config(stages, located(os.fspath(path_or_hub_id)), options)
    if hosts is not None:
        config["hardware"] = {**(config["hardware"] or {}), "hosts": hosts}
    config |= {
        "dtype": dtype_name(dtype),
        "device_map": as_device_map(device_map),
        "execution": execution,
        "max_memory": as_budgets(max_memory, options),
        "stages": [*(stage.name for stage in stages), asks],
        **_request(batch_size, max_length, in_lockstep=concurrency == "lockstep"),
    }
    config["generate"] |= _cache_kind({CACHE: cache_implementation, CACHE_CONFIG: cache_config})
    _check(stages, config)
    folder = Path(cache) if cache is not None else user_cache()
    chain = StageChain(stages, config, cache=expanded(str(folder)).absolute())
    with ExitStack() as undo:
        undo.callback(chain.release)
        for stage in stages:
            chain.obtain(stage.name)
        from torch import inference_mode  # after the stages, which may not need torch

        with inference_mode(False):  # the model is there for calls with gradients too, and threads read into it
            together = batch_size if concurrency == "lockstep" else 1
            loaded = LoadedModel(chain, together=together, max_waiting=max_waiting)
        undo.pop_all()
    return loaded


def _faults(
    max_memory: object, asks: object, concurrency: object, cache: object, counts: Mapping[str, object]
) -> Iterator[Fault]:
    """Yield what is wrong with the arguments that have no type of the config to be held against."""
    if not isinstance(cache, str | os.PathLike | None) or "\0" in str(cache):
        yield Fault("cache", f"{cache!r} is no folder; give the path of one, or null for the user's own")
    if isinstance(max_memory, bool) or not isinstance(max_memory, Mapping | int | str | None):
        yield Fault("max_memory", f"{max_memory!r} {NO_DEVICE}")
    if concurrency not in ("queue", "lockstep"):
        yield Fault("concurrency", f"{concurrency!r} is no way for calls to go; give 'queue' or 'lockstep'")
    if asks not in _ASKING:
        yield Fault("asks", f"{asks!r} is none of {', '.join(_ASKING)}{closest(str(asks), _ASKING)}")
    for name, count in counts.items():
        if type(count) is not int or not 1 <= count <= _MOST:
            yield Fault(name, f"{count!r} is no count; give a whole number from 1 to {_MOST}")


def known_options() -> list[str]:
    """Return the names of all that ``load`` takes beside the checkpoint."""
    keys = key_names(stage.config_class for stage in _STAGES)
    own = (name for name, each in signature(load).parameters.items() if each.kind is Parameter.KEYWORD_ONLY)
    return list(dict.fromkeys([*keys, *_OPTIONS, *own]))


def _request(batch_size: int, max_length: int, *, in_lockstep: bool) -> dict[str, dict[str, Any]]:
    """Return what each stage would ask of the model that it was given so many sequences of so many tokens.

    Those ``in_lockstep`` compute one at a time: what they take together are their caches.
    """
    generate = {"prompts": [[0] * max(1, max_length // 2)] * batch_size, "max_length": max_length}
    generate["lockstep" if in_lockstep else "batch_size"] = batch_size
    score = {"texts": [[0] * max_length] * batch_size, "window": max_length, "batch_size": batch_size}
    return {"generate": generate, "score": score}


def _config(stages: Sequence[Stage[Any]], path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that ``options`` and the defaults of the stages come to."""
    keys, names = key_names(stage.config_class for stage in stages), known_options()
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown option{closest(unknown[0], names)}")
    node = {name: as_text(options.get(name, default)) for name, default in _OPTIONS.items()}
    config = {key: value for stage in stages for key, value in defaults(stage.config_class).items()}
    config |= {name: value for name, value in options.items() if name in keys}
    return {**config, "model": {"kind": "pretrained", "path": path, **node}}


def _check(stages: Sequence[Stage[Any]], config: Config) -> None:
    """Raise all that is wrong with the config, before any work."""
    raise_faults([fault for stage in stages for fault in type_faults(stage.config_class, config)])
    raise_faults([fault for stage in stages for fault in stage.check(config)])
    raise_faults([fault for stage in stages for fault in stage.examine(config)])
    if kind := _cache_kind(config["generate"]):
        raise_faults(list(asked_faults("generate", {**config, "generate": {"prompts": [[0]], **kind}, "seed": 0})))


def _cache_kind(generate: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the options of ``generate`` says which kind of KV cache it has."""
    return {name: generate[name] for name in (CACHE, CACHE_CONFIG) if generate.get(name) is not None}
