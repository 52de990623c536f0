"""One forward pass of a ragged batch: any positions of any requests, through one decoder and one K/V store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack
from mmserve.decode.branched import AttentionSequence, attention_sequences, fork_of
from mmserve.decode.graphs import Graphs
from mmserve.decode.logits import Logits, RowAdapters, by_slices, padded_rows
from mmserve.encode.embedding import deep_rows
from mmserve.kv.on_device import on_device
from mmserve.kv.sparse import Selection, Sparse
from mmserve.kv.store import Fork, KVStore, Observe
from mmserve.models.base import Attention, LoadedModel, ModelSpec, Products
from mmserve.models.decoder import Attend
from mmserve.models.lora import Adapted, Adapter, Stacks
from mmserve.models.moe import MoE
from mmserve.models.packed import FEWEST_ROWS, linears

logger = logging.getLogger("mmserve.decode")

#: Candidates for the row floor (see ``row_floor``), and rows of the batch that they are compared with.
ROW_FLOORS = (1, 2, 4, 8, 16, 32, 64)
PROBE_ROWS = 160
#: The floor of models with operations that are not measured here, and of models for which no candidate passes.
USUAL_FLOOR = 8


@torch.inference_mode()
def row_floor(model: LoadedModel) -> int:
    """The row floor: passes are padded to a multiple of it, so that no row's bits depend on the number of other rows.

    Measured on the decoder's linear layers and routers (see ``floor_of``), and on elementwise operations: on a CPU, the
    elements left over after the last full SIMD vector are computed by other code, so a pass must end with a full
    vector. On a GPU the floor is at least ``USUAL_FLOOR``.
    """
    layers = {(m.in_features, m.out_features): m for m in reversed(linears(model.decoder))}
    routers = [m.router for m in model.decoder.modules() if isinstance(m, MoE)]
    products: list[tuple[int, Callable[[Tensor], Tensor]]] = [(width, layer) for (width, _out), layer in layers.items()]
    products += [(router.weight.shape[1], router.scores) for router in routers[:1]]
    if model.device.type != "cpu":
        return floor_of(products, model.dtype, model.device)
    least = next((f for f in ROW_FLOORS if _whole_vectors(model, f)), USUAL_FLOOR)
    return floor_of(products, model.dtype, model.device, least=least)


def _whole_vectors(model: LoadedModel, floor: int) -> bool:
    """Whether ``floor`` rows of activations and of rotary tables are a multiple of two 64-byte vectors, the unit of
    PyTorch's vectorised loops."""
    c = model.decoder.config
    widths = {c.intermediate_size, c.rotary_width or c.head_dim}
    if c.moe is not None:
        widths |= {c.moe.experts, c.moe.expert_size, c.moe.shared_size}
    return all(floor * width % (2 * 64 // model.dtype.itemsize) == 0 for width in widths)


@torch.inference_mode()
def floor_of(products: Products, dtype: torch.dtype, device: torch.device, *, least: int = USUAL_FLOOR) -> int:
    """The smallest number of rows, at least ``least``, from which a row's result does not depend, bit for bit, on the
    number of other rows.

    For few rows, the CPU's libraries use other kernels with another summation order: plain layers below 4 rows with one
    thread and below 12 with two; packed ones for a single row of more than 1,024 elements. These limits are not
    documented, so the floor is measured with the model's own weights.
    """
    generator = torch.Generator().manual_seed(0)
    for floor in (f for f in ROW_FLOORS if f >= least):
        sizes = (*range(floor, 2 * floor + 8), PROBE_ROWS - 1)
        probes = (torch.randn(PROBE_ROWS, width, generator=generator).to(device, dtype) for width, _product in products)
        if all(_stable(product, sizes, x) for (_width, product), x in zip(products, probes, strict=True)):
            return floor
    logger.warning("on %s the last bits of a result depend on the size of its batch", device)
    return USUAL_FLOOR


def _stable(product: Callable[[Tensor], Tensor], sizes: tuple[int, ...], x: Tensor) -> bool:
    whole = product(x)
    return all(torch.equal(product(x[:size]), whole[:size]) for size in sizes)


@dataclass(frozen=True)
class Watch:
    """Positions of one request for which a recompute policy needs the change of the value vector
    (``value_changes``)."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids of the whole canvas
    embeddings: Tensor  # [N, D]
    positions: np.ndarray  # int64, ascending
    adapter: Adapter | None = None


def value_changes(
    model: LoadedModel,
    store: KVStore,
    batch: list[Watch],
    floor: int,
    *,
    sparse: Sparse | None = None,
    stacks: Stacks | None = None,
) -> list[np.ndarray]:
    """The change of each position's value vector at the second layer from the stored one: 1 - cosine, fp32 ``[n]``
    each.

    Runs the positions through the first layer only. That layer's keys and values depend only on the token and position,
    so the K/V written here are those that any later pass would write.
    """
    if len(model.decoder.layers) < 2:
        return [np.zeros(len(w.positions), np.float32) for w in batch]
    rows = [w.positions for w in batch]
    ragged = store.ragged(
        rows,
        [w.pages for w in batch],
        [w.canvas.size for w in batch],
        prompts=_prompts(model, [w.canvas.prompt_length for w in batch]),
    )
    read = sparse.read(None, rows, ragged) if sparse is not None else None
    count = sum(len(r) for r in rows)
    x, positions = _inputs(model, [(w.canvas, w.embeddings, w.positions) for w in batch], floor)
    adapted = _adapted([(len(w.positions), w.adapter) for w in batch], model, stacks)
    fresh = model.decoder.values_of_second_layer(x, positions, store.attend(ragged, read), adapted)[:count]
    changes = 1 - F.cosine_similarity(fresh.flatten(1).float(), store.values_at(1, ragged).flatten(1).float(), dim=-1)
    return [part.cpu().numpy() for part in changes.split([len(w.positions) for w in batch])]


def _adapted(batch: list[tuple[int, Adapter | None]], model: LoadedModel, stacks: Stacks | None) -> Adapted | None:
    """The adapter weights of a pass; each request of ``batch`` has that number of rows. None if no request has an
    adapter."""
    if all(adapter is None for _rows, adapter in batch):
        return None
    assert stacks is not None, "passes with adapters need the stacked weights"
    return Adapted([rows for rows, _adapter in batch], [adapter for _rows, adapter in batch], model.device, stacks)


def _prompts(model: LoadedModel, lengths: list[int]) -> list[int] | None:
    """``lengths`` if prompts do not attend to later positions; else None."""
    return lengths if model.spec.attention is Attention.PREFIX else None


def _attention_spans(spec: ModelSpec, batch: list[Pass], page_size: int) -> list[np.ndarray] | None:
    """The number of positions that each sequence's rows attend to, if passes set it (``Pass.span``), or for prompts
    with bidirectional attention within images; else None."""
    within = spec.whole_images and any(int(p.rows[0]) < p.canvas.prompt_length for p in batch)
    if not within and not any(p.span for p in batch):
        return None
    found = []
    for p in batch:
        span = spec.attention_spans(p.canvas.tokens[: p.canvas.prompt_length]) if within else None
        for part in _sequences(p, page_size):
            rows = part.rows + p.evicted
            own = np.full(len(rows), p.span) if p.span else rows + 1
            if span is not None and not p.span:
                prompt = rows < len(span)
                own[prompt] = span[rows[prompt]]
            found.append(own)
    return found


class Observation(Protocol):
    """Receives the queries of a request's rows during a pass."""

    def observe(self, layer: int, q_RHK: Tensor, rotated_RHK: Tensor) -> None:
        """Called in each ``layer`` with queries ``[R, H, K]`` before and after rotation; the rows' keys are in the
        store."""
        ...


@dataclass(frozen=True)
class Pass:
    """One request's part of a forward pass."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids of the whole canvas
    embeddings: Tensor  # [N, D]
    rows: np.ndarray  # int64 positions to run, ascending
    targets: np.ndarray  # int64 positions to propose a token for, ascending
    wanted: np.ndarray  # int64 rows whose logits predict the targets: the same, or their left neighbours
    visible: int  # number of leading positions that have K/V after this pass
    deep: DeepStack | None = None
    evicted: int = 0  # evicted positions among those; later ones are stored that many slots further left
    observation: Observation | None = None  # receives the rows' queries
    adapter: Adapter | None = None
    span: int = 0  # leading positions that each row attends to; 0 = set by the model's attention


def _sequences(p: Pass, page_size: int) -> Iterator[AttentionSequence]:
    """A request's rows, split into sequences for attention."""
    if p.canvas.branches is None:
        yield AttentionSequence(p.rows - p.evicted, p.pages, p.visible - p.evicted, p.canvas.prompt_length)
    else:
        yield from attention_sequences(p.canvas.branches, p.rows, p.pages, p.visible, page_size)


def _forks(p: Pass, page_size: int) -> Iterator[Fork]:
    """K/V copies to the pages of a request's branches that the pass needs."""
    branches = p.canvas.branches
    if branches is not None and branches.copied and len(p.targets):
        yield fork_of(branches, p.pages, page_size)


def forward(
    model: LoadedModel,
    store: KVStore,
    batch: list[Pass],
    floor: int,
    *,
    sparse: Sparse | None = None,
    selection: Selection | None = None,
    graphs: Graphs | None = None,
    between: Callable[[], None] | None = None,
    stacks: Stacks | None = None,
    written: Callable[[int], None] | None = None,
) -> list[Logits]:
    """The logits of each request's wanted rows, computed when they are read; writes the K/V of all rows to the store.

    Batches are padded to a multiple of ``floor`` rows (see ``row_floor``): the elements left over after the last full
    vector, for example in SiLU, are computed by other code with other last bits. ``sparse``: rows attend to the
    positions that the ``selection`` of a stage chooses. ``graphs``: the pass is run as a CUDA graph if possible.
    ``between``: called in each layer of other passes, so that passes of other requests can be interleaved. ``written``:
    called after each layer's attention with the number of layers whose K/V are in the store.
    """
    parts = [part for p in batch for part in _sequences(p, store.page_size)]
    rows = [part.rows for part in parts]
    layout = store.layout(
        rows,
        [part.pages for part in parts],
        [part.visible for part in parts],
        block=model.spec.attention_block,
        prompts=_prompts(model, [part.prompt for part in parts]),
        spans=_attention_spans(model.spec, batch, store.page_size),
        whole=[selection is not None or part.together for part in parts],
        shared=[part.shared for part in parts],
    )
    fewest = model.decoder.fewest_rows if graphs is None else FEWEST_ROWS
    x, positions = _inputs(model, [(p.canvas, p.embeddings, p.rows) for p in batch], floor, fewest)
    observe, deep = _observer(batch), deep_rows((p.rows, p.deep) for p in batch)
    adapted = _adapted([(len(p.rows), p.adapter) for p in batch], model, stacks)
    forks = [fork for p in batch for fork in _forks(p, store.page_size)]
    plain = sparse is None and observe is None and deep is None and adapted is None
    plain = plain and layout.window_end is None and layout.cascade is None and not forks
    hidden = graphs.run(x, positions, layout) if graphs is not None and plain else None
    if hidden is None:
        ragged = store.placed(layout)
        stored, count = store.stored(ragged) if plain and written is None else None, len(layout.slots)
        if stored is not None:
            hidden = model.decoder.hidden_rows(x[:count], positions[..., :count], stored, between)
        if hidden is None:
            read = sparse.read(selection, rows, ragged) if sparse is not None else None
            read = store.cascaded(layout) if read is None else read
            attend = _with_callbacks(store.attend(ragged, read, observe, forks), between, written)
            hidden = model.decoder(x, positions, attend, deep, adapted)
    wanted = _wanted_rows(batch)
    chosen = hidden[on_device(_padded(np.concatenate(wanted), floor, model.decoder.fewest_rows), model.device)]
    adapters = _head_adapters([(len(w), p.adapter) for w, p in zip(wanted, batch, strict=True)], model, stacks)
    return by_slices(model.decoder, chosen, [len(w) for w in wanted], floor, adapters)


def _wanted_rows(batch: list[Pass]) -> list[np.ndarray]:
    """The wanted rows of each request (int64), as indices of the rows of the whole batch."""
    offset, wanted = 0, []
    for p in batch:
        if p.wanted is p.rows:
            found = np.arange(len(p.rows))
        else:
            found = np.searchsorted(p.rows, p.wanted)
            if not np.array_equal(p.rows[np.minimum(found, len(p.rows) - 1)], p.wanted):
                raise ValueError("logits are wanted of rows that are not run")
        wanted.append(offset + found)
        offset += len(p.rows)
    return wanted


def _head_adapters(
    batch: list[tuple[int, Adapter | None]], model: LoadedModel, stacks: Stacks | None
) -> RowAdapters | None:
    """The adapters of the output layer for each request's wanted rows; None if there are none."""
    if not any(adapter is not None and adapter.has_head for _rows, adapter in batch):
        return None
    assert stacks is not None, "passes with adapters need the stacked weights"
    of_rows = [adapter for rows, adapter in batch for _ in range(rows)]
    return RowAdapters(of_rows, model.device, stacks)


def _inputs(
    model: LoadedModel, batch: list[tuple[Canvas, Tensor, np.ndarray]], floor: int, fewest: int = FEWEST_ROWS
) -> tuple[Tensor, Tensor]:
    """Embeddings and rotary positions of the rows to run; the last row is repeated up to a multiple of ``floor`` rows,
    at least ``fewest``.

    If the model has several position axes, a position with a single number has that number on each axis.
    """
    axes = model.position_axes
    found = [canvas.rotary_positions(rows) for canvas, _embeddings, rows in batch]
    if axes > 1:
        found = [np.broadcast_to(places, (axes, places.shape[-1])) for places in found]
    positions = on_device(_padded(np.concatenate(found, axis=-1), floor, fewest), model.device)
    parts = _rows_of([(embeddings, rows) for _canvas, embeddings, rows in batch])
    short = positions.shape[-1] - sum(len(rows) for _canvas, _embeddings, rows in batch)
    if short:
        last = next(part for part in reversed(parts) if len(part))[-1:]
        parts.append(last.expand(short, -1))
    return torch.cat(parts), positions


def _rows_of(batch: list[tuple[Tensor, np.ndarray]]) -> list[Tensor]:
    """Embeddings ``[n, D]`` of the rows of each request: a view where there is only one row. The other indices are
    copied to the device together."""
    counts = [len(rows) for _embeddings, rows in batch if len(rows) != 1]
    indices = iter(())
    if counts:
        together = np.concatenate([rows for _embeddings, rows in batch if len(rows) != 1])
        indices = iter(on_device(together, batch[0][0].device).split(counts))
    return [e[next(indices)] if len(rows) != 1 else e.narrow(0, int(rows[0]), 1) for e, rows in batch]


def _padded(rows: np.ndarray, floor: int, fewest: int) -> np.ndarray:
    """``rows [..., n]`` with the last one repeated up to the number of rows that a product of ``n`` has
    (``padded_rows``)."""
    short = padded_rows(rows.shape[-1], floor, fewest) - rows.shape[-1]
    return np.concatenate([rows, np.repeat(rows[..., -1:], short, axis=-1)], axis=-1) if short else rows


def _with_callbacks(
    attend: Attend, between: Callable[[], None] | None, written: Callable[[int], None] | None
) -> Attend:
    """``attend``, with the callbacks of ``forward`` in each layer: ``between`` before it, ``written`` after it."""
    if between is None and written is None:
        return attend

    def called(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if between is not None:
            between()
        rows = attend(layer, q, k, v, cos, sin)
        if written is not None:
            written(layer + 1)
        return rows

    return called


def _observer(batch: list[Pass]) -> Observe | None:
    """Passes each request's own rows to its observation; None if no request has one."""
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
            observation.observe(layer, q[own], rotated[own])

    return observe
