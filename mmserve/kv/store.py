"""The paged K/V store: keys and values of every layer, addressed by page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmserve_kernels.cached_attention import FixedBatch, Ragged
from mmserve_kernels.cached_attention.cpu import FLOOR
from mmserve_kernels.cached_attention.merged import merged
from mmserve_kernels.dispatch import pick
from mmserve_kernels.layer_rows import Stored
from torch import Tensor

from mmserve.errors import ConfigError, TransferError
from mmserve.kv.layout import Layout, Piece, by_page, cascade_of
from mmserve.kv.on_device import on_device
from mmserve.models.decoder import Attend
from mmserve.models.decoder_config import DecoderConfig

#: ``read(layer, rotated queries [T, H, K], key pages, value pages) -> [T, H, K]``: a pass's attention over the pages.
Read = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: ``observe(layer, q[T, H, K], rotated[T, H, K])`` receives the queries of a batch's rows, before and after rotation.
Observe = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class Fork:
    """A copy of the first ``positions`` of ``page`` to the pages ``into`` (int64)."""

    page: int
    positions: int
    into: np.ndarray


@contextmanager
def memory_of(pages: int, page_size: int) -> Iterator[None]:
    """Context for allocating ``pages`` pages of ``page_size`` positions: raises ``ConfigError`` if memory is too
    small."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU; on a CPU it has no separate type
        raise ConfigError(
            f"no memory for the keys and values of {pages} pages of {page_size} positions: set max_running, max_tokens "
            "or pages lower under [engine]"
        ) from error


