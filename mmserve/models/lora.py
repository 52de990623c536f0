"""LoRA (arXiv 2106.09685) for batches in which each request may have its own adapter.

Rows of one adapter are grouped into tiles of ``TILE`` rows, the items of a batched product whose shape depends only on
the adapter, so that a row's bits do not depend on the batch. Many rows are grouped into tiles of ``WIDE`` rows, if that
was measured to give the same bits. Shapes in names: T rows of a batch, N tiles of M rows, I input size, O output size,
R rank.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE, WIDE = 4, 32
#: Minimum number of rows of an adapter for tiles of ``WIDE`` rows.
_MANY = 16
#: Sites of a decoder's layer, and the linear layers with the same input at each, in order.
SITES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
#: The output layer is a separate site, after those of all layers.
HEAD = "head"


@dataclass(frozen=True, eq=False)
class Site:
    """An adapter's weights at one site: ``x @ a_IR @ b_RO``; the scale is included in ``b_RO``."""

    a_IR: Tensor
    b_RO: Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory. ``key``: its name and a digest of its files, unique to its weights."""

    name: str
    key: str
    rank: int  # maximum over its layers
    layers: tuple[Mapping[str, Site], ...]  # for each of the decoder's layers, and one more for ``HEAD``
    wide: bool = False  # whether products of ``WIDE`` rows give the same bits as those of ``TILE``
    block_length: int = 0  # default of requests with the adapter; 0 = the model's

    @property
    def has_head(self) -> bool:
        """Whether it adapts the output layer."""
        return bool(self.layers[-1])

    @property
    def bytes(self) -> int:
        """Size of its weights in memory."""
        return sum(t.nbytes for layer in self.layers for site in layer.values() for t in (site.a_IR, site.b_RO))


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles of rows whose adapters have the same rank at a site."""

    rows: Tensor  # int64 [N * M]: the row of each place; any row if the place is unused
    places: Tensor  # int64: places that are used
    own: Tensor  # int64: the rows at those places
    adapters: tuple[Adapter, ...]  # one for each tile
    size: int  # M


class Adapted:
    """The adapters of a pass's rows. Rows without an adapter are not modified."""

    def __init__(
        self, counts: Sequence[int], adapters: Sequence[Adapter | None], device: torch.device, stacks: Stacks
    ) -> None:
        """``counts``: numbers of consecutive rows, each with an adapter or None."""
        rows: dict[str, list[int]] = {}
        found: dict[str, Adapter] = {}
        start = 0
        for count, adapter in zip(counts, adapters, strict=True):
            if adapter is not None:
                found[adapter.key] = adapter
                rows.setdefault(adapter.key, []).extend(range(start, start + count))
            start += count
        self._rows = {key: rows[key] for key in sorted(rows)}
        self._adapters, self._device = found, device
        self._tiles: dict[tuple[int, tuple[str, ...]], _Tiles] = {}
        self._stacks = stacks

    def add(self, layer: int, site: str, x_TI: Tensor, outs: Sequence[Tensor]) -> None:
        """Add the adapters' outputs for ``x_TI`` to ``outs``, the outputs ``[T, O]`` of the site's layers, in place.

        Rows whose adapter has no weights at this site are not modified.
        """
        groups: dict[tuple[int, int], list[str]] = {}
        for key, rows in self._rows.items():
            adapter = self._adapters[key]
            weights = adapter.layers[layer].get(site)
            if weights is not None:
                size = WIDE if adapter.wide and len(rows) >= _MANY else TILE
                groups.setdefault((weights.a_IR.shape[1], size), []).append(key)
        for (_rank, size), keys in groups.items():
            tiles = self._tiled(tuple(keys), size)
            a_NIR, b_NRO = self._stacks.of(layer, site, tiles.adapters)
            x_NMI = x_TI.index_select(0, tiles.rows).view(len(tiles.adapters), tiles.size, -1)
            made = torch.bmm(torch.bmm(x_NMI, a_NIR), b_NRO).flatten(0, 1).index_select(0, tiles.places)
            for out, part in zip(outs, made.split([out.shape[-1] for out in outs], -1), strict=True):
                out.index_add_(0, tiles.own, part)

    def _tiled(self, keys: tuple[str, ...], size: int) -> _Tiles:
        mark = (size, keys)
        if mark not in self._tiles:
            rows, places, adapters = list[int](), list[int](), list[Adapter]()
            for key in keys:
                own = self._rows[key]
                places += range(len(rows), len(rows) + len(own))
                rows += own + own[:1] * (-len(own) % size)
                adapters += [self._adapters[key]] * (len(rows) // size - len(adapters))
            rows_at, places_at = (torch.tensor(each, device=self._device) for each in (rows, places))
            self._tiles[mark] = _Tiles(rows_at, places_at, rows_at[places_at], tuple(adapters), size)
        return self._tiles[mark]


def gives_same_bits_wide(layers: Sequence[Mapping[str, Site]]) -> bool:
    """Whether each row of a product of ``WIDE`` rows has the same bits as in one of ``TILE`` rows.

    Measured with weights of each shape: some libraries change the summation order with the number of rows.
    """
    shapes = {(site.a_IR.shape, site.b_RO.shape): site for layer in layers for site in layer.values()}
    generator = torch.Generator().manual_seed(0)
    for site in shapes.values():
        x_MI = torch.randn(WIDE, site.a_IR.shape[0], generator=generator).to(site.a_IR)
        few, many = (
            torch.bmm(torch.bmm(x_MI.view(-1, size, x_MI.shape[1]), a_NIR), b_NRO).flatten(0, 1)
            for size in (TILE, WIDE)
            for a_NIR, b_NRO in [(site.a_IR.expand(WIDE // size, -1, -1), site.b_RO.expand(WIDE // size, -1, -1))]
        )
        if not torch.equal(few, many):
            return False
    return True


class Stacks:
    """A cache of stacked weights of tiles, of at most ``most`` bytes: consecutive decode steps use the same adapters.
    Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self.held, self._lock = most, 0, threading.Lock()
        self._kept: OrderedDict[tuple[int, str, tuple[str, ...]], tuple[Tensor, Tensor]] = OrderedDict()

    def of(self, layer: int, site: str, adapters: tuple[Adapter, ...]) -> tuple[Tensor, Tensor]:
        """The stacked weights ``[N, I, R]`` and ``[N, R, O]`` of the tiles' adapters."""
        key = (layer, site, tuple(adapter.key for adapter in adapters))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        sites = [adapter.layers[layer][site] for adapter in adapters]
        made = torch.stack([s.a_IR for s in sites]), torch.stack([s.b_RO for s in sites])
        size = sum(t.nbytes for t in made)
        with self._lock:
            if size * len(adapters[0].layers) * len(SITES) <= self._most and key not in self._kept:
                self._kept[key] = made
                self.held += size
            while self.held > self._most:
                _key, old = self._kept.popitem(last=False)
                self.held -= sum(t.nbytes for t in old)
        return made

    def clear(self) -> None:
        """Clear the cache, because an adapter was dropped."""
        with self._lock:
            self._kept.clear()
            self.held = 0
