"""What stands in a model's place for the blocks that other hosts compute, and what passes between hosts.

Every host calls the whole model, in step with all others. Where its own run of blocks begins, it is sent the output of
the block before by the host that computed it; where it ends, it sends its own on. A block that is elsewhere returns
what came for its run, and enters a key of one byte into the cache: lengths, masks and positions are those of one
process on every host, at next to no memory. So all that is around a forward (search by beams, sampling by a seed,
stopping, cropping) needs no agreement: all hosts do the same with the same logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.peers import Peers
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.hosts.partition import Partition
from offstage.stages.machine.hosts import KEY


class Wire:
    """Sends what modules return to other hosts, and receives it: tensors, and tuples, lists and mappings of them."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def send(self, value: Any, hosts: Iterable[int]) -> None:
        """Send ``value`` to each of ``hosts``."""
        tensors: list[torch.Tensor] = []
        shape = _described(value, tensors)
        for host in hosts:
            self._peers.send_json(shape, host)
            for tensor in tensors:
                self._peers.send(tensor, host)

    def receive(self, host: int, device: torch.device) -> Any:
        """Return what ``host`` sends next, on ``device``."""
        return self._built(self._peers.receive_json(host), host, device)

    def _built(self, shape: Any, host: int, device: torch.device) -> Any:
        kind, what = shape
        if kind == "tensor":
            sizes, dtype = what
            return self._peers.receive(torch.empty(sizes, dtype=torch_dtype(dtype)), host).to(device)
        if kind == "plain":
            return what
        parts = [self._built(part, host, device) for part in what]
        return tuple(parts) if kind == "tuple" else parts


def _described(value: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """Return what ``value`` is as JSON; its tensors are added to ``tensors``, in the order in which they are met."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", [list(value.shape), dtype_name(value.dtype)]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_described(part, tensors) for part in value]]
    raise ConfigError(
        f"{KEY}: a block returns a {type(value).__name__}, which isn't sent to another host; leave it null"
    )


class AwayRun:
    """Blocks of one stack, one after the other, that other hosts compute: all of them return the same ``value``.

    It is received from ``source`` as the first is called, or, where that is null, what the host's own last block came
    to: then nobody looks at it.
    """

    def __init__(self, wire: Wire, source: int | None) -> None:
        self.value: Any = None
        self._wire, self._source = wire, source

    def begin(self, device: torch.device) -> None:
        """Have the value of this forward."""
        if self._source is not None:
            self.value = self._wire.receive(self._source, device)


class StandIn(nn.Module):
    """A block that another host computes. It has the plain attributes of the block, by which a model's code goes."""

    def __init__(self, block: nn.Module, run: AwayRun, place: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and not isinstance(value, nn.Module | torch.Tensor):
                setattr(self, name, value)
        self._run, self._is_first, self._is_last = run, is_first, is_last
        places = (getattr(module, "layer_idx", None) for module in block.modules())
        self._place = next((found for found in places if isinstance(found, int)), place)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return what the run of blocks comes to."""
        given = [*arguments, *options.values()]
        hidden = next(value for value in given if isinstance(value, torch.Tensor) and value.dim() > 1)
        for cache in given:
            if hasattr(cache, "get_seq_length"):
                _enter(getattr(cache, "self_attention_cache", cache), self._place, hidden)
        if self._is_first:
            self._run.begin(hidden.device)
        value = self._run.value
        if self._is_last:
            self._run.value = None  # nobody asks for it again, and it may be large
        return value


def _enter(cache: Any, place: int, hidden: torch.Tensor) -> None:
    """Enter keys of one byte and values of none for the positions of ``hidden`` at ``place`` of ``cache``.

    A cache goes by its keys' numbers: without any it would have no length. What keeps a state in their place is marked
    as one that has one.
    """
    layers = getattr(cache, "layers", ())
    layer: Any = layers[place] if place < len(layers) else None
    state = getattr(layer, "has_previous_state", None)
    if state is not None:
        layer.has_previous_state = dict.fromkeys(state, True) if isinstance(state, dict) else True
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
        return self._wire.receive(self._source, hidden.device)


def stand_in(model: nn.Module, partition: Partition, peers: Peers) -> None:
    """Put stand-ins into ``model`` for what other hosts compute, and have what they need sent to them.

    Raises ``ConfigError`` for a model whose blocks read the keys and values of others, which may be elsewhere.
    """
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(f"{KEY}: {type(model).__name__} has layers that read other layers' keys; leave hosts null")
    wire, host = Wire(peers), peers.rank
    others = [other for other in range(partition.hosts) if other != host]
    for stack, blocks in partition.blocks.items():
        own, count = partition.own(host, stack), len(blocks)
        before = AwayRun(wire, partition.owner(stack, own.start - 1) if own and own.start else None)
        ends, is_last = stack in partition.shares_end, bool(own) and own.stop == count
        after = AwayRun(wire, partition.owner(stack, count - 1) if ends and not is_last else None)
        _replace(model, blocks, range(own.start) if own else range(0), before)
        _replace(model, blocks, range(own.stop if own else 0, count), after)
        if own:
            following = (others if ends else []) if is_last else [partition.owner(stack, own.stop)]
            _send_on(model.get_submodule(blocks[own.stop - 1]), wire, following, after)
    head = partition.head
    if head is not None and host != partition.last:
        _put(model, head, AwayHead(model.get_submodule(head), wire, partition.last))
    elif head is not None:
        _send_on(model.get_submodule(head), wire, others)


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
            after.value = output

    module.register_forward_hook(returned)
