"""Random models on an accelerator on which everything happens late: each module looks at its weights as it is called.

A model is a row of modules: plain ones, with adapters or hooks of a script, mixtures of listed and of stacked experts.
Where their weights lie is drawn too: on the accelerator, on the host, on disk, there packed or not, unpacked by the
host or by the accelerator. Nothing is computed but by the accelerator, when its turn comes: a call has it look at the
weights, and at what was computed before, which lies in its memory as all that it computes does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from tests.stages.dispatch.late_link import LateLink

WIDTH, EXPERTS = 16, 5
ROUTES: ContextVar[random.Random] = ContextVar("ROUTES")
"""By what the call under way is routed."""


class LateDevice:
    """Has a late accelerator compute, over ``link``; ``expected`` has what will be in what it has computed."""

    def __init__(self, link: LateLink) -> None:
        self.link, self._count = link, 0
        self._expected: dict[int, torch.Tensor] = {}

    def compute(self, size: int) -> torch.Tensor:
        """Return so many bytes that it computes, in memory of its own, which others get once nothing views them."""
        made = torch.frombuffer(self.link.device.take(size), dtype=torch.uint8)
        self._count = self._count % 100 + 1
        self._expected[made.data_ptr()] = torch.full((size,), self._count, dtype=torch.uint8)
        self.link.write(made, self._count)
        return made

    def expected(self, computed: torch.Tensor) -> torch.Tensor | None:
        """Return what will be in what was ``computed``; null of what another accelerator has."""
        return self._expected.get(computed.data_ptr())

    def look(self, tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        """Have it compare ``tensors`` with what is ``expected`` in them, when its turn comes."""
        for tensor, wanted in zip(tensors, expected, strict=True):
            self.link.launch(tensor, wanted)


class _Looked(torch.autograd.Function):
    """Looks at weights and at what was computed before in the forward, and at the same again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: LateDevice, wanted: Any, *weights: torch.Tensor) -> torch.Tensor:
        before = device.expected(x.detach())
        seen = [x, *weights] if before is not None else weights
        ctx.save_for_backward(*seen)
        ctx.device, ctx.wanted, ctx.weights = device, [*([before] if before is not None else []), *wanted], len(weights)
        device.look(seen, ctx.wanted)
        return device.compute(x.nbytes).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.device.look(ctx.saved_tensors, ctx.wanted)
        return gradient, None, None, *[None] * ctx.weights


class Looking(nn.Module):
    """Looks at its weights, of these ``shapes``."""

    def __init__(self, device: LateDevice, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.device = device
        for number, shape in enumerate(shapes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(shape), requires_grad=False))
        self.wanted: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it computes of ``x``."""
        weights = list(self.parameters(recurse=False))
        return x if is_fake(x) else _Looked.apply(x, self.device, self.wanted, *weights)


class Adapted(nn.Module):
    """A module that looks as it is, and two small ones beside it, as an adapter has them."""

    def __init__(self, device: LateDevice, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.base = Looking(device, shapes)
        self.down, self.up = Looking(device, [(2, WIDTH)]), Looking(device, [(WIDTH, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all of them compute of ``x``."""
        return self.up(self.down(self.base(x)))


