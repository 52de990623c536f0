"""The paged K/V store in 8 or 4 bits, with each page's salient tokens unquantised.

Each token of a head has its own range, so its stored K/V depend only on itself: not on how much of its request ran with
it, nor, in a shared page, on who filled it. KIVI (arXiv 2402.02750) has a range for each channel of keys, so that every
write to a page would change all its tokens. Salient tokens are those with the smallest key norms over all heads, which
tend to receive the most attention (arXiv 2406.11430). ZipCache (arXiv 2405.14256) uses attention itself, but a shared
page has no single request's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from mmserve_kernels.cached_attention import FixedBatch, Ragged
from mmserve_kernels.dispatch import pick
from mmserve_kernels.kv_quant import QuantizedPages, dequantize
from torch import Tensor

from mmserve.kv.store import Fork, KVStore, Observe, Read, memory_of, written_pages
from mmserve.models.decoder import Attend
from mmserve.models.decoder_config import DecoderConfig

#: ``keep(keys, values, k[T, G, K], v[T, G, K])`` selects the salient tokens of a layer's pages, given the new rows.
_Keep = Callable[[QuantizedPages, QuantizedPages, Tensor, Tensor], None]


class QuantizedStore(KVStore):
    """Keys and values in ``bits`` (8 or 4) per channel; the share ``kept`` (rounded) of a page's tokens is
    unquantised."""

    quantized = True

    def __init__(
        self,
        config: DecoderConfig,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        bits: int,
        kept: float = 0.0,
    ) -> None:
        super().__init__(config, pages=0, page_size=page_size, dtype=dtype, device=device)
        self._kind, self._kept, self._dtype = f"int{bits}", round(kept * page_size), dtype
        self._heads = (config.num_kv_heads, config.head_dim)
        op = pick("kv_quant", device, dtype, config.head_dim)
        self._kv_quant = op.run
        self.kernels[op.op] = op.path
        with memory_of(pages, page_size):
            self._layers = [self._blank(pages) for _ in range(config.num_layers)]

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        """As ``KVStore._stored``; in ``read_pages``, indices of salient tokens are relative to their page."""
        for layer, pair in enumerate(self._layers):
            for name, pages in zip(("keys", "values"), pair, strict=True):
                assert pages.low is not None, "integers have a lowest value"
                yield f"{name}.{layer}.codes", pages.codes
                yield f"{name}.{layer}.scale", pages.scale
                yield f"{name}.{layer}.low", pages.low
                if pages.kept is not None:
                    yield f"{name}.{layer}.kept", pages.kept.unflatten(0, (-1, self._kept))
            if pair[0].kept_at is not None:
                yield f"kept_at.{layer}", pair[0].kept_at

    def _relative(self, name: str, held: Tensor, pages: Tensor) -> Tensor:
        return self._moved(name, held, -pages)

    def _absolute(self, name: str, held: Tensor, pages: Tensor) -> Tensor:
        return self._moved(name, held, pages)

    def _moved(self, name: str, held: Tensor, pages: Tensor) -> Tensor:
        """``held``, with the page numbers of salient tokens shifted by ``pages``."""
        if not name.startswith("kept_at"):
            return held
        return torch.where(held < 0, held, held + pages[:, None] * self._kept).to(held.dtype)

    @property
    def bytes(self) -> int:
        """Memory of all layers; the indices of salient tokens, which keys and values share, count once."""
        return sum(k.bytes + v.bytes - (0 if v.kept_at is None else v.kept_at.nbytes) for k, v in self._layers)

    def values_at(self, layer: int, ragged: Ragged) -> Tensor:
        """Stored values ``[rows, kv_heads, head_dim]`` of the rows' own positions."""
        pages, place = ragged.slots // self.page_size, ragged.slots % self.page_size
        unique, which = pages.unique(return_inverse=True)
        return dequantize(self._layers[layer][1].select(unique)).to(self._dtype)[which, place]

    def attend(
        self,
        ragged: Ragged | FixedBatch,
        read: Read | None = None,
        observe: Observe | None = None,
        forks: Sequence[Fork] = (),
    ) -> Attend:
        """As ``KVStore.attend``: new keys and values are rotated, quantised and written, then all are read."""
        if read is not None or observe is not None:
            raise ValueError("sparse attention and reductions need pages at full precision: use a KVStore")
        if isinstance(ragged, FixedBatch):
            raise ValueError("a quantised store needs the pages that a pass writes on the host: use a Ragged batch")
        count = len(ragged.slots)
        whole = -(-count // self.page_size)
        filled = (count - torch.arange(whole, device=self.device) * self.page_size).clamp(max=self.page_size)
        places = torch.arange(count, device=self.device)
        copied, keep = self._copied(forks), self._keeping(ragged, forks) if self._kept else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            blank = torch.zeros(whole, self.page_size, *self._heads, dtype=self._dtype, device=self.device)
            fresh = [blank, blank.clone()]
            rotated = self._rope_scatter(*(x[:count] for x in (q, k, v, cos, sin)), *fresh, places)
            pair = self._layers[layer]
            for pages, x in zip(pair, fresh, strict=True):
                made: QuantizedPages = self._kv_quant(x, filled, kind=self._kind, per="token")
                for old, new in ((pages.codes, made.codes), (pages.scale, made.scale), (pages.low, made.low)):
                    assert old is not None and new is not None, "integers have a lowest value"
                    old.view(-1, *old.shape[2:])[ragged.slots] = new.flatten(0, 1)[:count]
                    copied(old)
            if keep is not None:
                keep(*pair, *(x.flatten(0, 1)[:count] for x in fresh))
            rows = self._attention(layer, rotated, *pair, ragged)
            out = rows.new_zeros(len(q), *rows.shape[1:])
            out[:count] = rows
            return out

        return attend

    def _keeping(self, ragged: Ragged, forks: Sequence[Fork]) -> _Keep:
        """Selects the salient tokens of the pages that a pass writes; in pages that ``forks`` copy to, from the copied
        tokens as well."""
        pages, filled = written_pages(ragged, len(self._layers[0][0].codes), self.page_size)
        slots = ragged.slots
        if not forks:
            return lambda keys, values, k, v: self._keep(keys, values, k, v, slots, (pages, filled))
        into = self._tensor(np.concatenate([fork.into for fork in forks]))
        of = self._tensor(np.concatenate([np.full_like(fork.into, fork.page) for fork in forks]))
        later, rows = torch.isin(pages, into), torch.isin(slots // self.page_size, into)
        first, then = (pages[~later], filled[~later]), (pages[later], filled[later])

        def keep(keys: QuantizedPages, values: QuantizedPages, k: Tensor, v: Tensor) -> None:
            self._keep(keys, values, k[~rows], v[~rows], slots[~rows], first)
            assert keys.kept_at is not None
            keys.kept_at[into] = self._moved("kept_at", keys.kept_at[of], into - of)
            for pair in (keys, values):
                assert pair.kept is not None
                kept = pair.kept.unflatten(0, (-1, self._kept))
                kept[into] = kept[of]
            self._keep(keys, values, k[rows], v[rows], slots[rows], then)

        return keep

    def _keep(
        self,
        keys: QuantizedPages,
        values: QuantizedPages,
        k_TGK: Tensor,
        v_TGK: Tensor,
        slots: Tensor,
        written: tuple[Tensor, Tensor],
    ) -> None:
        """Select the salient tokens of the ``written`` pages, among the new ones and those kept so far.

        Tokens that an earlier owner of a page left beyond the positions with keys are ignored.
        """
        pages, filled = written
        which, place = torch.searchsorted(pages, slots // self.page_size), slots % self.page_size
        kept_at = keys.kept_at
        assert kept_at is not None and keys.kept is not None and values.kept is not None
        before = kept_at[pages].long()  # [n, S]
        full = [x.kept[before.clamp_min(0)] for x in (keys, values) if x.kept is not None]
        for table, fresh in zip(full, (k_TGK, v_TGK), strict=True):
            table[which, place] = fresh
        known = (before >= 0) & (torch.arange(self.page_size, device=pages.device) < filled[:, None])
        known[which, place] = True
        norms = full[0].float().flatten(2).norm(dim=-1).masked_fill(~known, torch.inf)
        best = norms.topk(self._kept, -1, largest=False)
        to = pages[:, None] * self._kept + torch.arange(self._kept, device=pages.device)
        for pair, table in zip((keys, values), full, strict=True):
            assert pair.kept is not None
            pair.kept[to] = table.gather(1, best.indices[:, :, None, None].expand(-1, -1, *self._heads))
        now = torch.full_like(before, -1).scatter_(1, best.indices, torch.where(best.values.isinf(), -1, to))
        kept_at[pages] = now.to(kept_at.dtype)

    def _blank(self, pages: int) -> tuple[QuantizedPages, QuantizedPages]:
        """Empty keys and values of a layer."""
        groups, size = self._heads
        kept_at = torch.full((pages, self.page_size), -1, dtype=torch.int32, device=self.device) if self._kept else None

        def blank() -> QuantizedPages:
            width = size // 2 if self._kind == "int4" else size
            codes = torch.zeros(pages, self.page_size, groups, width, dtype=torch.uint8, device=self.device)
            scale = torch.zeros(pages, self.page_size, groups, 1, device=self.device)
            kept = None
            if self._kept:
                kept = torch.zeros(pages * self._kept, groups, size, dtype=self._dtype, device=self.device)
            return QuantizedPages(self._kind, codes, scale, scale.clone(), kept, kept_at)

        return blank(), blank()
