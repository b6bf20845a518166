"""What stands in a model's place for the blocks that other hosts compute, and what passes between hosts.

Every host calls the whole model, in step with all others. Where its own run of blocks begins, it is sent the output of
the block before by the host that computed it; where it ends, it sends its own on. A block that is elsewhere returns
what came for its run, and enters a key of one byte into the cache: lengths, masks and positions are those of one
process on every host, at next to no memory. So all that is around a forward (search by beams, sampling by a seed,
stopping, cropping) needs no agreement: all hosts do the same with the same logits.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.empty_init.skeleton import parent, upward
from offstage.stages.hosts.partition import Partition
from offstage.stages.hosts.wire import Wire, around
from offstage.stages.machine.hosts import KEY
from offstage.stages.units import Position

_AT_THE_END: Position = (sys.maxsize, 0)
_SCATTERED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What a call of transformers' models may ask for that is of each block."""


class AwayRun:
    """Blocks of one stack, one after the other, that other hosts compute: all of them return the same value to a call.

    It is received from ``source`` as the first is called, or, where that is null, what the host's own last block came
    to: then nobody looks at it. In the order of a pass it comes at ``position``.
    """

    position: Position = (0,)

    def __init__(self, wire: Wire, source: int | None) -> None:
        self._wire, self._source = wire, source
        self._values: dict[str, Any] = {}  # of calls that are inside

    def begin(self, device: torch.device) -> None:
        """Have the value of this call's forward."""
        if self._source is not None:
            self.put(self._wire.receive(self._source, device, self.position))

    def put(self, value: Any) -> None:
        """Have ``value`` be what the blocks return."""
        self._values[self._wire.call()] = value

    def value(self, *, is_last: bool) -> Any:
        """Return what a block returns; nobody asks again after the last one, and it may be large."""
        call = self._wire.call()
        return self._values.pop(call, None) if is_last else self._values.get(call)

    def forget(self, call: str) -> None:
        """Let go what ``call`` has left, or a part of it: it ended inside."""
        for inside in [inside for inside in self._values if call in around(inside)]:
            del self._values[inside]


