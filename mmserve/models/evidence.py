"""Evidence for pruners: attention, keys and features of vision towers.

transformers' towers return no attention with SDPA. It is computed from the queries and keys of the tower's own run,
recorded by hooks, so that nothing is projected twice. Shapes in names: B images, N positions, H heads, K head size, C =
H * K.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmserve.models.scores import mean_attention
from mmserve.prune.base import Evidence

#: Kinds of evidence that a tower without a class token provides, and those that need one.
OF_PATCHES = frozenset({Evidence.COLUMN_MEANS, Evidence.KEYS, Evidence.FIRST_FEATURES})
OF_CLASS = frozenset({Evidence.CLS_ROW, Evidence.FIRST_CLS_ROW, Evidence.LAST_CLS_ROW})
#: Maximum number of query-key products in memory: images are processed in groups.
_SLICE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class AttentionModules:
    """The modules of a tower's layer that compute its ``queries`` and ``keys``, ``[B, N, C]``, and its heads."""

    queries: nn.Module
    keys: nn.Module
    heads: int
    scale: float


def layers_of(tower: nn.Module) -> list[AttentionModules]:
    """The layers of a CLIP-style tower."""
    layers: Any = tower.get_submodule("encoder.layers")
    return shown_layers(layers)


def shown_layers(layers: Iterable[nn.Module]) -> list[AttentionModules]:
    """Layers of a CLIP-style tower as ``AttentionModules``."""
    found: list[Any] = [layer.self_attn for layer in layers]
    return [AttentionModules(a.q_proj, a.k_proj, a.num_heads, a.scale) for a in found]


class Watched:
    """The evidence recorded in one run of a tower.

    ``later``: layers of a CLIP-style tower after those that run, needed for ``LAST_CLS_ROW`` only.
    """

    def __init__(
        self,
        layers: Sequence[AttentionModules],
        selected: int,
        wanted: frozenset[Evidence],
        *,
        later: Sequence[nn.Module] = (),
    ) -> None:
        scored = layers[max(0, len(layers) + selected)]  # made those features; for the embeddings, the first
        where = {Evidence.FIRST_CLS_ROW: layers[0], Evidence.LAST_CLS_ROW: layers[-1]}
        self._layers = {kind: where.get(kind, scored) for kind in wanted}
        self._later = later if Evidence.LAST_CLS_ROW in wanted else ()
        if self._later:
            del self._layers[Evidence.LAST_CLS_ROW]
        self._made: dict[nn.Module, Tensor] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for the tower's run in this thread; runs of other threads are not recorded."""
        me = threading.get_ident()

        def note(module: nn.Module, _arguments: Any, made: Tensor) -> None:
            if threading.get_ident() == me:
                self._made[module] = made

        hooks = [module.register_forward_hook(note) for module in self._asked()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _asked(self) -> set[nn.Module]:
        unqueried = {Evidence.KEYS, Evidence.FIRST_FEATURES}
        keyed = {layer for kind, layer in self._layers.items() if kind is not Evidence.FIRST_FEATURES}
        queried = {layer for kind, layer in self._layers.items() if kind not in unqueried}
        return {layer.keys for layer in keyed} | {layer.queries for layer in queried}

    def evidence(self, hidden: Sequence[Tensor], *, first: int) -> dict[Evidence, Tensor]:
        """The requested evidence, ``[B, patches]``, ``[B, patches, K]`` (keys) or ``[B, patches, C]`` (features), fp32.

        ``hidden``: the tower's hidden states ``[B, N, C]``, from the embeddings on; ``first``: index of the first
        patch, 1 after a class token.
        """
        found: dict[Evidence, Tensor] = {}
        for kind, layer in self._layers.items():
            match kind:
                case Evidence.CLS_ROW | Evidence.FIRST_CLS_ROW | Evidence.LAST_CLS_ROW:
                    found[kind] = class_row(layer, *self._queries_and_keys(layer))[:, first:]
                case Evidence.COLUMN_MEANS:
                    found[kind] = column_means(layer, *self._queries_and_keys(layer))[:, first:]
                case Evidence.KEYS:
                    found[kind] = mean_keys(self._made[layer.keys][:, first:], layer.heads)
                case Evidence.FIRST_FEATURES:
                    found[kind] = hidden[1][:, first:].float()
        if self._later:
            found[Evidence.LAST_CLS_ROW] = self._last_row(hidden[-1])[:, first:]
        return found

    def _last_row(self, x_BNC: Tensor) -> Tensor:
        """The class token's attention in the last of the ``later`` layers, given the output of the layers that ran."""
        *between, last = self._later
        for layer in between:
            x_BNC = layer(x_BNC, None)
        [shown] = shown_layers([last])
        x_BNC = last.get_submodule("layer_norm1")(x_BNC)
        return class_row(shown, shown.queries(x_BNC), shown.keys(x_BNC))

    def _queries_and_keys(self, layer: AttentionModules) -> tuple[Tensor, Tensor]:
        return self._made[layer.queries], self._made[layer.keys]


def mean_keys(keys_BNC: Tensor, heads: int) -> Tensor:
    """Keys averaged over ``heads``, as compared by ToMe and VisionZip: fp32 ``[B, N, K]``."""
    return keys_BNC.unflatten(-1, (heads, -1)).float().mean(-2)


def class_row(layer: AttentionModules, q_BNC: Tensor, k_BNC: Tensor) -> Tensor:
    """Attention of position 0 to each position, from a layer's queries and keys: fp32 ``[B, N]``, mean over heads."""
    at_once = max(1, _SLICE_ELEMENTS // k_BNC[0].numel())
    rows = []
    for query_B1C, keys_BNC in zip(q_BNC[:, :1].split(at_once), k_BNC.split(at_once), strict=True):
        # elementwise sums: matrix products per head would have to copy the keys first
        products_BNC = keys_BNC * (query_B1C.float() * layer.scale)
        rows.append(products_BNC.unflatten(-1, (layer.heads, -1)).sum(-1).softmax(1).mean(-1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def column_means(layer: AttentionModules, q_BNC: Tensor, k_BNC: Tensor) -> Tensor:
    """Attention to each position, from a layer's queries and keys: fp32 ``[B, N]``, mean over positions and heads."""
    pictures, count, width = k_BNC.shape
    q_THK, k_THK = (x.flatten(0, 1).unflatten(-1, (layer.heads, -1)) for x in (q_BNC, k_BNC))
    usual = (width // layer.heads) ** -0.5
    if layer.scale != usual:
        q_THK = q_THK * (layer.scale / usual)
    return mean_attention(q_THK, k_THK, [count] * pictures, [count] * pictures).view(pictures, count)
