"""Reuse of images' K/V written out plainly: dense attention, a row of tokens at a time, no pages and no cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import Decoder, DecoderLayer

#: Keys before rotation, and values, of one layer: ``[n, G, K]`` each.
KV = tuple[Tensor, Tensor]


def with_three_layers(
    model: LoadedModel, attention: Attention = Attention.CAUSAL, shift: int = 1, **changes: Any
) -> LoadedModel:
    """A model with random weights, a next-token one unless its ``attention`` is another: a layer is left behind those
    that rules look at. ``shift``: how far left of a position its logits stand.

    ``changes``: of its decoder's configuration. No answer of its ends before its budget.
    """
    spec = dataclasses.replace(model.spec, attention=attention, logit_shift=shift, end_ids=frozenset({-1}))
    decoder = Decoder(dataclasses.replace(model.decoder.config, num_layers=3, **changes))
    generator = torch.Generator().manual_seed(5)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 2:
            weight.data = torch.randn(weight.shape, generator=generator) * (1.0 if "embed" in name else 0.25)
    return dataclasses.replace(model, spec=spec, decoder=decoder.eval().requires_grad_(False))


def layer_kv(layer: DecoderLayer, x: Tensor) -> KV:
    """Of rows ``x [n, D]``."""
    h = layer.attn_norm(x)
    k, v = (p(h).unflatten(-1, (-1, layer.head_dim)) for p in (layer.k_proj, layer.v_proj))
    return layer.k_norm(k), v


def limits(model: LoadedModel, size: int, prompt: int) -> Tensor:
    """How many positions, from the left, each of so many sees, where the first ``prompt`` of them are a prompt."""
    if model.spec.attention is Attention.CAUSAL:
        return torch.arange(1, size + 1)
    found = torch.full((size,), size)
    if model.spec.attention is Attention.PREFIX:
        found[:prompt] = prompt
    return found


def attention(
    layer: DecoderLayer, x: Tensor, rows: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, seen: Tensor
) -> Tensor:
    """Of each head and row to each position ``[H, rows, n]``: inputs of the ``rows`` are ``x [rows, D]``; ``seen``: how
    many positions each position sees."""
    q = rotate(layer.q_norm(layer.q_proj(layer.attn_norm(x)).unflatten(-1, (-1, layer.head_dim))), cos[rows], sin[rows])
    k = rotate(keys, cos, sin)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("rhk,lhk->hrl", q, k) / layer.head_dim**0.5
    unseen = torch.arange(len(k))[None, :] >= seen[rows, None]
    return scores.masked_fill(unseen, -torch.inf).softmax(-1)


def layer_out(layer: DecoderLayer, x: Tensor, rows: Tensor, kv: KV, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
    """What the layer makes of the ``rows``, whose inputs are ``x [rows, D]``, where all positions have ``kv``."""
    given = attention(layer, x, rows, kv[0], cos, sin, seen)
    v = kv[1].repeat_interleave(len(given) // kv[1].shape[1], 1)
    x = x + layer.o_proj(torch.einsum("hrl,lhk->rhk", given, v).flatten(1))
    h = layer.mlp_norm(x)
    return x + layer.down_proj(torch.nn.functional.silu(layer.gate_proj(h)) * layer.up_proj(h))


def plain_kv(model: LoadedModel, x: Tensor, positions: Tensor, prompt: int) -> list[KV]:
    """Keys before rotation and values of every layer, for the embedded row ``x [n, D]`` with nothing taken."""
    cos, sin = model.decoder.rotary(positions)
    seen = limits(model, len(x), prompt)
    every, found = torch.arange(len(x)), []
    for layer in model.decoder.layers:
        assert isinstance(layer, DecoderLayer)
        found.append(layer_kv(layer, x))
        x = layer_out(layer, x, every, found[-1], cos, sin, seen)
    return found


def kv_of_images_alone(model: LoadedModel, x: Tensor, images: list[slice], context: int) -> list[KV]:
    """K/V of every layer of the ``images`` of the embedded prompt ``x``, side by side, each right behind the first
    ``context`` positions."""
    alone = []
    for image in images:
        row = torch.cat([x[:context], x[image]])
        alone.append([(k[context:], v[context:]) for k, v in plain_kv(model, row, torch.arange(len(row)), len(row))])
    return [(torch.cat([k for k, _v in of]), torch.cat([v for _k, v in of])) for of in zip(*alone, strict=True)]


def blended_logits(
    model: LoadedModel,
    x: Tensor,
    positions: Tensor,
    at: Tensor,
    alone: list[KV],
    choose: Callable[[Tensor], Tensor] | None,
    share: int,
    *,
    prompt: int,
    weighed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logits of the last row, and which positions were run again.

    ``x [n, D]``: the embedded canvas, so much of it ``prompt``; the positions ``at`` have the K/V ``alone`` but for
    ``share`` of them: those that ``choose`` names, or, without it, those whose K/V at the second layer are furthest
    from the prompt's own, which are then taken there. ``weighed``: those whose ``second_layer`` scores are the highest.
    """
    taken = alone
    if choose is None:
        taken, apart, moved, attended = looked_at(model, x, positions, at, alone, prompt)
        apart = moved * attended if weighed else apart
        again = at[apart.argsort(descending=True, stable=True)[:share]]
    else:
        again = at[choose(torch.arange(len(at)))]
    held = torch.zeros(len(x), dtype=torch.bool)
    held[at] = True
    held[again] = False
    run = Held(model, positions, prompt)
    run.put(at, taken)
    rows = (~held).nonzero().flatten()
    return run(rows, x[rows])[-1], again.sort().values