class StandIn(nn.Module):
    """A block that another host computes. It has the plain attributes of the block, by which a model's code goes."""

    def __init__(self, block: nn.Module, run: AwayRun, place: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and not isinstance(value, nn.Module | torch.Tensor):
                setattr(self, name, value)
        self._run, self._is_first, self._is_last = run, is_first, is_last
        places = (getattr(module, "layer_idx", None) for module in block.modules())
        self._place = next((index for index in places if isinstance(index, int)), place)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return what the run of blocks comes to."""
        given = [*arguments, *options.values()]
        hidden = next(value for value in given if isinstance(value, torch.Tensor) and value.dim() > 1)
        for cache in given:
            if hasattr(cache, "get_seq_length"):
                _enter(getattr(cache, "self_attention_cache", cache), self._place, hidden)
        if self._is_first:
            self._run.begin(hidden.device)
        return self._run.value(is_last=self._is_last)


def _enter(cache: Any, place: int, hidden: torch.Tensor) -> None:
    """Enter keys of one byte and values of none for the positions of ``hidden`` at ``place`` of ``cache``.

    A cache goes by its keys' numbers: without any it would have no length. What keeps a state in their place is marked
    as one that has one, and can be sorted and cropped as a convolution's can: a scan's can't, which its host says. What
    would quantise keys keeps these as they are: no group of numbers divides them, and of no number is there a largest.
    """
    layers: Any = getattr(cache, "layers", ())
    layer: Any = layers[place] if place < len(layers) else None
    if hasattr(layer, "_dequantize"):
        from transformers.cache_utils import DynamicLayer

        layer = layers[place] = DynamicLayer()
    state = getattr(layer, "has_previous_state", None)
    if state is not None:
        layer.has_previous_state = dict.fromkeys(state, True) if isinstance(state, dict) else True
    begun = getattr(layer, "is_conv_states_initialized", None)
    for index in [index for index, has_begun in begun.items() if not has_begun] if isinstance(begun, dict) else ():
        layer.lazy_initialization(conv_states=hidden.new_empty(hidden.shape[0], 1, 0), state_idx=index)
    if layer is None or hasattr(layer, "get_seq_length"):
        key = torch.zeros(hidden.shape[0], 1, hidden.shape[1], 1, dtype=torch.uint8, device=hidden.device)
        cache.update(key, key[..., :0], place)


class AwayHead(nn.Module):
    """The head where another host computes it: what it comes to is received.

    A model's code may ask for the shape or the dtype of the head's weights: they are there, without memory.
    """

    def __init__(self, head: nn.Module, wire: Wire, source: int) -> None:
        super().__init__()
        for name, tensor in head.named_parameters(recurse=False):
            setattr(self, name, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
        self._wire, self._source = wire, source

    def forward(self, hidden: torch.Tensor) -> Any:
        """Return the logits."""
        return self._wire.receive(self._source, hidden.device, _AT_THE_END)


class Borders:
    """Where one host's part of a model meets that of others: the ``wire`` between them, and what is received of it.

    ``runs`` has the blocks before and after those of the host, by stack: these are the host's ``own``.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.runs: list[tuple[AwayRun, Collection[str], AwayRun]] = []

    def end(self, call: str) -> None:
        """Hear that ``call`` is over on this host: nothing of it is kept, however it ended."""
        self.wire.end(call)
        for before, _, after in self.runs:
            before.forget(call)
            after.forget(call)

    def place(self, positions: Mapping[str, Position]) -> None:
        """Set when in a pass each run is waited for: right before or after what is the host's of ``positions``.

        These are of modules, by their names.
        """
        reached: Position = (-1, sys.maxsize)
        for before, own, after in self.runs:
            inside = [at for name, at in positions.items() if any(above in own for above in upward(name))]
            before.position = (min(inside)[0] - 1, sys.maxsize) if inside else reached
            reached = after.position = (max(inside)[0], sys.maxsize) if inside else reached


def stand_in(model: nn.Module, partition: Partition, wire: Wire, host: int) -> Borders:
    """Put stand-ins into ``model`` for what others than ``host`` compute, and have what they need sent by ``wire``.

    Raises ``ConfigError`` for a model whose blocks read the keys and values of others, which may be elsewhere.
    """
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(f"{KEY}: {type(model).__name__} has layers that read other layers' keys; leave hosts null")
    model.register_forward_pre_hook(_refuse_scattered, with_kwargs=True)
    borders = Borders(wire)
    others = [other for other in range(partition.hosts) if other != host]
    for stack, blocks in partition.blocks.items():
        own, count = partition.own(host, stack), len(blocks)
        before = AwayRun(wire, partition.owner(stack, own.start - 1) if own and own.start else None)
        ends, is_last = stack in partition.shares_end, bool(own) and own.stop == count
        after = AwayRun(wire, partition.owner(stack, count - 1) if ends and not is_last else None)
        borders.runs.append((before, {blocks[place] for place in own}, after))
        _replace(model, blocks, range(own.start) if own else range(0), before)
        _replace(model, blocks, range(own.stop if own else 0, count), after)
        if own:
            following = (others if ends else []) if is_last else [partition.owner(stack, own.stop)]
            _send_on(model.get_submodule(blocks[own.stop - 1]), wire, following, None if is_last else after)
    head = partition.head
    if head is not None and host != partition.last:
        _put(model, head, AwayHead(model.get_submodule(head), wire, partition.last))
    elif head is not None:
        _send_on(model.get_submodule(head), wire, others)
    return borders


def _refuse_scattered(model: nn.Module, _arguments: Any, options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` where a call, or the model's config where that says nothing, asks for what each block has
    of its own: a host would return those it has.
    """
    for name in _SCATTERED:
        asked = options.get(name)
        if getattr(getattr(model, "config", None), name, None) if asked is None else asked:
            raise ConfigError(f"{name}: what blocks return lies on several hosts, and isn't gathered; leave it out")


def _replace(model: nn.Module, blocks: tuple[str, ...], places: range, run: AwayRun) -> None:
    for place in places:
        block = model.get_submodule(blocks[place])
        first, last = place == places.start, place == places.stop - 1
        _put(model, blocks[place], StandIn(block, run, place, is_first=first, is_last=last))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    module.train(model.training)
    setattr(model.get_submodule(parent(name)), name.rpartition(".")[2], module)


def _send_on(module: nn.Module, wire: Wire, hosts: list[int], after: AwayRun | None = None) -> None:
    """Have what ``module`` returns sent to ``hosts``; the run ``after`` it returns the same, unless it is sent some."""

    def returned(_module: nn.Module, _arguments: Any, output: Any) -> None:
        wire.send(output, hosts)
        if after is not None:
            after.put(output)

    if hosts or after is not None:
        module.register_forward_hook(returned)
