"""The decode step as CUDA graphs: a pass recorded once for a size of batch, and run again over the same buffers.

A step of few rows launches hundreds of small kernels, one after another; a graph launches them at once. A pass is
padded to a ``Bucket``, the next power of two of its rows, and of four of its requests and their pages, which cost next
to nothing. Rows that pad it write to the store's scratch page, see nothing and are thrown away; nothing of an earlier
pass is left in the buffers.

A request's result depends on its batch no more than without graphs, by construction. Attention takes a row's own query,
limit and request, and what else is in a layer works on each row by itself. Only how many rows a matrix product has is
the bucket's, as it is the batch's in an ordinary pass: on a GPU that may move last bits.

Recorded work must ask the device nothing, since the host only looks on while it is recorded. What did ask, or was made
on the host, is outside: the programs of attention (``fixed_schedule`` makes them on the device), rotary angles (the
axes of M-RoPE's frequencies come from the host), the rows whose logits are wanted. What cannot be outside is not
recorded: experts, which run the rows routed to them, sparse attention and quantised K/V, which ask which pages a
pass writes (``obstacle``); passes with deep features or with an observer; prefill, whose sizes are seldom the same.
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

#: Rows of the largest pass that is recorded: with more, arithmetic should take longer than launches. Not measured yet.
MOST_ROWS = 512
#: Graphs of one model that are kept: those used last.
MOST_GRAPHS = 64

#: A process can make one recording at a time, whatever its models.
_RECORDING = threading.Lock()

Run = Callable[[], Tensor]
#: Records what a run launches: calling what it returns does that again, with the output in the same place.
Capture = Callable[[Run], Run]


@dataclass(frozen=True)
class Bucket:
    """A size of batch: as many rows, requests, and pages of each of them."""

    rows: int
    requests: int
    pages: int

    @classmethod
    def of(cls, rows: int, layout: Layout, page_size: int) -> Bucket:
        """The smallest one for a pass of so many ``rows``."""
        pages = pages_for(max(layout.kv_lengths), page_size)
        return cls(_power(2, rows), _power(4, len(layout.row_counts)), _power(4, pages))


def _power(base: int, least: int) -> int:
    """The lowest power of ``base`` (2 or 4) that is at least so much."""
    bits = base.bit_length() - 1
    return 1 << -(-(least - 1).bit_length() // bits) * bits


def obstacle(model: LoadedModel, store: KVStore, setting: str, sparse: Sparse | None) -> str:
    """Why decode steps of ``model`` are not recorded, whatever is in them; empty = they are.

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
        return "how many rows are routed to an expert is not known before"
    slow = [op for op in ("cached_attention", "rope_scatter") if store.kernels[op] != "triton"]
    return f"{slow[0]} runs as {store.kernels[slow[0]]}" if slow else ""


def graphs_for(model: LoadedModel, store: KVStore, setting: str, sparse: Sparse | None = None) -> Graphs | None:
    """The graphs of a model's decode steps, None where there is an ``obstacle``; the log and ``store.kernels`` (as
    ``decode_step``) select which."""
    reason = obstacle(model, store, setting, sparse)
    store.kernels["decode_step"] = "eager" if reason else "cuda_graphs"
    if reason:
        logger.info("%s: decode steps do not use CUDA graphs: %s", model.spec.name, reason)
        return None
    logger.info("%s: decode steps of up to %d rows run as CUDA graphs", model.spec.name, MOST_ROWS)
    return Graphs(model, store, CudaCapture(store.device))