class Held:
    """Keys before rotation and values of a canvas, as they are read by the rows that are run."""

    def __init__(self, model: LoadedModel, positions: Tensor, prompt: int) -> None:
        self.model, self.seen = model, limits(model, positions.shape[-1], prompt)
        self.rotary = model.decoder.rotary(positions)
        config = model.decoder.config
        shape = (positions.shape[-1], config.num_kv_heads, config.head_dim)
        self.kv = [(torch.zeros(shape), torch.zeros(shape)) for _layer in model.decoder.layers]
        self.attended = torch.zeros(
            0
        )  # what the rows ``asking`` of the last run gave each position in the second layer

    def put(self, at: Tensor, kv: list[KV]) -> None:
        for whole, given in zip(self.kv, kv, strict=True):
            for mine, other in zip(whole, given, strict=True):
                mine[at] = other

    def __call__(self, rows: Tensor, x: Tensor, asking: slice | Tensor = slice(None)) -> Tensor:
        """Logits of the ``rows``, whose embeddings are ``x``; their K/V are put where they belong."""
        for index, layer in enumerate(self.model.decoder.layers):
            assert isinstance(layer, DecoderLayer)
            for whole, own in zip(self.kv[index], layer_kv(layer, x), strict=True):
                whole[rows] = own
            if index == 1:
                given = attention(layer, x, rows, self.kv[1][0], *self.rotary, self.seen)
                self.attended = given[:, asking].sum((0, 1))
            x = layer_out(layer, x, rows, self.kv[index], *self.rotary, self.seen)
        logits: Tensor = self.model.decoder.logits(self.model.decoder.norm(x))
        return logits


def looked_at(
    model: LoadedModel, x: Tensor, positions: Tensor, at: Tensor, alone: list[KV], prompt: int
) -> tuple[list[KV], Tensor, Tensor, Tensor]:
    """What comes of a look at the first two layers of the canvas ``x``: K/V of the positions ``at``, those of the first
    two layers this canvas's; how far those of the second are from those ``alone`` (squared), its values alone (L1), and
    how much all that may be looked at attends there: of a prompt that sees nothing of its answer, the prompt."""
    own = plain_kv(model, x, positions, prompt)
    apart = sum((mine[at] - kept).square().flatten(1).sum(1) for mine, kept in zip(own[1], alone[1], strict=True))
    assert isinstance(apart, Tensor)
    taken = [(k[at], v[at]) for k, v in own[:2]] + alone[2:]
    return taken, apart, *second_layer(model, x, positions, at, alone, prompt)


def second_layer(
    model: LoadedModel, x: Tensor, positions: Tensor, at: Tensor, alone: list[KV], prompt: int
) -> tuple[Tensor, Tensor]:
    """Of each position ``at`` how far its values are from this prompt's (L1), and how much all of it attends there."""
    looking = len(x) if model.spec.attention is Attention.FULL else prompt
    (cos, sin), seen = model.decoder.rotary(positions), limits(model, len(x), prompt)
    every, fresh = torch.arange(len(x)), plain_kv(model, x, positions, prompt)
    first, second, *_others = model.decoder.layers
    assert isinstance(first, DecoderLayer) and isinstance(second, DecoderLayer)
    x = layer_out(first, x, every, fresh[0], cos, sin, seen)
    given = attention(second, x, every, fresh[1][0], cos, sin, seen)[:, :looking]
    return (fresh[1][1][at] - alone[1][1]).abs().flatten(1).sum(1), given.sum((0, 1))[at]


