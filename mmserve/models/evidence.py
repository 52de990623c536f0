"""What CLIP-style towers show of their attention, for pruners.

transformers' towers return no attention under SDPA, so what is asked for is computed beside them, from the hidden
states that they do return and the weights of one layer. Of a layer only the class token's row is cheap: its query is
taken through the key projection once, and no key is made.
Shapes in names: B pictures, N positions, H heads, K head size, C = H * K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmserve.prune.base import Evidence

#: What a tower without a class token shows, and what only one with it does.
OF_PATCHES = frozenset({Evidence.COLUMN_MEANS, Evidence.KEYS, Evidence.FIRST_FEATURES})
OF_CLASS = frozenset({Evidence.CLS_ROW, Evidence.FIRST_CLS_ROW})


def layers_of(tower: nn.Module) -> Sequence[Any]:
    """The layers of a CLIP-style tower."""
    layers: Any = tower.get_submodule("encoder.layers")
    return layers


def gather(
    layers: Sequence[Any], hidden: Sequence[Tensor], selected: int, wanted: frozenset[Evidence], *, first: int
) -> dict[Evidence, Tensor]:
    """The ``wanted`` evidence, ``[B, patches]`` or ``[B, patches, C]``, in fp32.

    ``layers``: the tower's, which call their parts as CLIP's do (``layers_of``). ``hidden``: its hidden states
    ``[B, N, C]``, from the embeddings on; ``selected``: the one (from the end, negative) that features are taken from;
    ``first``: where patches begin, 1 behind a class token.
    """
    at = max(0, len(layers) + selected)  # the layer that made those features; for the embeddings, the first
    found: dict[Evidence, Tensor] = {}
    for kind in wanted:
        match kind:
            case Evidence.CLS_ROW:
                found[kind] = class_row(layers[at], hidden[at])[:, first:]
            case Evidence.FIRST_CLS_ROW:
                found[kind] = class_row(layers[0], hidden[0])[:, first:]
            case Evidence.COLUMN_MEANS:
                found[kind] = column_means(layers[at], hidden[at])[:, first:]
            case Evidence.KEYS:
                found[kind] = layers[at].self_attn.k_proj(layers[at].layer_norm1(hidden[at]))[:, first:].float()
            case Evidence.FIRST_FEATURES:
                found[kind] = hidden[1][:, first:].float()
    return found


def class_row(layer: Any, x_BNC: Tensor) -> Tensor:
    """How much position 0 attends to each in ``layer``, given its input: fp32 ``[B, N]``, mean over heads.

    A key's bias adds the same to every score of a row, which its softmax does not see.
    """
    attention, normed_BNC = layer.self_attn, layer.layer_norm1(x_BNC)
    heads = attention.num_heads
    query_BHK = attention.q_proj(normed_BNC[:, 0]).unflatten(-1, (heads, -1))
    if not isinstance(attention.k_proj, nn.Linear):  # a norm comes behind it
        key_BNHK = attention.k_proj(normed_BNC).unflatten(-1, (heads, -1))
        scores_BHN = torch.einsum("bhk,bnhk->bhn", query_BHK, key_BNHK)
        return (scores_BHN.float() * attention.scale).softmax(-1).mean(1)
    weight_HKC = attention.k_proj.weight.unflatten(0, (heads, -1))
    scores_BHN = torch.einsum("bhk,hkc->bhc", query_BHK, weight_HKC) @ normed_BNC.mT
    return (scores_BHN.float() * attention.scale).softmax(-1).mean(1)


def column_means(layer: Any, x_BNC: Tensor) -> Tensor:
    """How much all positions attend to each in ``layer``: fp32 ``[B, N]``, mean over positions and heads.

    Picture by picture, so that only one ``[H, N, N]`` is held.
    """
    attention, normed_BNC = layer.self_attn, layer.layer_norm1(x_BNC)
    shape = (attention.num_heads, -1)
    query_BHNK = attention.q_proj(normed_BNC).unflatten(-1, shape).transpose(1, 2)
    key_BHNK = attention.k_proj(normed_BNC).unflatten(-1, shape).transpose(1, 2)
    return torch.stack(
        [
            ((query @ key.mT).float() * attention.scale).softmax(-1).mean((0, 1))
            for query, key in zip(query_BHNK, key_BHNK, strict=True)
        ]
    )
