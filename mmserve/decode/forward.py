"""One forward pass of a ragged batch: any positions of any requests, through one decoder and one K/V store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.core.canvas import Canvas
from mmserve.decode.logits import Logits, by_slices
from mmserve.decode.state import Encoded
from mmserve.kv.reducer import Observation
from mmserve.kv.store import KVStore, Observe
from mmserve.models.base import LoadedModel, Products

logger = logging.getLogger("mmserve.decode")

#: Candidates for the smallest number of rows of a matrix product, and rows of the batch they are compared with.
ROW_FLOORS = (8, 16, 32, 64)
PROBE_ROWS = 160


def row_floor(model: LoadedModel) -> int:
    """The ``floor_of`` the decoder's linear layers."""
    modules = [m for m in model.decoder.modules() if isinstance(m, nn.Linear)]
    return floor_of({(m.in_features, m.out_features): m for m in reversed(modules)}, model.dtype, model.device)


@torch.inference_mode()
def floor_of(products: Products, dtype: torch.dtype, device: torch.device) -> int:
    """The number of rows from which on a row's result no longer depends, bit for bit, on how many are beside it.

    For few rows the CPU's libraries switch to other kernels that add in another order: with one thread below 4 rows,
    with two below 12. That is not for this project to guess, so it is measured on the model's own weights.
    """
    generator = torch.Generator().manual_seed(0)
    for floor in ROW_FLOORS:
        sizes = (*range(floor, 2 * floor + 8), PROBE_ROWS - 1)
        probes = (torch.randn(PROBE_ROWS, width, generator=generator).to(device, dtype) for width, _out in products)
        if all(_stable(product, sizes, x) for product, x in zip(products.values(), probes, strict=True)):
            return floor
    logger.warning("on %s the last bits of a result depend on the size of its batch", device)
    return ROW_FLOORS[0]


def _stable(product: Callable[[Tensor], Tensor], sizes: tuple[int, ...], x: Tensor) -> bool:
    whole = product(x)
    return all(torch.equal(product(x[:size]), whole[:size]) for size in sizes)


def embedded(model: LoadedModel, ids: np.ndarray, encoded: Encoded) -> Tensor:
    """Embeddings ``[N, D]`` of ``ids`` (int64 ``[N]``), the encoded prompt and what follows it."""
    ids = ids.copy()
    ids[encoded.image_rows] = model.spec.mask_id  # a placeholder may have no embedding: features take its place
    embeddings: Tensor = model.decoder.embed(torch.from_numpy(ids).to(model.device))
    if encoded.features is not None:
        embeddings[torch.from_numpy(encoded.image_rows).to(model.device)] = encoded.features
    return embeddings


@dataclass(frozen=True)
class Watch:
    """Positions of one request of which a policy asks how far they have moved."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids of the whole canvas
    embeddings: Tensor  # [N, D]
    positions: np.ndarray  # int64, ascending


def value_changes(model: LoadedModel, store: KVStore, batch: list[Watch], floor: int) -> list[np.ndarray]:
    """How far each position's value vector at the second layer is from the stored one: 1 - cosine, fp32 ``[n]`` each.

    Runs the positions through the first layer only. Its keys and values depend on nothing but the token, so those
    written here are those that any later pass would write.
    """
    if len(model.decoder.layers) < 2:
        return [np.zeros(len(w.positions), np.float32) for w in batch]
    ragged = store.ragged([w.positions for w in batch], [w.pages for w in batch], [w.canvas.size for w in batch])
    places = [w.canvas.rotary_positions(w.positions) for w in batch]
    positions = torch.from_numpy(np.concatenate(places)).to(model.device)
    x = torch.cat([w.embeddings[torch.from_numpy(w.positions).to(model.device)] for w in batch])
    count = len(x)
    short = -count % floor
    x, positions = F.pad(x, (0, 0, 0, short)), F.pad(positions, (0, short))
    fresh = model.decoder.values_of_second_layer(x, positions, store.attend(ragged))[:count]
    changes = 1 - F.cosine_similarity(fresh.flatten(1).float(), store.values_at(1, ragged).flatten(1).float(), dim=-1)
    return [part.cpu().numpy() for part in changes.split([len(w.positions) for w in batch])]


@dataclass(frozen=True)
class Pass:
    """One request's part of a forward pass."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids of the whole canvas
    embeddings: Tensor  # [N, D]
    rows: np.ndarray  # int64 positions to run, ascending
    targets: np.ndarray  # int64 positions to propose a token for, ascending
    wanted: np.ndarray  # int64 rows whose logits tell of the targets: the same, or those left of them
    visible: int  # positions, from the left, that have had K/V once this pass has run
    evicted: int = 0  # of those, before the rows, that were dropped: what follows lies so far further left
    observation: Observation | None = None  # of what it shows, for reductions of K/V


def forward(model: LoadedModel, store: KVStore, batch: list[Pass], floor: int) -> list[Logits]:
    """Logits of each request's wanted rows, made when they are read; K/V of all rows run is written to the store.

    Batches are padded to a multiple of ``floor`` rows (see ``row_floor``): what is left over when a tensor's elements
    are taken some at a time, such as in SiLU, is computed by other code, with other last bits.
    """
    ragged = store.ragged(
        [p.rows - p.evicted for p in batch],
        [p.pages for p in batch],
        [p.visible - p.evicted for p in batch],
        block=model.spec.attention_block,
    )
    places = [p.canvas.rotary_positions(p.rows) for p in batch]
    positions = torch.from_numpy(np.concatenate(places)).to(model.device)
    x = torch.cat([p.embeddings[torch.from_numpy(p.rows).to(model.device)] for p in batch])
    short = -len(x) % floor
    x, positions = F.pad(x, (0, 0, 0, short)), F.pad(positions, (0, short))
    hidden = model.decoder(x, positions, store.attend(ragged, _observer(batch)))
    offset, wanted = 0, []
    for p in batch:
        found = np.searchsorted(p.rows, p.wanted)
        if not np.array_equal(p.rows[np.minimum(found, len(p.rows) - 1)], p.wanted):
            raise ValueError("logits are wanted of rows that are not run")
        wanted.append(offset + found)
        offset += len(p.rows)
    chosen = hidden[torch.from_numpy(np.concatenate(wanted)).to(model.device)]
    return by_slices(model.decoder, chosen, [len(w) for w in wanted], floor)


def _observer(batch: list[Pass]) -> Observe | None:
    """What shows each request that asks for it its own rows; None where none does."""
    ends = np.cumsum([len(p.rows) for p in batch]).tolist()
    watching = [
        (slice(end - len(p.rows), end), p.observation)
        for end, p in zip(ends, batch, strict=True)
        if p.observation is not None
    ]
    if not watching:
        return None

    def observe(layer: int, q: Tensor, rotated: Tensor) -> None:
        for own, observation in watching:
            observation.see(layer, q[own], rotated[own])

    return observe