def shared_answer(
    model: LoadedModel, x: Tensor, at: Tensor, alone: list[KV], share: int, each_step: int, tokens: int
) -> tuple[list[int], list[float], list[list[int]]]:
    """So many ``tokens`` of the most probable answer to the embedded prompt ``x [n, D]`` under KVShare, the logarithms
    of their probabilities, and which positions were run beside each but the first.

    The positions ``at`` have the K/V ``alone`` in all but the first two layers; ``share`` of them are run in prefill.
    """
    size = len(x)
    positions = torch.arange(size + tokens)
    taken, _apart, moved, attended = looked_at(model, x, positions[:size], at, alone, size)
    run = Held(model, positions, size)
    run.put(at, taken)
    left = torch.ones(len(at), dtype=torch.bool)

    def best(count: int) -> Tensor:
        scores = torch.where(left, moved * attended, -1.0)
        found = scores.argsort(descending=True, stable=True)[: min(count, int(left.sum()))]
        left[found] = False
        return at[found].sort().values

    held = torch.zeros(size, dtype=torch.bool)
    held[at] = True
    held[best(share)] = False
    rows = (~held).nonzero().flatten()
    logits = run(rows, x[rows])[-1]
    chosen: list[int] = []
    likely: list[float] = []
    beside: list[list[int]] = []
    for place in range(size, size + tokens):
        logits[list(model.spec.banned_ids)] = -torch.inf
        chosen.append(int(logits.argmax()))
        likely.append(float(logits.log_softmax(-1).max()))
        x = torch.cat([x, model.decoder.embed(torch.tensor(chosen[-1:]))])
        if place < size + tokens - 1:
            again = best(each_step)
            beside.append(again.tolist())
            rows = torch.cat([again, torch.tensor([place])])
            logits = run(rows, x[rows], slice(-1, None))[-1]
            attended = run.attended[at]
    return chosen, likely, beside


def denoised(
    model: LoadedModel, x: Tensor, prompt: int, at: Tensor, alone: list[KV], share: int, each_step: int
) -> tuple[list[int], list[list[int]], list[Tensor]]:
    """The answer of a masked diffusion model to the embedded canvas ``x [n, D]``, one token a pass, the most confident
    first, everything run that is not held; which positions each pass ran; and, of each pass but the first, how much
    those rows attend to the positions ``at`` that tell what is masked. KVShare's rule, as in ``shared_answer``."""
    positions, tokens, shift = torch.arange(len(x)), torch.full((len(x) - prompt,), -1), model.spec.logit_shift
    taken, _apart, moved, attended = looked_at(model, x, positions, at, alone, prompt)
    run = Held(model, positions, prompt)
    run.put(at, taken)
    held = torch.zeros(len(x), dtype=torch.bool)
    held[at] = True
    passes: list[list[int]] = []
    asked: list[Tensor] = []
    count = share
    while (tokens < 0).any():
        scores = torch.where(held[at], moved * attended, -1.0)
        again = scores.argsort(descending=True, stable=True)[: min(count, int(held.sum()))]
        held[at[again]] = False
        rows, still_open = (~held).nonzero().flatten(), (tokens < 0).nonzero().flatten()
        telling = len(rows) - len(tokens) - shift + still_open  # what stands behind the prompt's last image is run
        logits = run(rows, x[rows], telling)[telling]
        if passes:  # to what is run beside the first pass that decodes, all of the prompt has a say
            attended = run.attended[at]
            asked.append(attended)
        passes.append(rows.tolist())
        logits[:, list(model.spec.banned_ids)] = -torch.inf
        likely = logits.softmax(-1).max(-1)
        best = int(likely.values.argmax())
        tokens[still_open[best]] = likely.indices[best]
        x = x.clone()
        x[prompt + still_open[best]] = model.decoder.embed(likely.indices[best])
        count = each_step
    return tokens.tolist(), passes, asked
