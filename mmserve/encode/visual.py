"""Images and clips to pruned visual tokens, each made once: media files in, cached values out.

Shapes in names: K visual tokens that are left, F tiles (an image is one, a clip has one a frame), D hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmserve.config import MediaConfig
from mmserve.core.request import Amount
from mmserve.encode.cache import EncoderCache, Entry
from mmserve.encode.keys import digest, media_digest, settings_digest, software, weights_digest
from mmserve.encode.media import decode_image
from mmserve.encode.video import decode_video
from mmserve.errors import FailedPrecondition
from mmserve.models.base import Model, Tile, VisionEncoder
from mmserve.prune.base import Evidence, Plan, Pruner

#: What a cached value holds beside tokens; see ``Visual``.
_ARRAYS = ("places", "patch", "kept", "before", "seconds")


@dataclass(frozen=True)
class Media:
    """An image or a video of a request, and what is wanted of it."""

    data: bytes = field(repr=False)
    clip: bool
    path: str  # in the request message, for errors
    pruner: Pruner | None
    amount: Amount | None
    accompanied: bool  # the companion looks at it, too


@dataclass(frozen=True)
class Visual:
    """The visual tokens of one image or clip, as the cache has them: not to be changed."""

    tokens_KD: Tensor
    places_K: np.ndarray  # int64: where each stood in its tile before pruning
    patch_K: np.ndarray  # bool: which may be pruned; not a class token or a separator
    kept_F: np.ndarray  # int64: tokens that each tile has left
    before_F: np.ndarray  # int64: and had
    seconds_F: np.ndarray  # float64: since the clip's start
    beside_KD: Tensor | None  # the companion's, in the same places


@dataclass(frozen=True)
class _Eye:
    """A model that looks at media: what it sees with, and digests of what decides the pixels and the tokens."""

    model: Model
    vision: VisionEncoder
    pixels: bytes
    tokens: bytes

    @classmethod
    def of(cls, model: Model) -> Self | None:
        vision = model.vision
        if vision is None:
            return None
        settings = vision.settings()
        computes = f"{model.dtype} {model.device.type}".encode()
        tokens = digest(weights_digest(vision), settings_digest(settings), computes, software())
        return cls(model, vision, digest(settings_digest(settings["processor"]), software()), tokens)


class Viewer:
    """The towers of a model and its companion over a cache; holds no state of any request."""

    def __init__(self, model: Model, media: MediaConfig, cache: EncoderCache) -> None:
        self.media, self.cache = media, cache
        self._eye = _Eye.of(model)
        self._second = _Eye.of(model.companion) if model.companion is not None else None

    @contextmanager
    def view(self, items: Sequence[Media]) -> Iterator[list[Visual]]:
        """The visual tokens of each item, which stay in the cache until the context ends.

        On a CPU, what stands beside an item has no say in its tokens. Raises ``InvalidArgument`` for bad media.
        """

        def make(chosen: list[int]) -> list[Entry]:
            return self._make([items[i] for i in chosen])

        def fits(i: int, entry: Entry) -> bool:
            return fitting(entry, [(eye.model.dtype, eye.model.width) for eye in self._eyes(items[i])])

        with self.cache.tokens.lease([self._key(item) for item in items], make, fits) as entries:
            yield [self._visual(entry) for entry in entries]

    def _eyes(self, item: Media) -> list[_Eye]:
        """What looks at an item: the model and, where it is asked for, its companion."""
        return [eye for eye in (self._eye, self._second if item.accompanied else None) if eye is not None]

    def _key(self, item: Media) -> bytes:
        pruning = "" if item.pruner is None else repr((item.pruner, item.amount))
        return digest(self._file(item), pruning.encode(), *(eye.tokens for eye in self._eyes(item)))

    def _file(self, item: Media) -> bytes:
        return media_digest("clip" if item.clip else "image", item.data, self.media)

    def _visual(self, entry: Entry) -> Visual:
        """A value whose tokens are where their models are, which those from disk are not."""
        places, patch, kept, before, seconds = (entry[name].numpy() for name in _ARRAYS)
        tokens = [
            entry[name].to(eye.model.device)
            for name, eye in (("tokens", self._eye), ("beside", self._second))
            if eye is not None and name in entry
        ]
        return Visual(tokens[0], places, patch, kept, before, seconds, tokens[1] if len(tokens) > 1 else None)

    def _make(self, items: list[Media]) -> list[Entry]:
        """Each item goes through the tower alone, so that what is kept does not depend on what came with it. On a GPU,
        images of one size that are asked for the same evidence go together: there that saves time."""
        seen = [self._pixels(item) for item in items]
        batches: dict[object, list[int]] = defaultdict(list)
        for i, (item, (pixels, _seconds)) in enumerate(zip(items, seen, strict=True)):
            alone = item.clip or self._eyes(item)[0].model.device.type == "cpu"
            batches[i if alone else None, _needs(item), tuple(p.shape for p in pixels)].append(i)
        entries: dict[int, Entry] = {}
        for batch in batches.values():
            tiles = self._tiles([items[i] for i in batch], [seen[i][0] for i in batch])
            for i, of_each_eye in zip(batch, tiles, strict=True):
                entries[i] = _entry(items[i], of_each_eye, seen[i][1])
        return [entries[i] for i in range(len(items))]

    def _tiles(self, items: list[Media], pixels: list[list[Tensor]]) -> list[list[list[Tile]]]:
        """Of each item, its tiles by each eye; only the first one's are judged."""
        found: list[list[list[Tile]]] = [[] for _ in items]
        for at, eye in enumerate(self._eyes(items[0])):
            stacked = torch.cat([p[at] for p in pixels]).to(eye.model.device, eye.model.dtype)
            wanted = frozenset() if at else _needs(items[0])
            tiles = iter(eye.vision.tiles(stacked, wanted, clip=items[0].clip))
            for mine, p in zip(found, pixels, strict=True):
                mine.append([next(tiles) for _ in p[at]])
        return found

    def _pixels(self, item: Media) -> tuple[list[Tensor], Tensor]:
        """Pixels ``[F, 3, height, width]`` as each eye takes them, and the frames' seconds (float64)."""
        decoded: list[tuple[Sequence[Image.Image], Sequence[float]]] = []  # once for all of them
        found: list[Entry] = []
        for eye in self._eyes(item):
            frames = eye.vision.frames_per_video if item.clip else 1

            def make(_chosen: list[int], eye: _Eye = eye, frames: int = frames) -> list[Entry]:
                if not decoded:
                    decoded.append(self._decode(item, frames))
                pictures, seconds = decoded[0]
                pixels = torch.stack([eye.vision.prepare(picture) for picture in pictures])
                return [{"pixels": pixels, "seconds": torch.tensor(seconds, dtype=torch.float64)}]

            key = digest(self._file(item), str(frames).encode(), eye.pixels)
            with self.cache.pixels.lease([key], make, _are_pixels) as entries:
                found += entries
        return [entry["pixels"] for entry in found], found[0]["seconds"]

    def _decode(self, item: Media, frames: int) -> tuple[Sequence[Image.Image], Sequence[float]]:
        if item.clip:
            clip = decode_video(item.data, self.media, frames=frames, field=item.path)
            return clip.frames, clip.seconds
        return [decode_image(item.data, self.media, field=item.path)], [0.0]