class Graphs:
    """The recorded passes of one model over one store. Not for several threads at once."""

    def __init__(self, model: LoadedModel, store: KVStore, capture: Capture) -> None:
        self._model, self._store, self._capture = model, store, capture
        self._graphs: OrderedDict[Bucket, tuple[_Buffers, Run]] = OrderedDict()  # the one used last at the end
        self._refused: set[Bucket] = set()  # those that could not be recorded
        self.runs = 0  # passes that were run so

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Those that there are graphs of, the one used last at the end."""
        return tuple(self._graphs)

    @property
    def failures(self) -> int:
        """Sizes of batch that could not be recorded: their passes run as ever."""
        return len(self._refused)

    @torch.inference_mode()
    def run(self, x_TD: Tensor, positions: Tensor, layout: Layout) -> Tensor | None:
        """Final hidden states of a pass, of more rows than it has: the rest is nothing. None = it is not recorded.

        ``x_TD``: embeddings, padded to the ``row_floor``; ``positions`` as of ``Decoder.forward``, ``layout`` of the
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
        """Recorded if need be: over empty buffers, so that no request's K/V is touched by that."""
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
        except RuntimeError as error:  # no memory, the driver, or a model that does ask: it can still be served
            self._refused.add(wanted)
            logger.warning(
                "the decode step of %s cannot be recorded and runs as ever (size %d of which this is so): %s",
                wanted,
                self.failures,
                str(error).partition("\n")[0],
                exc_info=self.failures == 1,  # the others' are most likely the same
            )
            store.kernels["decode_step"] = "cuda_graphs" if self._graphs else "eager"
            return None
        store.kernels["decode_step"] = "cuda_graphs"
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        logger.info("recorded the decode step of up to %s: graph %d", wanted, len(self._graphs))
        return self._graphs[wanted]


class _Buffers:
    """What a recorded pass reads: everything that is not a weight or in the store. Begins as a batch of padding."""

    def __init__(self, bucket: Bucket, model: LoadedModel, store: KVStore) -> None:
        rows, requests, pages = bucket.rows, bucket.requests, bucket.pages
        self._bucket, self._page_size = bucket, store.page_size
        self._scratch = store.scratch
        device, width = store.device, model.decoder.config.hidden_size
        # All integers are one tensor: they come from the host in one copy.
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
        """The batch: a new one for each run, of the same tensors."""
        counts, lengths, slots, limits, table = self._ints.split(self._sizes)
        return FixedBatch(counts, lengths, table.view(self._bucket.requests, self._bucket.pages), slots, limits)

    def fill(self, layout: Layout, x_TD: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Put a pass into them, and padding into what it leaves."""
        host = self._blank.copy()
        counts, lengths, slots, limits, table = self._split(host)
        requests, rows = len(layout.row_counts), len(layout.slots)
        counts[:requests], lengths[:requests], slots[:rows] = layout.row_counts, layout.kv_lengths, layout.slots
        seen = layout.kv_limit
        limits[:rows] = np.repeat(layout.kv_lengths, layout.row_counts) if seen is None else seen
        tables = table.reshape(self._bucket.requests, self._bucket.pages)
        for row, pages, length in zip(tables, layout.page_tables, layout.kv_lengths, strict=False):
            held = pages_for(length, self._page_size)
            row[:held] = pages[:held]
        self._ints.copy_(on_device(host, self._ints.device))
        for buffer, fresh in ((self.x_TD, x_TD), (self.cos, cos), (self.sin, sin)):
            buffer[: len(fresh)].copy_(fresh)
            buffer[len(fresh) :].zero_()

    def _split(self, ints: np.ndarray) -> list[np.ndarray]:
        return np.split(ints, np.cumsum(self._sizes)[:-1])


class CudaCapture:
    """Records on a GPU, into memory that all graphs share: one runs at a time, its output is read before the next.

    All are recorded on one stream: recordings share memory only if they share that too, and each stream on which a
    matrix product was run keeps a workspace of its own (32 MiB on an H100) for good.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool, self._aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """``RuntimeError`` where ``run`` cannot be recorded; what was recorded before is none the worse."""
        with _RECORDING, torch.cuda.device(self._device):
            here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            try:
                self._aside.wait_stream(here)
                with torch.cuda.stream(self._aside):
                    run()  # kernels are compiled and libraries make their workspaces: not while recording
                self._aside.synchronize()
                # Other stages' threads allocate and wait freely meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"):
                    out = run()
            except RuntimeError:
                self._abandon()
                raise
            finally:
                torch.cuda.set_stream(here)  # a recording that breaks off leaves the thread on its own

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _abandon(self) -> None:
        """Start over: a pool whose recording broke off takes no other. Graphs that share it keep it.

        PyTorch before 2.12 leaves the allocator recording then (pytorch/pytorch#180395), and it would neither free
        cached memory nor begin another; where it does not, or did not begin, it returns that.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device_index(), self._pool)
        self._pool, self._aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)

    def _device_index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index
