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


def layer_out(layer: DecoderLayer, x: Tensor, rows: Tensor, kv: KV, cos: Tensor, sin: Tensor) -> Tensor:
    """What the layer makes of the ``rows``, whose inputs are ``x [rows, D]``, where all positions have ``kv``."""
    q = rotate(layer.q_norm(layer.q_proj(layer.attn_norm(x)).unflatten(-1, (-1, layer.head_dim))), cos[rows], sin[rows])
    k, v = rotate(kv[0], cos, sin), kv[1]
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = torch.einsum("rhk,lhk->hrl", q, k) / layer.head_dim**0.5
    unseen = torch.arange(len(k))[None, :] > rows[:, None]
    seen = scores.masked_fill(unseen, -torch.inf).softmax(-1)
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


def blended_logits(
    model: LoadedModel,
    x: Tensor,
    positions: Tensor,
    at: Tensor,
    alone: list[KV],
    choose: Callable[[Tensor], Tensor] | None,
    share: int,
) -> tuple[Tensor, Tensor]:
    """Logits of the last row, and which positions were run again.

    ``x [n, D]``: the embedded prompt; the positions ``at`` have the K/V ``alone`` but for ``share`` of them: those that
    ``choose`` names, or, without it, those whose K/V at the second layer are furthest from the prompt's own, which are
    then taken there.
    """
    cos, sin = model.decoder.rotary(positions)
    taken = [(k.clone(), v.clone()) for k, v in alone]
    if choose is None:
        fresh = plain_kv(model, x, positions)[1]
        apart = sum((own[at] - kept).square().flatten(1).sum(1) for own, kept in zip(fresh, taken[1], strict=True))
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