def fitting(entry: Entry, kinds: Sequence[tuple[torch.dtype, int]]) -> bool:
    """Whether ``entry`` has all that a ``Visual`` has, each of the right type and size and in range.

    ``kinds``: type and width of the tokens of each model that looked.
    """
    token_names = ("tokens", "beside")[: len(kinds)]
    if set(entry) != {*_ARRAYS, *token_names}:
        return False
    places, patch, kept, before, seconds = (entry[name] for name in _ARRAYS)
    if any(t.dtype != torch.int64 or t.dim() != 1 for t in (places, kept, before)):
        return False
    if not len(kept) == len(before) == len(seconds) or bool((kept < 0).any()) or int(kept.sum()) != len(places):
        return False
    if patch.dtype != torch.bool or patch.shape != places.shape:
        return False
    if bool((places < 0).any()) or bool((places >= before.repeat_interleave(kept)).any()):
        return False
    if any(bool((part.diff() <= 0).any()) for part in places.split(kept.tolist())):
        return False
    tokens = [entry[name] for name in token_names]
    return all(
        t.dtype == dtype and t.shape == (len(places), width) for t, (dtype, width) in zip(tokens, kinds, strict=True)
    )


def _are_pixels(_i: int, entry: Entry) -> bool:
    pixels, seconds = entry.get("pixels"), entry.get("seconds")
    if pixels is None or seconds is None:
        return False
    return pixels.dim() == 4 and pixels.dtype == torch.float32 and len(seconds) == len(pixels)


def _needs(item: Media) -> frozenset[Evidence]:
    return item.pruner.needs if item.pruner is not None else frozenset()


def _entry(item: Media, tiles: list[list[Tile]], seconds: Tensor) -> Entry:
    """What is left of an item's tiles, by each eye; what the first one's lose, the others' lose, too."""
    own = tiles[0]
    plans: Sequence[Plan | None] = [None] * len(own)
    if item.pruner is not None and item.amount is not None:
        plans = item.pruner.plans([tile.look for tile in own], item.amount)
    pruned = [_pruned(tile, plan) for tile, plan in zip(own, plans, strict=True)]
    entry = {
        "tokens": torch.cat([tokens for tokens, _places in pruned]),
        "places": torch.cat([places for _tokens, places in pruned]),
        "patch": torch.cat([torch.isin(p, t.patches) for (_tokens, p), t in zip(pruned, own, strict=True)]),
        "kept": torch.tensor([len(places) for _tokens, places in pruned]),
        "before": torch.tensor([len(tile.tokens) for tile in own]),
        "seconds": seconds.clone(),
    }
    if len(tiles) > 1:
        if [len(tile.tokens) for tile in tiles[1]] != entry["before"].tolist():
            raise FailedPrecondition("the model and its companion make different numbers of visual tokens of this")
        entry["beside"] = torch.cat([_pruned(tile, plan)[0] for tile, plan in zip(tiles[1], plans, strict=True)])
    return entry


def _pruned(tile: Tile, plan: Plan | None) -> tuple[Tensor, Tensor]:
    """The tokens ``[k, D]`` that are left of a tile, and where they stood (int64, on the CPU)."""
    if plan is None:
        return tile.tokens, torch.arange(len(tile.tokens))
    patches = tile.patches
    left = plan.apply(tile.tokens[patches.to(tile.tokens.device)])
    rest = torch.ones(len(tile.tokens), dtype=torch.bool)
    rest[patches] = False
    others = rest.nonzero().flatten()
    places = torch.cat([patches[plan.places.cpu()], others])
    order = places.argsort()
    tokens = torch.cat([left, tile.tokens[others.to(tile.tokens.device)]])
    return tokens[order.to(tokens.device)], places[order]