class KVStore:
    """Keys (after rotation) and values, ``[pages, page_size, kv_heads, head_dim]`` for each layer.

    Rotary embedding depends only on a token's position, so an entry stays valid while its position does, and any subset
    of a request's positions can be overwritten while the rest is read. ``kernels``: the implementation of each op,
    ``triton`` or ``pytorch``. After the ``pages`` for requests there is one more, ``scratch``: padding rows of a batch
    may write to it, and it is never read.
    """

    quantized = False

    def __init__(
        self, config: DecoderConfig, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (pages + 1, page_size, config.num_kv_heads, config.head_dim)
        self.page_size, self.device, self.scratch = page_size, device, pages
        with memory_of(pages, page_size):
            self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
            self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        pick_op = partial(pick, device=device, dtype=dtype, head_size=config.head_dim, quantized=self.quantized)
        ops = [pick_op(op) for op in ("rope_scatter", "cached_attention")]
        self.kernels = {op.op: op.path for op in ops}
        self._rope_scatter, self._cached_attention = (op.run for op in ops)
        self._special: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
        if not config.plain_attention:
            self._special = [
                {"window": config.window(layer), "cap": config.score_cap} for layer in range(config.num_layers)
            ]

    def ragged(
        self, rows: list[np.ndarray], tables: list[np.ndarray], lengths: list[int], *, prompts: list[int] | None = None
    ) -> Ragged:
        """A batch as in ``layout``, without blocks, on the store's device."""
        return self.placed(self.layout(rows, tables, lengths, prompts=prompts))

    def layout(
        self,
        rows: list[np.ndarray],
        tables: list[np.ndarray],
        lengths: list[int],
        *,
        block: int | None = None,
        prompts: list[int] | None = None,
        spans: list[np.ndarray] | None = None,
        whole: Sequence[bool] | None = None,
        shared: Sequence[int] | None = None,
    ) -> Layout:
        """The layout of a batch: for each request the positions to run, its page table, and its length (positions with
        K/V).

        Rows attend up to the end of their own block of ``block`` positions, counted from 0, or of the request: 1 is
        causal attention, None full. ``prompts``: for each request, the number of leading positions that attend only to
        each other. ``spans`` (int64, for each row): number of positions that it attends to, including itself, if
        neither rule applies; sliding windows end with a row's own position. ``whole``: for each request, whether
        attention handles its rows as one piece; their bits then depend on which rows run together. ``shared``: for each
        ``whole`` request, the number of leading pages that it has in common with the adjacent ones.
        """
        size = self.page_size
        slots = [table[r // size] * size + r % size for r, table in zip(rows, tables, strict=True)]
        pieces = [[Piece(len(r), n, table)] for r, n, table in zip(rows, lengths, tables, strict=True)]
        limits = None
        if spans is not None:
            limits = spans
        elif block is not None:
            limits = [np.minimum((r // block + 1) * block, n) for r, n in zip(rows, lengths, strict=True)]
        elif prompts is not None:
            limits = [np.where(r < size, size, n) for r, size, n in zip(rows, prompts, lengths, strict=True)]
        if limits is not None and self.device.type == "cpu":
            own = [None] * len(rows) if spans is None else rows
            single = [False] * len(rows) if whole is None else whole
            pieces = [
                [piece] if one else by_page(piece, seen, at, size)
                for [piece], seen, at, one in zip(pieces, limits, own, single, strict=True)
            ]
        flat = [piece for parts in pieces for piece in parts]
        made = Layout.of(flat, np.concatenate(slots), None if limits is None else np.concatenate(limits))
        if spans is not None:
            made = replace(made, window_end=np.concatenate(rows) + 1)
        if shared is not None and self._cascades:
            made = replace(made, cascade=cascade_of(pieces, made, shared, size, FLOOR))
        return made

    def placed(self, layout: Layout) -> Ragged:
        """``layout`` on the store's device."""
        return Ragged(
            row_counts=layout.row_counts,
            kv_lengths=layout.kv_lengths,
            page_tables=tuple(self._tensor(table) for table in layout.page_tables),
            slots=self._tensor(layout.slots),
            kv_limit=None if layout.kv_limit is None else self._tensor(layout.kv_limit),
            window_end=None if layout.window_end is None else self._tensor(layout.window_end),
        )

    @property
    def num_layers(self) -> int:
        """Number of layers with K/V."""
        return len(self._special)

    def names(self) -> tuple[str, ...]:
        """The names of the tensors that ``read_pages`` returns."""
        return tuple(name for name, _stored in self._stored())

    def read_pages(self, pages: np.ndarray, layers: range | None = None) -> dict[str, Tensor]:
        """A copy of the contents of ``pages`` (int64), in their order, by layer, for ``write_pages``.

        ``layers``: only these; None = all.
        """
        at, chosen = self._tensor(pages), range(self.num_layers) if layers is None else layers
        return {
            name: self._relative(name, stored.index_select(0, at), at)
            for name, stored in self._stored()
            if layer_of(name) in chosen
        }

    def write_pages(self, pages: np.ndarray, held: Mapping[str, Tensor], *, some: bool = False) -> None:
        """Fill ``pages`` (int64) with the result of another store's ``read_pages`` for the same number of pages.

        ``some``: ``held`` may have only some of the layers. Raises ``TransferError``, and writes nothing, if the shapes
        or dtypes differ.
        """
        at, stored = self._tensor(pages), dict(self._stored())
        if some:
            stored = {name: into for name, into in stored.items() if name in held}
        check_shapes({name: (len(at), *into.shape[1:], into.dtype) for name, into in stored.items()}, held)
        for name, into in stored.items():
            into[at] = self._absolute(name, held[name].to(into.device), at)

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the store by name, ``[pages, …]`` each."""
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            yield f"keys.{layer}", keys
            yield f"values.{layer}", values

    def _relative(self, name: str, held: Tensor, pages: Tensor) -> Tensor:
        """``held``, the contents of ``pages`` under ``name``, made independent of the page numbers: here unchanged."""
        return held

    def _absolute(self, name: str, held: Tensor, pages: Tensor) -> Tensor:
        """The inverse of ``_relative``."""
        return held

    @property
    def _cascades(self) -> bool:
        """Whether shared pages are read once for all requests: if that is known to be faster, and partial results can
        be merged."""
        return self.device.type == "cpu" and not self.quantized and not any(self._special)

    def cascaded(self, layout: Layout) -> Read | None:
        """Attention that reads the pages shared by requests of ``layout`` once for all of them; None if none are
        shared."""
        cascade = layout.cascade
        if cascade is None:
            return None
        apart, own, shared = (self.placed(part) for part in (cascade.apart, cascade.own, cascade.shared))
        at = (cascade.others, cascade.branches, cascade.together, cascade.places)
        others, branches, together, places = (self._tensor(rows) for rows in at)

        def read(layer: int, q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor) -> Tensor:
            out_THK = torch.empty_like(q_THK)
            if len(others):
                out_THK[others] = self._cached_attention(q_THK[others], k_PSGK, v_PSGK, apart)
            parts: list[Tensor] = []
            for rows, ragged in ((together, shared), (branches, own)):
                lse_TH = q_THK.new_empty(len(rows), q_THK.shape[1], dtype=torch.float32)
                parts += [self._cached_attention(q_THK[rows], k_PSGK, v_PSGK, ragged, lse_TH=lse_TH), lse_TH]
            seen, seen_lse, rest, rest_lse = parts
            out_THK[branches] = merged(seen[places], seen_lse[places], rest, rest_lse)
            return out_THK

        return read

    def values_at(self, layer: int, ragged: Ragged) -> Tensor:
        """Stored values ``[rows, kv_heads, head_dim]`` of the rows' own positions."""
        return self.values[layer].flatten(0, 1)[ragged.slots]

    def dense(self, q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, ragged: Ragged | FixedBatch) -> Tensor:
        """Attention ``[T, H, K]`` of rotated queries over all of each request's pages."""
        return self._attention(0, q_THK, k_PSGK, v_PSGK, ragged)

    def _attention(self, layer: int, q_THK: Tensor, k: Any, v: Any, ragged: Ragged | FixedBatch) -> Tensor:
        """Attention ``[T, H, K]`` of ``layer``, with its sliding window and its cap of scores, if it has them."""
        rows: Tensor = self._cached_attention(q_THK, k, v, ragged, **self._special[layer])
        return rows

    def attend(
        self,
        ragged: Ragged | FixedBatch,
        read: Read | None = None,
        observe: Observe | None = None,
        forks: Sequence[Fork] = (),
    ) -> Attend:
        """Attention that first rotates and writes the rows' new keys and values, then reads all of each request's, or
        what ``read`` selects.

        Padding rows after the batch are ignored, and their results are zeros. ``observe`` receives each layer's
        queries, before and after rotation, once the keys are written. ``forks``: copies that are made then, before
        anything is read; no row writes to the positions that are copied to.
        """
        count = len(ragged.slots)
        copied = self._copied(forks)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            fresh = [x[:count] for x in (q, k, v, cos, sin)]
            rotated = self._rope_scatter(*fresh, keys, values, ragged.slots)
            copied(keys)
            copied(values)
            if observe is not None:
                observe(layer, fresh[0], rotated)
            rows = read(layer, rotated, keys, values) if read else self._attention(layer, rotated, keys, values, ragged)
            return rows if len(q) == count else F.pad(rows, (0, 0, 0, 0, 0, len(q) - count))

        return attend

    def _copied(self, forks: Sequence[Fork]) -> Callable[[Tensor], None]:
        """A function that copies the forked positions of a tensor ``[pages, page_size, …]``."""
        if not forks:
            return lambda pages: None
        size = self.page_size
        into = [(fork.into[:, None] * size + np.arange(fork.positions)).ravel() for fork in forks]
        of = [np.tile(fork.page * size + np.arange(fork.positions), len(fork.into)) for fork in forks]
        to, origins = self._tensor(np.concatenate(into)), self._tensor(np.concatenate(of))

        def copied(pages: Tensor) -> None:
            slots = pages.flatten(0, 1)  # a view
            slots[to] = slots[origins]

        return copied

    def stored(self, ragged: Ragged) -> Stored | None:
        """The tensors that compiled loops read and write in a pass of single rows; None if rows or pages are of another
        kind."""
        plain = self.kernels["cached_attention"] == "pytorch" and not self.quantized and not self._special[0]
        if not plain or self.device.type != "cpu" or self.keys[0].dtype != torch.float32:
            return None
        rows = ragged.lone_rows
        return None if rows is None else Stored(self.keys, self.values, ragged.slots.numpy(), rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return on_device(np.ascontiguousarray(array, dtype=np.int64), self.device)


def layer_of(name: str) -> int:
    """The layer of a tensor of ``read_pages``, by its name."""
    return int(name.split(".")[1])


def check_shapes(wanted: Mapping[str, tuple[Any, ...]], held: Mapping[str, Tensor]) -> None:
    """Raises ``TransferError`` unless ``held`` has exactly the tensors ``wanted``: name to shape, followed by dtype."""
    found = {name: (*tensor.shape, tensor.dtype) for name, tensor in held.items()}
    if found != wanted:
        name = next(name for name in (*wanted, *found) if wanted.get(name) != found.get(name))
        raise TransferError(
            f"K/V {name!r} have the shape and dtype {found.get(name)}, and this store has {wanted.get(name)}"
        )


def written_pages(ragged: Ragged, pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """The pages that a pass writes to (int64, ascending), and the number of positions of each that hold keys after
    it."""
    filled = torch.zeros(pages, dtype=torch.int64, device=ragged.slots.device)
    for table, length in zip(ragged.page_tables, ragged.kv_lengths, strict=True):
        count = (length - torch.arange(len(table), device=table.device) * page_size).clamp(0, page_size)
        filled[table] = torch.maximum(filled[table], count)
    touched = (ragged.slots // page_size).unique()
    return touched, filled[touched]
