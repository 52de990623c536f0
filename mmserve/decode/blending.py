"""K/V of images that are taken from where each stood alone, and which of their positions are run again in this prompt.

What is taken is defined, not found: an image's K/V are those that it has at the beginning of a chat of its own, behind
what the model's chat format puts there; where attention looks right, nothing stands there. A request whose image nobody
has asked about computes them first, so that no answer depends on what is kept. Keys are kept before rotation, and
turned to an image's place as fresh ones are: no rounding comes in by moving them, whatever the axes of position or
their scaling.
Shapes in names: N layers, L positions, D hidden, G key/value heads, K head size.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mmserve_kernels.dispatch import pick
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack, Encoded, Past, Span
from mmserve.core.request import Request
from mmserve.decode.commit import ACCOMPANIED, DRAFTING
from mmserve.decode.repairing import Repairing
from mmserve.decode.state import Prefilling, Taken, Taking
from mmserve.encode.cache import Entry, TensorCache
from mmserve.encode.embedding import deep_rows, embedded
from mmserve.encode.keys import digest
from mmserve.errors import FailedPrecondition, InvalidArgument, Unimplemented
from mmserve.kv.reuse import Reuse, reuse_of
from mmserve.kv.store import KVStore
from mmserve.models.alone import kv_alone
from mmserve.models.attended import column_sums
from mmserve.models.base import Attention, CanvasModel, LoadedModel, Model
from mmserve.models.chat import prompt_ids
from mmserve.models.decoder import DecoderLayer

#: Of an entry of the cache: both ``[N, L, G, K]``, keys before rotation.
_NAMES = ("keys", "values")


def reusable(encoded: Encoded) -> tuple[int, ...]:
    """Positions of each image and clip whose K/V can be taken; the prompt's last is always run, to be answered from."""
    return tuple(min(span.stop, len(encoded.ids) - 1) - span.start for span in encoded.spans)


def reused(policy: Reuse | None, encoded: Encoded) -> int:
    """How many positions of a prompt are not run under ``policy``."""
    sizes = reusable(encoded)
    return 0 if policy is None else sum(sizes) - policy.count(sizes)


def no_reuse(model: Model, *, reads_pages: bool) -> str:
    """Why no image's K/V can be taken from elsewhere for ``model``; empty where they can.

    ``reads_pages``: passes read all pages as they are.
    """
    if model.vision is None:
        return "it takes no images"
    if isinstance(model, CanvasModel):
        return "its network keeps its K/V to itself"
    if model.spec.attention is Attention.BLOCK_CAUSAL:
        return "its positions look no further than their block, and an image may stand across two"
    return "" if reads_pages else "the server has [engine] sparse_* or kv_bits"


def check_reuse(request: Request, model: Model, *, reads_pages: bool) -> None:
    """Refuse a reuse of images' K/V that ``model``, or what else is asked for, leaves no room for.

    ``Unimplemented`` where the model or the server lacks something, ``InvalidArgument`` where the request does not fit
    together.
    """
    policy = reuse_of(request)
    if policy is None:
        return
    if why := no_reuse(model, reads_pages=reads_pages):
        raise Unimplemented(f"model {model.spec.name!r} has no image_reuse here: {why}")
    if model.spec.causal and request.diffusion.recompute.name != "last":
        raise InvalidArgument.of("diffusion.recompute", "must be 'last' with image_reuse")
    if request.diffusion.commit.name in ACCOMPANIED:
        raise InvalidArgument.of("diffusion.commit", "must not be a policy that asks a companion with image_reuse")
    if policy.each_step and request.diffusion.commit.name in DRAFTING:  # a draft is run in fewer passes than its tokens
        why = "must not be a policy that drafts with an image_reuse that runs positions again at each step"
        raise InvalidArgument.of("diffusion.commit", f"{why}; set its each_step to 0")
    if request.kv_reduction is not None:
        raise InvalidArgument.of("kv_reduction", "must not be set with image_reuse")


def take_on(begun: Prefilling, most: int) -> bool:
    """Go on with what a request takes, until ``most`` positions (0 = any number) have been run through a layer or
    there is nothing left; whether its first pass is due, which is not before the next call where ``most`` is set and
    there was anything to run."""
    ran = 0
    while begun.taking is not None and (ran < most or not most):
        try:
            ran += next(begun.taking)
        except StopIteration as ended:
            begun.taking, begun.taken = None, ended.value
            begun.reused += int(ended.value.held.sum())
    return begun.taking is None and not (most and ran)


