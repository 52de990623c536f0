"""LoRA (arXiv 2106.09685) of requests: each row of a batch adds what its own request's adapter makes of it.

Rows of one adapter are taken ``TILE`` at a time, and a product has a tile as each of its items: its shape depends on
the adapter alone, so a row's bits do not depend on who else is in the batch. Many rows are taken ``WIDE`` at a time,
where that was measured to give the same bits.
Shapes in names: T rows of a batch, N tiles of M rows, I elements before a layer, O after it, R rank.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE, WIDE = 4, 32
#: Fewest rows of an adapter that are taken ``WIDE`` at a time.
_MANY = 16
#: Joint sites of a decoder's layer, and the layers of one input that each of them holds, in their order.
SITES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
#: The output layer is a site of its own, after those of all layers.
HEAD = "head"


@dataclass(frozen=True, eq=False)
class Site:
    """What an adapter adds at one site: ``x @ a_IR @ b_RO``; the scale is in ``b_RO``."""

    a_IR: Tensor
    b_RO: Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory. ``key`` is its name and a digest of its files: nothing else has the same weights."""

    name: str
    key: str
    rank: int  # the highest of its layers'
    layers: tuple[Mapping[str, Site], ...]  # of each of the decoder's layers, and ``HEAD`` in one more
    wide: bool = False  # whether products of ``WIDE`` rows give the bits of those of ``TILE``

    @property
    def has_head(self) -> bool:
        """Whether it changes the output layer."""
        return bool(self.layers[-1])

    @property
    def bytes(self) -> int:
        """Memory of its weights."""
        return sum(t.nbytes for layer in self.layers for site in layer.values() for t in (site.a_IR, site.b_RO))


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles of rows whose adapters have one rank at a site."""

    rows: Tensor  # int64 [N * M]: the row at each place; any row where there is none
    places: Tensor  # int64: places that hold a row
    own: Tensor  # int64: the rows at those places
    adapters: tuple[Adapter, ...]  # of each tile
    size: int  # M


class Adapted:
    """The adapters of a pass's rows. Rows without one are never touched."""

    def __init__(
        self, counts: Sequence[int], adapters: Sequence[Adapter | None], device: torch.device, stacks: Stacks
    ) -> None:
        """``counts`` rows one after another, with an adapter or none each."""
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
        """Add to ``outs`` (``[T, O]`` each, side by side what the site's layers give) what the adapters make of ``x``.

        Where an adapter has nothing at this site, its rows stay as they are.
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
    """Whether each row of a product of ``WIDE`` rows has the bits that it has in one of ``TILE``.

    It is measured on weights of each shape: some libraries add in another order where there are more rows.
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
    """Weights of tiles side by side. Those of the latest passes are kept, ``most`` bytes of them: decode has the same
    adapters step after step. For several threads at once."""

    def __init__(self, most: int) -> None:
        self._most, self.held, self._lock = most, 0, threading.Lock()
        self._kept: OrderedDict[tuple[int, str, tuple[str, ...]], tuple[Tensor, Tensor]] = OrderedDict()

    def of(self, layer: int, site: str, adapters: tuple[Adapter, ...]) -> tuple[Tensor, Tensor]:
        """``[N, I, R]`` and ``[N, R, O]`` of so many tiles' adapters."""
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

    def forget(self) -> None:
        """Keep none of them: an adapter is no longer there."""
        with self._lock:
            self._kept.clear()
            self.held = 0
