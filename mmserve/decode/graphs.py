"""Decode passes as CUDA graphs: a pass is captured once for each batch size, and replayed on the same buffers.

A step of few rows launches hundreds of small kernels; a graph launches them at once. A pass is padded to a ``Bucket``:
rows to the next power of two, requests and their pages to the next power of four; padding costs almost nothing. Padding
rows write to the store's scratch page, attend to nothing, and their results are discarded; buffers keep nothing of an
earlier pass.

As without graphs, a request's result does not depend on its batch. Attention uses only a row's own query, limit and
request, and other operations of a layer are independent for each row. Only the number of rows of a matrix product is
that of the bucket; on a GPU that can change last bits.

Captured work must not synchronise with the host. Work that does, or that runs on the host, is done outside of the
graph: attention metadata (``fixed_schedule`` computes them on the device), rotary angles (the axes of M-RoPE's
frequencies are on the host), and the selection of rows whose logits are wanted. These are never captured: experts,
which run a variable number of rows; sparse attention and quantised K/V, which read on the host which pages a pass
writes (``obstacle``); passes with deep features or an observer; prefill, whose sizes seldom repeat.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from mmserve_kernels.cached_attention import FixedBatch
from torch import Tensor

from mmserve.kv.layout import Layout
from mmserve.kv.on_device import on_device
from mmserve.kv.pool import pages_for
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel

logger = logging.getLogger("mmserve.decode")

#: Most rows of a captured pass: with more, compute time should exceed launch time. Not measured yet.
MOST_ROWS = 512
#: Number of graphs kept for each model, in LRU order.
MOST_GRAPHS = 64

#: A process can capture only one graph at a time, for all its models.
_CAPTURE_LOCK = threading.Lock()

Run = Callable[[], Tensor]
#: Captures what a run launches. The returned callable replays it, with the output in the same buffer.
Capture = Callable[[Run], Run]


@dataclass(frozen=True)
class Bucket:
    """A padded batch size: rows, requests, and pages of each request."""

    rows: int
    requests: int
    pages: int

    @classmethod
    def of(cls, rows: int, layout: Layout, page_size: int) -> Bucket:
        """The smallest bucket for a pass of ``rows`` rows."""
        pages = pages_for(max(layout.kv_lengths), page_size)
        return cls(_power(2, rows), _power(4, len(layout.row_counts)), _power(4, pages))


def _power(base: int, least: int) -> int:
    """The lowest power of ``base`` (2 or 4) that is at least ``least``."""
    bits = base.bit_length() - 1
    return 1 << -(-(least - 1).bit_length() // bits) * bits


def obstacle(model: LoadedModel, store: KVStore, setting: str, sparse: Sparse | None) -> str:
    """The reason why decode steps of ``model`` are never captured; empty if they are.

    ``setting``: ``cuda_graphs`` of the engine's configuration.
    """
    if setting == "off":
        return "[engine] cuda_graphs is 'off'"
    if store.device.type != "cuda":
        return f"they need a CUDA device, and the device is {store.device.type}"
    if isinstance(store, QuantizedStore):
        return "K/V is quantised (kv_bits)"
    if sparse is not None:
        return "attention is sparse (sparse_*)"
    if model.decoder.config.moe is not None:
        return "the number of rows routed to each expert varies (mixture of experts)"
    slow = [op for op in ("cached_attention", "rope_scatter") if store.kernels[op] != "triton"]
    return f"{slow[0]} runs as {store.kernels[slow[0]]}" if slow else ""


def graphs_for(model: LoadedModel, store: KVStore, setting: str, sparse: Sparse | None = None) -> Graphs | None:
    """The graphs of a model's decode steps; None if there is an ``obstacle``. Logs the choice and writes it to
    ``store.kernels["decode_step"]``."""
    reason = obstacle(model, store, setting, sparse)
    store.kernels["decode_step"] = "eager" if reason else "cuda_graphs"
    if reason:
        logger.info("%s: decode steps do not use CUDA graphs: %s", model.spec.name, reason)
        return None
    logger.info("%s: decode steps of up to %d rows run as CUDA graphs", model.spec.name, MOST_ROWS)
    return Graphs(model, store, CudaCapture(store.device))


class Graphs:
    """The captured passes of one model over one store; not thread-safe."""

    def __init__(self, model: LoadedModel, store: KVStore, capture: Capture) -> None:
        self._model, self._store, self._capture = model, store, capture
        self._graphs: OrderedDict[Bucket, tuple[_Buffers, Run]] = OrderedDict()  # most recently used last
        self._refused: set[Bucket] = set()  # buckets whose capture failed
        self.runs = 0  # number of passes that were replayed

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The captured buckets, most recently used last."""
        return tuple(self._graphs)

    @property
    def failures(self) -> int:
        """Number of buckets whose capture failed: their passes run without a graph."""
        return len(self._refused)

    @torch.inference_mode()
    def run(self, x_TD: Tensor, positions: Tensor, layout: Layout) -> Tensor | None:
        """Final hidden states of a pass, with padding rows at the end; None if the pass is not captured.

        ``x_TD``: embeddings, padded to the ``row_floor``; ``positions`` as in ``Decoder.forward``; ``layout``: of the
        rows without padding. The result is overwritten by the next run.
        """
        if len(x_TD) > MOST_ROWS or not x_TD.numel():
            return None
        graph = self._graph(Bucket.of(len(x_TD), layout, self._store.page_size))
        if graph is None:
            return None
        buffers, replay = graph
        buffers.fill(layout, x_TD, *self._model.decoder.rotary(positions))
        self.runs += 1
        return replay()

    def _graph(self, wanted: Bucket) -> tuple[_Buffers, Run] | None:
        """The graph of a bucket, captured on the first use with a batch of padding, so that no request's K/V is
        written."""
        if wanted in self._graphs:
            self._graphs.move_to_end(wanted)
            return self._graphs[wanted]
        if wanted in self._refused:
            return None
        decoder, store = self._model.decoder, self._store
        try:
            buffers = _Buffers(wanted, self._model, store)

            def run() -> Tensor:
                return decoder.hidden(buffers.x_TD, buffers.cos, buffers.sin, store.attend(buffers.batch()))

            self._graphs[wanted] = buffers, self._capture(run)
        except RuntimeError as error:  # out of memory, a driver error, or a model that synchronises: continue without
            self._refused.add(wanted)
            logger.warning(
                "the decode step of %s cannot be captured and runs without a graph (failed captures: %d): %s",
                wanted,
                self.failures,
                str(error).partition("\n")[0],
                exc_info=self.failures == 1,  # other buckets most likely fail for the same reason
            )
            store.kernels["decode_step"] = "cuda_graphs" if self._graphs else "eager"
            return None
        store.kernels["decode_step"] = "cuda_graphs"
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        logger.info("captured the decode step of up to %s: graph %d", wanted, len(self._graphs))
        return self._graphs[wanted]