def in_one_go(taking: Taking) -> Taken:
    """What comes of ``taking``, with nothing else done in between."""
    while True:
        try:
            next(taking)
        except StopIteration as ended:
            taken: Taken = ended.value
            return taken


@dataclass(frozen=True)
class _Look:
    """What the first layers show of the positions that are taken: float32 ``[n]`` each."""

    deviation: np.ndarray  # what the rule chooses by
    moved: np.ndarray  # how far the values of the last layer are off, where it weighs them
    attended: np.ndarray  # by attention there


class Blender:
    """Takes images' K/V for one model and its store; ``cache`` keeps them for later, for other models too."""

    def __init__(self, model: LoadedModel, store: KVStore, cache: TensorCache) -> None:
        self._model, self._store, self._cache = model, store, cache
        self._causal = model.spec.causal
        # In memory nothing tells one checkpoint's K/V from another's but who computed them.
        self._own = secrets.token_bytes(32)
        self._contexts: dict[bool, np.ndarray] = {}
        self._scores = pick("attention_scores", model.device, model.dtype, model.decoder.config.head_dim).run

    def keys(self, encoded: Encoded, cache: str = "") -> tuple[bytes, ...]:
        """SHA-256 of all that the K/V of each image and clip depend on: the very bits of its visual tokens, the text
        among them, where in it each stands, what the chat format puts in front, and the model; and of ``cache``, the
        part that the request's tenant uses."""
        return tuple(self._key(encoded, span, cache) for span in encoded.spans)

    def take(
        self,
        policy: Reuse,
        encoded: Encoded,
        canvas: Canvas,
        embeddings: Tensor,
        deep: DeepStack | None,
        pages: np.ndarray,
    ) -> Taking:
        """Write the K/V of the prompt's images into its ``pages``; which positions of the canvas prefill need not run.

        A layer of an image that stands alone, or of the prompt that is looked at, is a piece of that work. ``encoded``
        has the ``keys`` of its spans; ``embeddings [canvas, D]`` and ``deep`` are the request's own.
        """
        held = np.zeros(canvas.size, dtype=bool)
        sizes = reusable(encoded)
        if not reused(policy, encoded):
            return Taken(held)
        rows = np.concatenate([span.start + np.arange(n) for span, n in zip(encoded.spans, sizes, strict=True)])
        taken_NLGK = yield from self._found(encoded, sizes)
        seen = None
        if policy.layers and (policy.count(sizes) or policy.each_step):
            end = self._looked_at(policy, rows, canvas)
            seen = yield from self._look(policy, taken_NLGK, rows, canvas, embeddings[:end], deep)
        self._write(taken_NLGK, rows, canvas, pages)
        held[rows] = True
        again = policy.choose(sizes, np.zeros(0) if seen is None else seen.deviation)
        held[rows[again]] = False
        if seen is None or not policy.each_step:
            return Taken(held)
        layer = min(policy.layers, len(self._model.decoder.layers)) - 1
        left = (np.delete(of_each, again) for of_each in (rows, seen.moved, seen.attended))
        return Taken(held, Repairing(policy.each_step, layer, *left))

    def place(self, past: Past, canvas: Canvas, pages: np.ndarray) -> Taken:
        """Write the K/V of ``past`` into a request's ``pages``; no pass runs its rows."""
        self._write([past.keys, past.values], past.rows, canvas, pages)
        held = np.zeros(canvas.size, dtype=bool)
        held[past.rows] = True
        return Taken(held)

    def _found(self, encoded: Encoded, sizes: Sequence[int]) -> Generator[int, None, list[Tensor]]:
        """Keys and values ``[N, n, G, K]`` of the first so many positions of each image and clip, side by side."""
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
        """The K/V of an image or clip alone: those that are kept, or made a layer at a time.

        Nobody else makes the same meanwhile: what prefill takes together it makes in one go, as all of it fits its
        budget, and a prompt that does not fit is alone (``schedule``).
        """
        kept = self._cache.peek(key)
        if kept is not None and self._fits(span, kept):
            return kept
        made: list[tuple[Tensor, Tensor]] = []
        for of_layer in self._make(encoded, span):
            made.append(of_layer)
            yield len(of_layer[0])
        return {name: torch.stack(of_each) for name, of_each in zip(_NAMES, zip(*made, strict=True), strict=True)}

    def _looked_at(self, policy: Reuse, rows: np.ndarray, canvas: Canvas) -> int:
        """How much of the canvas, from the left, the K/V of ``rows`` depend on, or the policy's weights."""
        if self._model.spec.attention is Attention.FULL:
            return canvas.size
        if policy.weighed or self._model.spec.attention is Attention.PREFIX:
            return canvas.prompt_length
        return int(rows[-1]) + 1

    def _look(
        self,
        policy: Reuse,
        taken_NLGK: list[Tensor],
        rows: np.ndarray,
        canvas: Canvas,
        x_LD: Tensor,
        deep: DeepStack | None,
    ) -> Generator[int, None, _Look]:
        """How far the K/V of ``rows`` at the last of the policy's layers are from what they are in this prompt.

        ``x_LD``: its embeddings, up to where the policy looks.

        To know that, those of all these layers were computed: they are taken from here on.
        """
        decoder, device = self._model.decoder, self._model.device
        layers = min(policy.layers, len(decoder.layers))
        before = np.arange(len(x_LD))
        positions, at = self._positions(canvas, before), torch.from_numpy(rows).to(device)
        squared, moved, attended = (torch.zeros(len(rows), device=device) for _ in range(3))

        def onlook(layer: DecoderLayer, before_LD: Tensor) -> None:
            cos, sin = decoder.rotary(positions)
            q_LHK, k_LGK = (rotate(x, cos, sin) for x in layer.queries_and_keys(before_LD, slice(None)))
            seen = torch.arange(1, len(before_LD) + 1, device=device) if self._causal else None
            attended.copy_(column_sums(self._scores, q_LHK, k_LGK, seen)[at].sum(1))

        added, watch = deep_rows([(before, deep)]), onlook if policy.weighed else None
        fresh = kv_alone(decoder, x_LD, positions, causal=self._causal, layers=layers, deep=added, onlook=watch)
        for layer, of_layer in enumerate(fresh):
            for taken, found in zip(taken_NLGK, of_layer, strict=True):
                own = found[at]
                if layer == layers - 1:
                    moved = (own.float() - taken[layer].float()).flatten(1)  # of keys, and in the end of values
                    squared += moved.square().sum(1)
                taken[layer] = own
            yield len(before)
        moved = moved.abs().sum(1)
        deviation = moved * attended if policy.weighed else squared
        return _Look(*(x.cpu().numpy() for x in (deviation, moved, attended)))

    def _write(self, taken_NLGK: list[Tensor], rows: np.ndarray, canvas: Canvas, pages: np.ndarray) -> None:
        size = self._store.page_size
        slots = torch.from_numpy(pages[rows // size] * size + rows % size).to(self._model.device)
        cos, sin = self._model.decoder.rotary(self._positions(canvas, rows))
        keys_NLGK, values_NLGK = taken_NLGK
        for layer, (keys, values) in enumerate(zip(self._store.keys, self._store.values, strict=True)):
            keys.flatten(0, 1)[slots] = rotate(keys_NLGK[layer], cos, sin)
            values.flatten(0, 1)[slots] = values_NLGK[layer]

    def _positions(self, canvas: Canvas, rows: np.ndarray) -> Tensor:
        """Where ``rows`` stand for the rotary embedding, on each of the model's axes."""
        places, axes = canvas.rotary_positions(rows), self._model.position_axes
        if axes > 1:
            places = np.broadcast_to(places, (axes, places.shape[-1])).copy()
        return torch.from_numpy(places).to(self._model.device)

    def _make(self, encoded: Encoded, span: Span) -> Iterator[tuple[Tensor, Tensor]]:
        """K/V ``[L, G, K]`` of each layer of an image or clip alone, keys not yet rotated."""
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
        """What stands in front of an image, or a clip, with which a chat begins: int64 ids."""
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
            if placeholder not in ids:  # those of the request stood in its text
                raise FailedPrecondition(f"{unable}; ask without it")
            self._contexts[clip] = np.asarray(ids[: ids.index(placeholder)], dtype=np.int64)
        return self._contexts[clip]
