"""K/V of images and clips computed separately, once, and cached for later requests.

An image's K/V are computed at the beginning of a separate chat, after the model's chat format prefix; with
bidirectional attention, no tokens follow. Keys are stored before rotation, and rotated to an image's
positions like new ones, so that reuse adds no rounding error, for any number of position axes and any scaling.

Shapes in names: N layers, L positions, G key/value heads, K head size.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mmserve.core.encoded import Encoded, Span
from mmserve.encode.embedding import deep_rows, embedded
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.models.alone import kv_alone
from mmserve.models.base import LoadedModel
from mmserve.models.chat import prompt_ids
from mmserve.tiers.keys import digest
from mmserve.tiers.memory import Entry, TensorCache

#: Layout of a cache entry: keys and values, both ``[N, L, G, K]``, keys before rotation.
_NAMES = ("keys", "values")


class ImageKV:
    """Computes image K/V for one model; ``cache`` stores them, and may be shared with other models."""

    def __init__(self, model: LoadedModel, cache: TensorCache) -> None:
        self._model, self._cache = model, cache
        self._causal = model.spec.causal
        # In memory, entries of different checkpoints are distinguished only by the model object that computed them.
        self._own = secrets.token_bytes(32)
        self._contexts: dict[bool, np.ndarray] = {}

    def keys(self, encoded: Encoded, cache: str = "") -> tuple[bytes, ...]:
        """The cache key of each image and clip: SHA-256 of everything that its K/V depend on (the exact bytes of its
        visual tokens, the text tokens among them and their positions, the preceding tokens of the chat format, the
        model) and of ``cache``, the tenant's cache partition."""
        return tuple(self._key(encoded, span, cache) for span in encoded.spans)

    def found(self, encoded: Encoded, sizes: Sequence[int]) -> Generator[int, None, list[Tensor]]:
        """Keys and values ``[N, n, G, K]`` of the first ``sizes[i]`` positions of each image and clip, concatenated."""
        parts: dict[int, Entry] = {}
        for key in dict.fromkeys(encoded.span_keys):
            which = [i for i, other in enumerate(encoded.span_keys) if other == key]
            entry = yield from self._alone(key, encoded, encoded.spans[which[0]])

            def make(_missing: list[int], made: Entry = entry) -> list[Entry]:
                return [made]

            def fits(i: int, found: Entry, which: list[int] = which) -> bool:
                return self._fits(encoded.spans[which[i]], found)

            with self._cache.lease([key] * len(which), make, fits) as entries:
                parts |= zip(which, entries, strict=True)
        return [torch.cat([parts[i][name][:, :n] for i, n in enumerate(sizes)], 1) for name in _NAMES]

    def _alone(self, key: bytes, encoded: Encoded, span: Span) -> Generator[int, None, Entry]:
        """The K/V of an image or clip alone: cached, or computed one layer at a time.

        No other request computes the same entry concurrently: a prefill batch within the budget is computed in one go,
        and a prompt that exceeds the budget is in a batch of its own (``schedule``).
        """
        kept = self._cache.peek(key)
        if kept is not None and self._fits(span, kept):
            return kept
        made: list[tuple[Tensor, Tensor]] = []
        for of_layer in self._make(encoded, span):
            made.append(of_layer)
            yield len(of_layer[0])
        return {name: torch.stack(of_each) for name, of_each in zip(_NAMES, zip(*made, strict=True), strict=True)}

    def _make(self, encoded: Encoded, span: Span) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields K/V ``[L, G, K]`` of each layer, for an image or clip alone, keys before rotation."""
        context, model = self._context(span.clip), self._model
        ids = np.concatenate([context, encoded.ids[span.start : span.stop]])
        own = span.places_of(encoded) + len(context)
        before = np.broadcast_to(np.arange(len(context)), (*own.shape[:-1], len(context)))
        places = np.concatenate([before, own], axis=-1)
        if model.position_axes > 1:
            places = np.broadcast_to(places, (model.position_axes, len(ids))).copy()
        visual, features = span.visual_of(encoded)
        alone = Encoded(ids, visual + len(context), features)
        x, deep = embedded(model, ids, alone)
        added = deep_rows([(np.arange(len(ids)), deep)])
        positions = torch.from_numpy(places).to(model.device)
        layers = len(model.decoder.layers)
        made = kv_alone(model.decoder, x, positions, causal=self._causal, layers=layers, deep=added)
        return ((k[len(context) :], v[len(context) :]) for k, v in made)

    def _fits(self, span: Span, entry: Entry) -> bool:
        config, model = self._model.decoder.config, self._model
        shape = (config.num_layers, span.stop - span.start, config.num_kv_heads, config.head_dim)
        return set(entry) == set(_NAMES) and all(kv.shape == shape and kv.dtype == model.dtype for kv in entry.values())

    def _key(self, encoded: Encoded, span: Span, cache: str) -> bytes:
        rows, features = span.visual_of(encoded)
        own = encoded.ids[span.start : span.stop], rows, span.places_of(encoded), self._context(span.clip)
        parts = [f"{array.dtype} {array.shape}".encode() + array.tobytes() for array in own]
        if features is not None:
            parts += [f"{features.dtype}".encode(), features.contiguous().view(torch.uint8).cpu().numpy().tobytes()]
        return digest(self._own, cache.encode(), *parts)

    def _context(self, clip: bool) -> np.ndarray:
        """Token ids (int64) that precede an image, or a clip, at the start of a chat."""
        if clip not in self._contexts:
            spec, kind = self._model.spec, "video" if clip else "image"
            chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}]
            placeholder = spec.video_id if clip else spec.image_id
            assert placeholder is not None, "there is an image or clip in the prompt"
            unable = f"model {spec.name!r} has no image_reuse: its chat template takes no chat that begins with {kind}s"
            try:
                ids = prompt_ids(self._model.tokenizer, chat, special_tokens=spec.special_tokens)
            except InvalidArgument as error:
                raise FailedPrecondition(f"{unable}; ask without it") from error
            if placeholder not in ids:  # otherwise these placeholders are in the request's text
                raise FailedPrecondition(f"{unable}; ask without it")
            self._contexts[clip] = np.asarray(ids[: ids.index(placeholder)], dtype=np.int64)
        return self._contexts[clip]
