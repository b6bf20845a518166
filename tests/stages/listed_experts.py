"""Mixtures that don't use transformers' interface for experts: a list of modules, of which a forward calls a few.

Three ways of published code to loop over them: those that were hit (Mixtral's), counts in numpy with the tokens sorted
(DeepSeek's), and token by token.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH, EXPERTS, TOP, LAYERS, WORDS = 128, 16, 2, 4, 64


class Expert(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int = WIDTH, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.down = nn.Linear(inner, width, bias=False)  # registered before what is called before it
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the expert makes of the tokens ``x``, [tokens, width]."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class HitExperts(nn.Module):
    """Loops over the experts that were hit."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = Expert(inner=WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the routed experts and the shared one make of the tokens ``x``, [tokens, width]."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return self.mix(x, weights, chosen) + self.shared(x)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts ``chosen``, [tokens, TOP]."""
        out = torch.zeros_like(x)
        mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for expert in mask.sum(dim=(-1, -2)).gt(0).nonzero():
            rank, token = torch.where(mask[expert.item()])
            out.index_add_(0, token, self.experts[expert](x[token]) * weights[token, rank, None])
        return out


class SortedExperts(HitExperts):
    """Sorts the tokens by expert and counts them in numpy."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts ``chosen``, [tokens, TOP]."""
        counts = chosen.new_zeros((len(chosen), EXPERTS)).scatter_(1, chosen, 1).sum(dim=0)
        order = chosen.view(-1).argsort(stable=True)
        ordered, outputs, start = x[order // TOP], [], 0
        for index, count in enumerate(counts.cpu().numpy()):
            if count:
                outputs.append(self.experts[index](ordered[start : start + count]))
                start += count
        mixed = torch.empty(len(order), WIDTH, dtype=x.dtype)
        mixed[order] = torch.cat(outputs)
        return (mixed.view(*chosen.shape, WIDTH) * weights[..., None]).sum(1)


class TokenExperts(HitExperts):
    """Goes through the tokens one by one."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts ``chosen``, [tokens, TOP]."""
        return torch.stack(
            [
                sum(share * self.experts[index](token) for share, index in zip(shares, indices.tolist(), strict=True))
                for token, shares, indices in zip(x, weights, chosen, strict=True)
            ]
        )


class MaskedExperts(HitExperts):
    """Asks of every expert whether a token is routed to it, and takes those by their mask."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts ``chosen``, [tokens, TOP]."""
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = (chosen == index).any(-1)
            if mask.any():
                share = (weights * (chosen == index)).sum(-1, keepdim=True)
                out[mask] += expert(x[mask]) * share[mask]
        return out


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self, mixture: type[HitExperts]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of the tokens ``x``, [tokens, width]."""
        before = torch.arange(1, len(x) + 1)[:, None]
        x = x + self.attention(self.norm(x)).cumsum(0) / before
        return x + self.mlp(self.norm(x))


class Mixture(nn.Module):
    """A small mixture; its forward takes token ids, [tokens], and returns logits, [tokens, WORDS]."""

    def __init__(self, mixture: type[HitExperts] = HitExperts, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(mixture) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens after each of ``tokens``."""
        x = self.embed(tokens.view(-1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


STYLES = (HitExperts, SortedExperts, TokenExperts, MaskedExperts)


def mixture(style: type[HitExperts] = HitExperts) -> Mixture:
    """Return a mixture of random weights, always the same ones."""
    torch.manual_seed(0)
    return Mixture(style).eval().requires_grad_(False)
