"""Prefix pages outside the page pool: saved when the pool evicts them, and restored on a hit.

As in LMCache (arXiv 2510.09665) for vLLM. Here an entry is one page, under a key of everything that its K/V depend on
(``kv.prefix``) and of what computed them (``fingerprint``). Copies are bit-identical.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.config import EngineConfig
from mmserve.core.cached import Block, Label
from mmserve.errors import TransferError
from mmserve.kv.store import KVStore, check_shapes
from mmserve.models.base import LoadedModel
from mmserve.tiers.keys import digest, settings_digest, software, weights_digest
from mmserve.tiers.memory import Entry, TensorCache

logger = logging.getLogger("mmserve.kv")

#: Engine settings that may affect the bits of K/V.
_BITS = ("page_size", "prefill_tokens", "sparse_", "kv_")
#: Pages that are copied at once; their bytes are in memory twice meanwhile.
_COPIED_AT_ONCE = 64


def decoder_digest(model: LoadedModel) -> bytes:
    """Digest of the model's decoder as loaded: its weights, and how it computes with them."""
    spec = model.spec
    how = repr((model.decoder.config, spec.attention, spec.attention_block))
    return digest(weights_digest(model.decoder), how.encode())


def fingerprint(decoder: bytes, engine: EngineConfig, store: KVStore) -> bytes:
    """Digest of everything that computes K/V: software, kernels, the device, settings of ``engine`` (resolved), and the
    ``decoder`` (``decoder_digest``)."""
    settings = {name: value for name, value in asdict(engine).items() if name.startswith(_BITS)}
    settings["kernels"], settings["device"] = dict(store.kernels), _device(store.device)
    return digest(software(), settings_digest(settings), decoder)


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


@dataclass(eq=False)
class Fetched:
    """Pages found outside the pool, by key; ``close`` releases them in the caches."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    held: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Release the pages; may be called twice."""
        self.held.close()
        self.entries = {}


class PrefixTier:
    """The pages of a ``model``'s ``store`` in ``cache``, which engines share. Thread-safe, except for ``save`` and
    ``restore``: their pages must not change meanwhile."""

    def __init__(self, model: str, store: KVStore, cache: TensorCache, made_by: bytes) -> None:
        self.cache, self._model, self._store, self._made_by = cache, model, store, made_by
        self.page_size = store.page_size
        page = store.read_pages(np.zeros(1, np.int64))  # any page
        self._shapes = {name: (*tensor.shape, tensor.dtype) for name, tensor in page.items()}
        self.page_bytes = sum(tensor.nbytes for tensor in page.values())

    def save(self, pages: Sequence[tuple[int, Label]]) -> None:
        """Save copies of these pages; errors are logged, and only lose the copies."""
        for begin in range(0, len(pages), _COPIED_AT_ONCE):
            some = pages[begin : begin + _COPIED_AT_ONCE]
            try:
                self._save(some)
            except Exception as error:  # noqa: BLE001 - a failed copy fails no request
                logger.warning("%d K/V pages were not saved: %s", len(some), error)

    @torch.inference_mode()
    def _save(self, pages: Sequence[tuple[int, Label]]) -> None:
        held = self._store.read_pages(np.array([page for page, _label in pages], np.int64))
        here = {name: tensor.cpu() for name, tensor in held.items()}
        for i, (_page, label) in enumerate(pages):
            entry = {name: tensor[i : i + 1].clone() for name, tensor in here.items()}
            self.cache.put(self._key(bytes.fromhex(label.name)), entry, label)

    def fetch(self, keys: Sequence[bytes], labels: Sequence[Label]) -> Fetched:
        """The cached pages of the longest prefix of ``keys``; may read from disk."""
        fetched = Fetched()
        found = fetched.held.enter_context(
            self.cache.found(
                [self._key(key) for key in keys],
                lambda _i, entry: self._fits(entry),
                lambda i, _entry: labels[i],
                leading=True,
            )
        )
        fetched.entries = {key: entry for key, entry in zip(keys, found, strict=True) if entry is not None}
        return fetched

    @torch.inference_mode()
    def restore(self, fetched: Fetched, pages: np.ndarray, keys: Sequence[bytes], unit: int) -> int:
        """Fill the first of ``pages`` (int64) with the pages of ``keys`` that are ``fetched`` or in memory, in whole
        units of ``unit``. Returns the number of pages filled."""
        found: list[Entry] = []
        for key in keys:
            entry = fetched.entries.get(key)
            if entry is None:
                entry = self.cache.peek(self._key(key))
            if entry is None or not self._fits(entry):
                break
            found.append(entry)
        count = len(found) - len(found) % unit
        if not count:
            return 0
        try:
            self._store.write_pages(pages[:count], {name: _concatenated(found[:count], name) for name in self._shapes})
        except TransferError as error:
            logger.warning("saved K/V pages do not match this store: %s", error)
            return 0
        return count

    def blocks(self) -> list[Block]:
        """The cached blocks under the model's name, including those of earlier weights or settings (``stale``)."""
        found: list[Block] = []
        for key, block in self.cache.blocks():
            if block.label.kind == "prefix" and block.label.model == self._model:
                found.append(block if self.uses(key, block.label) else replace(block, stale=key.hex()))
        return found

    def uses(self, key: bytes, label: Label) -> bool:
        """Whether the page of ``label`` has this key with the present weights and settings."""
        return key == self._key(bytes.fromhex(label.name))

    def pin(self, names: Sequence[str], pinned: bool) -> int:
        """See ``TensorCache.pin``; by names of blocks. Stale ones are only unpinned."""
        found = self.cache.pin([self._key(bytes.fromhex(name)) for name in names], pinned)
        return found if pinned else found + self.cache.pin(self._stale(names), pinned)

    def drop(self, names: Sequence[str]) -> int:
        """See ``TensorCache.drop``; by names of blocks, including stale ones."""
        return self.cache.drop([*(self._key(bytes.fromhex(name)) for name in names), *self._stale(names)])

    def _stale(self, names: Sequence[str]) -> list[bytes]:
        wanted = set(names)
        return [bytes.fromhex(block.stale) for block in self.blocks() if block.stale and block.label.name in wanted]

    def _key(self, page: bytes) -> bytes:
        return digest(self._made_by, page)

    def _fits(self, entry: Entry) -> bool:
        try:
            check_shapes(self._shapes, entry)
        except TransferError:
            return False
        return True


def _concatenated(entries: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    return torch.cat([entry[name] for entry in entries])