class _Buffers:
    """The inputs of a captured pass: everything but weights and the store. Initialised as a batch of padding."""

    def __init__(self, bucket: Bucket, model: LoadedModel, store: KVStore) -> None:
        rows, requests, pages = bucket.rows, bucket.requests, bucket.pages
        self._bucket, self._page_size = bucket, store.page_size
        self._scratch = store.scratch
        device, width = store.device, model.decoder.config.hidden_size
        # All integer inputs are views of one tensor, so that they need only one copy from the host.
        self._sizes = (requests, requests, rows, rows, requests * pages)
        self._blank = np.zeros(sum(self._sizes), np.int64)
        _counts, _lengths, slots, _limits, table = self._split(self._blank)
        slots[:] = store.scratch * store.page_size + np.arange(rows) % store.page_size
        table[:] = store.scratch
        self._ints = torch.from_numpy(self._blank.copy()).to(device)
        self.x_TD = torch.zeros(rows, width, dtype=model.dtype, device=device)
        places = torch.zeros(model.position_axes, rows, dtype=torch.int64, device=device)
        self.cos, self.sin = model.decoder.rotary(places if model.position_axes > 1 else places[0])

    def batch(self) -> FixedBatch:
        """The batch over these buffers; a new object for each run."""
        counts, lengths, slots, limits, table = self._ints.split(self._sizes)
        return FixedBatch(counts, lengths, table.view(self._bucket.requests, self._bucket.pages), slots, limits)

    def fill(self, layout: Layout, x_TD: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Copy a pass into the buffers, and fill the rest with padding."""
        host = self._blank.copy()
        counts, lengths, slots, limits, table = self._split(host)
        requests, rows = len(layout.row_counts), len(layout.slots)
        counts[:requests], lengths[:requests], slots[:rows] = layout.row_counts, layout.kv_lengths, layout.slots
        seen = layout.kv_limit
        limits[:rows] = np.repeat(layout.kv_lengths, layout.row_counts) if seen is None else seen
        tables = table.reshape(self._bucket.requests, self._bucket.pages)
        for row, pages, length in zip(tables, layout.page_tables, layout.kv_lengths, strict=False):
            count = pages_for(length, self._page_size)
            row[:count] = pages[:count]
        self._ints.copy_(on_device(host, self._ints.device))
        for buffer, fresh in ((self.x_TD, x_TD), (self.cos, cos), (self.sin, sin)):
            buffer[: len(fresh)].copy_(fresh)
            buffer[len(fresh) :].zero_()

    def _split(self, ints: np.ndarray) -> list[np.ndarray]:
        return np.split(ints, np.cumsum(self._sizes)[:-1])


class CudaCapture:
    """Captures on a GPU. All graphs share one memory pool: only one runs at a time, and its output is read before the
    next.

    All captures use one stream: graphs can share memory only on the same stream, and each stream that runs a matrix
    product keeps a workspace (32 MiB on an H100) permanently.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """Raises ``RuntimeError`` if ``run`` cannot be captured; earlier graphs remain valid."""
        with _CAPTURE_LOCK, torch.cuda.device(self._device):
            here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            try:
                self._stream.wait_stream(here)
                with torch.cuda.stream(self._stream):
                    run()  # compiles kernels and allocates library workspaces before capture
                self._stream.synchronize()
                # Other stages' threads can allocate and synchronise meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = run()
            except RuntimeError:
                self._abandon()
                raise
            finally:
                torch.cuda.set_stream(here)  # a failed capture leaves the thread on the capture stream

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _abandon(self) -> None:
        """Reset after a failed capture: its pool cannot be used again, although earlier graphs still hold it.

        PyTorch before 2.12 leaves the allocator in capture mode (pytorch/pytorch#180395), in which it neither frees
        cached memory nor starts another capture. Ending that mode raises an error in versions where it has ended
        already.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device_index(), self._pool)
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)

    def _device_index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index
