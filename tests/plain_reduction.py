"""Next-token decoding with reduced K/V written down plainly: one token at a time, a list of entries a head, no pages.

The oracle of the tests of K/V reductions. Each rule is written out again from its paper; only the decoder's own layers
are shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.models.base import LoadedModel


@dataclass
class Entry:
    """One position in the cache of one K/V head."""

    position: int
    key: Tensor  # [K], rotated
    value: Tensor
    visual: bool
    attention: float = 0.0


@dataclass
class Head:
    """The cache of one K/V head of a layer, and the queries (before rotation) of each of its query heads."""

    entries: list[Entry]
    queries: list[list[Tensor]]


Rule = Callable[["Plain", Head], list[Entry] | None]


class Plain:
    """One request. ``rule`` says what each head keeps; None = everything, for now."""

    def __init__(self, model: LoadedModel, rule: Rule, *, prompt: int, first_query: int) -> None:
        self.model, self.rule, self.prompt, self.first_query = model, rule, prompt, first_query
        config = model.decoder.config
        self.size, self.groups = config.head_dim, config.num_heads // config.num_kv_heads
        self.heads = [
            [Head([], [[] for _ in range(self.groups)]) for _ in range(config.num_kv_heads)]
            for _ in range(config.num_layers)
        ]
        self.seen = 0
        self.outputs = 0

    def run(self, x_D: Tensor, visual: bool = False) -> int:
        """The next token after one more embedded token."""
        decoder, position = self.model.decoder, self.seen
        cos, sin = decoder.rotary(torch.tensor([position]))
        x = x_D[None]
        for layer, heads in zip(decoder.layers, self.heads, strict=True):

            def attend(_n: int, q: Tensor, k: Tensor, v: Tensor, c: Tensor, s: Tensor, heads=heads) -> Tensor:
                turned, key = rotate(q, c, s)[0], rotate(k, c, s)[0]
                out = []
                for g, head in enumerate(heads):
                    head.entries.append(Entry(position, key[g], v[0, g], visual))
                    keys = torch.stack([e.key for e in head.entries])
                    values = torch.stack([e.value for e in head.entries])
                    for u in range(self.groups):
                        weights = (keys @ turned[g * self.groups + u] / math.sqrt(self.size)).softmax(0)
                        out.append(weights @ values)
                        if position >= self.first_query:
                            head.queries[u].append(q[0, g * self.groups + u])
                            for entry, weight in zip(head.entries, weights.tolist(), strict=True):
                                entry.attention += weight
                return torch.stack(out)[None]

            x = layer(x, cos, sin, 0, attend)
        self.seen += 1
        self.outputs += self.seen >= self.prompt
        logits = decoder.logits(decoder.norm(x))[0].clone()
        logits[list(self.model.spec.banned_ids)] = -torch.inf
        return int(logits.argmax())

    def reduce(self) -> None:
        """Let each head keep what the rule says."""
        for heads in self.heads:
            for head in heads:
                head.entries = self.rule(self, head) or head.entries

    @property
    def kept(self) -> list[list[list[int]]]:
        """The positions of each K/V head of each layer."""
        return [[[e.position for e in head.entries] for head in heads] for heads in self.heads]


def _over(head: Head, budget: int, page: int) -> bool:
    return len(head.entries) >= budget + page


def heavy_hitters(budget: int, recent: float, page: int) -> Rule:
    def rule(_plain: Plain, head: Head) -> list[Entry] | None:
        if not _over(head, budget, page):
            return None
        latest = round(budget * recent)
        old, new = head.entries[: len(head.entries) - latest], head.entries[len(head.entries) - latest :]
        heavy = sorted(old, key=lambda e: (-e.attention, e.position))[: budget - latest]
        return sorted(heavy, key=lambda e: e.position) + new

    return rule


def sink_window(budget: int, sinks: int, page: int) -> Rule:
    def rule(_plain: Plain, head: Head) -> list[Entry] | None:
        if not _over(head, budget, page):
            return None
        return head.entries[:sinks] + head.entries[len(head.entries) - (budget - sinks) :]

    return rule


def expected_attention(budget: int, sinks: int, future: int, page: int) -> Rule:
    """With the averaged rotation as a matrix, and moments from all queries at once."""

    def rule(plain: Plain, head: Head) -> list[Entry] | None:
        if not _over(head, budget, page):
            return None
        cos, sin = plain.model.decoder.rotary(torch.arange(plain.seen, plain.seen + future))
        turn = torch.stack([rotate(torch.eye(plain.size), c, s) for c, s in zip(cos, sin, strict=True)]).mean(0).T
        rest = head.entries[sinks:]
        shares = torch.zeros(len(rest))
        for queries in head.queries:
            all_q = torch.stack(queries).double()
            mean, spread = (turn.double() @ all_q.mean(0)), turn.double() @ all_q.T.cov(correction=0) @ turn.double().T
            keys = [e.key.double() / math.sqrt(plain.size) for e in rest]
            scores = [float(mean @ key + key @ spread @ key / 2) for key in keys]
            shares += torch.tensor(scores).softmax(0) / plain.groups
        worth = [float(share * e.value.norm()) for share, e in zip(shares, rest, strict=True)]
        chosen = sorted(range(len(rest)), key=lambda i: -worth[i])[: budget - sinks]
        return head.entries[:sinks] + [rest[i] for i in sorted(chosen)]

    return rule


def visual_cache(budget: int, outputs: int) -> Rule:
    def rule(plain: Plain, head: Head) -> list[Entry] | None:
        seen = sorted((e for e in head.entries if e.visual), key=lambda e: (-e.attention, e.position))
        if plain.outputs < outputs or len(seen) <= budget:
            return None
        dropped = {e.position for e in seen[budget:]}
        return [e for e in head.entries if e.position not in dropped]

    return rule