class Hooked(Looking):
    """One that hooks of a script look at too, before and after its forward; they keep what they saw to the next."""

    def __init__(self, device: LateDevice, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(device, shapes)
        self.seen: list[torch.Tensor] = []
        self.register_forward_pre_hook(_look)
        self.register_forward_hook(_look)


def _look(module: nn.Module, args: tuple[torch.Tensor, ...], *_: object) -> None:
    if isinstance(module, Hooked) and not is_fake(args[0]):
        module.device.look(module.seen, module.wanted[: len(module.seen)])
        weights = [weight.detach().view_as(weight) for weight in module.parameters(recurse=False)]
        module.device.look(weights, module.wanted)
        module.seen[:] = weights[:1]


class Listed(nn.Module):
    """Calls some experts of a list, as the call is routed, in order or not."""

    def __init__(self, device: LateDevice, rows: int) -> None:
        super().__init__()
        self.router = Looking(device, [(EXPERTS, WIDTH)])
        self.experts = nn.ModuleList(Looking(device, [(rows, WIDTH), (WIDTH,)]) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what those experts compute of ``x``."""
        x = self.router(x)
        for expert in torch.topk(self.router.w0.sum(1), 2).indices.tolist() if is_fake(x) else routed():
            x = self.experts[expert](x)
        return x


class Stacked(nn.Module):
    """Multiplies by stacked experts, as the call is routed: one by one, or by a grouped product."""

    num_experts = EXPERTS

    def __init__(self, device: LateDevice, rows: int) -> None:
        super().__init__()
        self.device, self.wanted = device, list[torch.Tensor]()
        self.first = nn.Parameter(torch.randn(EXPERTS, rows, WIDTH), requires_grad=False)
        self.second = nn.Parameter(torch.randn(EXPERTS, WIDTH, rows), requires_grad=False)

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        """Return what the experts compute of ``x`` that tokens are routed to."""
        if is_fake(x):
            return x
        experts = sorted(set(top_k_index.flatten().tolist()))
        with torch.no_grad():  # with gradients they would be copied, which this accelerator can't do in its own order
            for stack, wanted in zip((self.first, self.second), self.wanted, strict=True):
                if ROUTES.get().random() < 0.5:
                    for expert in experts:
                        self.device.look([stack[expert]], [wanted[expert]])
                else:
                    self._grouped(stack, wanted, experts)
        return _Looked.apply(x, self.device, ())

    def _grouped(self, stack: torch.Tensor, wanted: torch.Tensor, experts: Sequence[int]) -> None:
        device = self.device

        def grouped_mm(left: torch.Tensor, stack: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
            if torch.overrides.has_torch_function((stack,)):
                product: torch.Tensor = torch.overrides.handle_torch_function(
                    grouped_mm, (stack,), left, stack, offs=offs
                )
                return product
            begins = [0, *offs.tolist()[:-1]]
            for matrix, begin, end in zip(stack, begins, offs.tolist(), strict=True):
                if end > begin:
                    device.look([matrix], [wanted[int(left[begin, 0])]])
            return left.new_zeros((len(left), stack.shape[-1]))

        edges = torch.tensor([expert in experts for expert in range(EXPERTS)]).cumsum(0, dtype=torch.int32)
        left = torch.tensor(experts, dtype=torch.float32)[:, None].expand(-1, stack.shape[1])
        grouped_mm(left, stack, offs=edges)


class Mixture(nn.Module):
    """A router, and stacked experts behind it."""

    def __init__(self, device: LateDevice, rows: int) -> None:
        super().__init__()
        self.router, self.experts = Looking(device, [(EXPERTS, WIDTH)]), Stacked(device, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the experts compute of ``x`` that the call is routed to."""
        x = self.router(x)
        return self.experts(x, torch.tensor([[0, 1] if is_fake(x) else routed()]))


class Row(nn.Module):
    """Calls modules one after another; some of them twice, and some not, as the call is routed."""

    interrupted = 0.0
    """How likely an interrupt is, after each module."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all of them compute of ``x``."""
        for block in self.blocks:
            again = 0 if is_fake(x) else ROUTES.get().choice([0] * 12 + [-1, 1])
            for _ in range(1 + again):
                x = block(x)
            if not is_fake(x) and ROUTES.get().random() < self.interrupted:
                raise KeyboardInterrupt
        return x


def routed() -> list[int]:
    """Return the experts that a token of the call under way goes to."""
    chance = ROUTES.get()
    return chance.sample(range(EXPERTS), chance.randint(1, EXPERTS))


def random_block(device: LateDevice, chance: random.Random) -> nn.Module:
    """Return a module of any kind, with weights of any size."""
    kind = chance.choice([Looking, Adapted, Hooked, Listed, Mixture])
    if kind in (Listed, Mixture):
        return kind(device, chance.randint(1, 60))
    shapes = [(chance.randint(1, 400), WIDTH), (chance.randint(1, 4000),)]
    return kind(device, [shapes[chance.random() < 0.3] for _ in range(chance.randint(1, 3))])


def expect(model: nn.Module, values: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have each module of ``model`` expect its weights, as ``values`` makes them."""
    for _, module in looking(model):
        for weight in module.parameters(recurse=False):
            weight.data.copy_(values(weight.data))
        module.wanted[:] = [weight.detach().clone() for weight in module.parameters(recurse=False)]


def looking(model: nn.Module) -> Iterator[tuple[str, Looking | Stacked]]:
    """Yield the modules of ``model`` that look at weights, by name."""
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, Looking | Stacked))
