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


def with_three_layers(model: LoadedModel, **changes: Any) -> LoadedModel:
    """A next-token model with random weights: a layer is left behind those that rules look at.

    ``changes``: of its decoder's configuration. No answer of its ends before its budget.
    """
    spec = dataclasses.replace(model.spec, attention=Attention.CAUSAL, logit_shift=1, end_ids=frozenset({-1}))
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


def attention(layer: DecoderLayer, x: Tensor, rows: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of each head and row to each position ``[H, rows, n]``: inputs of the ``rows`` are ``x [rows, D]``."""
    q = rotate(layer.q_norm(layer.q_proj(layer.attn_norm(x)).unflatten(-1, (-1, layer.head_dim))), cos[rows], sin[rows])
    k = rotate(keys, cos, sin)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("rhk,lhk->hrl", q, k) / layer.head_dim**0.5
    unseen = torch.arange(len(k))[None, :] > rows[:, None]
    return scores.masked_fill(unseen, -torch.inf).softmax(-1)


def layer_out(layer: DecoderLayer, x: Tensor, rows: Tensor, kv: KV, cos: Tensor, sin: Tensor) -> Tensor:
    """What the layer makes of the ``rows``, whose inputs are ``x [rows, D]``, where all positions have ``kv``."""
    seen = attention(layer, x, rows, kv[0], cos, sin)
    v = kv[1].repeat_interleave(len(seen) // kv[1].shape[1], 1)
    x = x + layer.o_proj(torch.einsum("hrl,lhk->rhk", seen, v).flatten(1))
    h = layer.mlp_norm(x)
    return x + layer.down_proj(torch.nn.functional.silu(layer.gate_proj(h)) * layer.up_proj(h))


def plain_kv(model: LoadedModel, x: Tensor, positions: Tensor) -> list[KV]:
    """Keys before rotation and values of every layer, for the embedded row ``x [n, D]`` with nothing taken."""
    cos, sin = model.decoder.rotary(positions)
    every, found = torch.arange(len(x)), []
    for layer in model.decoder.layers:
        assert isinstance(layer, DecoderLayer)
        found.append(layer_kv(layer, x))
        x = layer_out(layer, x, every, found[-1], cos, sin)
    return found


def kv_of_images_alone(model: LoadedModel, x: Tensor, images: list[slice], context: int) -> list[KV]:
    """K/V of every layer of the ``images`` of the embedded prompt ``x``, side by side, each right behind the first
    ``context`` positions."""
    alone = []
    for image in images:
        row = torch.cat([x[:context], x[image]])
        alone.append([(k[context:], v[context:]) for k, v in plain_kv(model, row, torch.arange(len(row)))])
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
    weighed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logits of the last row, and which positions were run again.

    ``x [n, D]``: the embedded prompt; the positions ``at`` have the K/V ``alone`` but for ``share`` of them: those that
    ``choose`` names, or, without it, those whose K/V at the second layer are furthest from the prompt's own, which are
    then taken there. ``weighed``: those whose ``second_layer`` scores are the highest.
    """
    cos, sin = model.decoder.rotary(positions)
    taken = [(k.clone(), v.clone()) for k, v in alone]
    if choose is None:
        fresh = plain_kv(model, x, positions)[1]
        apart = sum((own[at] - kept).square().flatten(1).sum(1) for own, kept in zip(fresh, taken[1], strict=True))
        if weighed:
            moved, attended = second_layer(model, x, positions, at, alone)
            apart = moved * attended
        taken[1] = (fresh[0][at], fresh[1][at])
        again = at[torch.as_tensor(apart).argsort(descending=True, stable=True)[:share]]
    else:
        again = at[choose(torch.arange(len(at)))]
    held = torch.zeros(len(x), dtype=torch.bool)
    held[at] = True
    held[again] = False
    rows, x = (~held).nonzero().flatten(), x[~held]
    where = torch.full((len(held),), -1)
    where[at] = torch.arange(len(at))
    for layer, kept in zip(model.decoder.layers, taken, strict=True):
        assert isinstance(layer, DecoderLayer)
        full = []
        for own, other in zip(layer_kv(layer, x), kept, strict=True):
            whole = torch.zeros(len(held), *own.shape[1:])
            whole[rows], whole[held] = own, other[where[held]]
            full.append(whole)
        x = layer_out(layer, x, rows, (full[0], full[1]), cos, sin)
    logits: Tensor = model.decoder.logits(model.decoder.norm(x[-1]))
    return logits, again.sort().values


def second_layer(
    model: LoadedModel, x: Tensor, positions: Tensor, at: Tensor, alone: list[KV]
) -> tuple[Tensor, Tensor]:
    """Of each position ``at`` how far its values are from this prompt's (L1), and how much all of it attends there."""
    cos, sin = model.decoder.rotary(positions)
    every, fresh = torch.arange(len(x)), plain_kv(model, x, positions)
    first, second, *_others = model.decoder.layers
    assert isinstance(first, DecoderLayer) and isinstance(second, DecoderLayer)
    seen = attention(second, layer_out(first, x, every, fresh[0], cos, sin), every, fresh[1][0], cos, sin)
    return (fresh[1][1][at] - alone[1][1]).abs().flatten(1).sum(1), seen.sum((0, 1))[at]


def shared_answer(
    model: LoadedModel, x: Tensor, at: Tensor, alone: list[KV], share: int, each_step: int, tokens: int
) -> tuple[list[int], list[float], list[list[int]]]:
    """So many ``tokens`` of the most probable answer to the embedded prompt ``x [n, D]`` under KVShare, the logarithms
    of their probabilities, and which positions were run beside each but the first.

    The positions ``at`` have the K/V ``alone`` in all but the first two layers; ``share`` of them are run in prefill.
    """
    decoder, size = model.decoder, len(x)
    positions = torch.arange(size + tokens)
    cos, sin = decoder.rotary(positions)
    moved, attended = second_layer(model, x, positions[:size], at, alone)
    store = []
    for layer, (kept, own) in enumerate(zip(alone, plain_kv(model, x, positions[:size]), strict=True)):
        both = (torch.zeros(size + tokens, *one.shape[1:]) for one in kept)
        store.append(tuple(both))
        for whole, alone_there, fresh in zip(store[-1], kept, own, strict=True):
            whole[at] = fresh[at] if layer < 2 else alone_there
    left = torch.ones(len(at), dtype=torch.bool)

    def best(count: int) -> Tensor:
        scores = torch.where(left, moved * attended, -1.0)
        found = scores.argsort(descending=True, stable=True)[: min(count, int(left.sum()))]
        left[found] = False
        return at[found].sort().values

    def run(rows: Tensor, x: Tensor) -> Tensor:
        nonlocal attended
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            for whole, own in zip(store[index], layer_kv(layer, x), strict=True):
                whole[rows] = own
            if index == 1 and len(rows) <= each_step + 1:
                attended = attention(layer, x, rows, store[1][0], cos, sin)[:, -1].sum(0)[at]
            x = layer_out(layer, x, rows, store[index], cos, sin)
        logits: Tensor = decoder.logits(decoder.norm(x[-1]))
        logits[list(model.spec.banned_ids)] = -torch.inf
        return logits

    held = torch.zeros(size, dtype=torch.bool)
    held[at] = True
    held[best(share)] = False
    logits = run((~held).nonzero().flatten(), x[~held])
    chosen: list[int] = []
    likely: list[float] = []
    beside: list[list[int]] = []
    for place in range(size, size + tokens):
        chosen.append(int(logits.argmax()))
        likely.append(float(logits.log_softmax(-1).max()))
        x = torch.cat([x, decoder.embed(torch.tensor(chosen[-1:]))])
        if place < size + tokens - 1:
            again = best(each_step)
            beside.append(again.tolist())
            rows = torch.cat([again, torch.tensor([place])])
            logits = run(rows, x[rows])
    return chosen, likely, beside
