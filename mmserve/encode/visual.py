"""Images and clips to pruned visual tokens, each computed once: media files in, cached values out.

Shapes in names: K visual tokens after pruning, R rows of the prompt (visual tokens and text between them), D hidden.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from mmserve.config import MediaConfig
from mmserve.core.cached import Label
from mmserve.core.request import Amount, PixelRange, VideoSampling
from mmserve.core.share import MediaShare
from mmserve.encode.clip_encoder import VISUAL, ClipEncoder, ClipProgress, clip_file, ids_of, prepared_clip
from mmserve.encode.clip_parts import joined_parts, name_of, to_tensors
from mmserve.encode.decoders import Check, Decode, Decoders, InPlace
from mmserve.encode.places import axis_places
from mmserve.encode.slow_fast import DETAILS, chosen_frames, compacted, detailed_grids, details_of, fewest_pieces
from mmserve.encode.vision_source import VisionSource, frames_of
from mmserve.encode.visual_tokens import Visual, are_pixels, fitting, grid_of, pruned
from mmserve.encode.wire import MediaFile
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.models.base import EncoderModel
from mmserve.models.picture import CannotPrepare, Picture, Prepared, VisionEncoder
from mmserve.prune.base import Evidence, Pruner
from mmserve.tiers.caches import Caches
from mmserve.tiers.keys import digest, media_digest
from mmserve.tiers.memory import Entry, Labels


@dataclass(frozen=True)
class Media:
    """An image or a video of a request, and its encoding options."""

    data: bytes = field(repr=False)
    clip: bool
    path: str  # in the request message, for errors
    pruner: Pruner | None
    amount: Amount | None
    accompanied: bool  # also encoded by the companion
    among: bool = False  # one of several images, for models that prepare those differently
    cache: str = ""  # cache namespace of its tenant
    pixels: tuple[PixelRange, PixelRange] | None = None  # of images and of videos; None = the checkpoint's own
    sampling: VideoSampling | None = None  # sampling of a clip; None = the model's own settings


@dataclass
class Loaded:
    """A request's media after reading: inputs of the towers, or cached tokens."""

    items: Sequence[Media]
    keys: Sequence[bytes] = ()
    entries: Sequence[Entry | None] = ()  # tokens of each item, None = not cached
    prepared: dict[int, list[Prepared]] = field(default_factory=dict)  # pixels of the others, by source
    _held: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Release its references to cache entries."""
        self._held.close()
        self.prepared, self.entries = {}, ()


class MediaEncoder:
    """Runs the towers of a model and its companion, with a cache; has no per-request state."""

    def __init__(
        self, model: EncoderModel, media: MediaConfig, cache: Caches, decoders: Decoders | None = None
    ) -> None:
        self.media, self.cache = media, cache
        self._decoders = decoders or InPlace(media)
        self._source = VisionSource.of(model)
        self._second = VisionSource.of(model.companion) if model.companion is not None else None
        self._tower = threading.Lock()  # evidence is recorded for one run at a time

    def load(
        self,
        items: Sequence[Media],
        admit: Callable[[list[int]], None],
        check: Check = lambda: None,
        progress: ClipProgress | None = None,
    ) -> Loaded:
        """Read a request's items: each is decoded and prepared once for all requests, and referenced until closed.

        The frames of long clips run through the tower as they are decoded, reported to ``progress``. As items are read,
        ``admit`` is called with the number of prompt rows of each, 0 if unknown; its exceptions are raised here, as are
        those of ``check``, which is called between frames. Raises ``InvalidArgument`` for bad media.
        """
        loaded = Loaded(items, [self._key(item) for item in items])
        try:
            fits = self._fitting(items)
            loaded.entries = loaded._held.enter_context(
                self.cache.tokens.found(loaded.keys, fits, self._labels(items, loaded.keys))
            )
            for i, item in enumerate(items):
                if loaded.entries[i] is None and self._streams(item):
                    self._encode_clip(loaded, i, admit, check, progress)
            self._read(loaded, admit, check)
        except BaseException:
            loaded.close()
            raise
        return loaded

    @contextmanager
    def entries(
        self, loaded: Sequence[Loaded], admit: Callable[[list[int]], None], check: Check = lambda: None
    ) -> Iterator[list[tuple[bytes, Entry]]]:
        """As ``view``, in the cached form: each entry with its key."""
        flat = [(one, i) for one in loaded for i in range(len(one.items))]
        missing = [(one, i) for one, i in flat if one.entries[i] is None]
        keys, items = [one.keys[i] for one, i in missing], [one.items[i] for one, i in missing]

        def make(chosen: list[int]) -> list[Entry]:
            admit([self._rows_of(one, i) for one, i in flat])
            of_chosen = [missing[n] for n in chosen]
            return self._make([items[n] for n in chosen], [one.prepared[i] for one, i in of_chosen], check)

        with self.cache.tokens.lease(keys, make, self._fitting(items), check, self._labels(items, keys)) as entries:
            made = iter(entries)
            found = [one.entries[i] for one, i in flat]
            keyed = [one.keys[i] for one, i in flat]
            yield [(key, next(made) if entry is None else entry) for key, entry in zip(keyed, found, strict=True)]

    @contextmanager
    def view(
        self, loaded: Sequence[Loaded], admit: Callable[[list[int]], None], check: Check = lambda: None
    ) -> Iterator[list[Visual]]:
        """The visual tokens of each item of ``loaded``, which are not evicted until the context exits.

        Before a tower runs, ``admit`` is called with the number of prompt rows of each item; its exceptions are raised
        here. On a CPU, an item's tokens do not depend on the other items of a batch, and ``check`` is called between
        two items.
        """
        with self.entries(loaded, admit, check) as entries:
            yield [self._visual(entry) for _key, entry in entries]

    def part(self, item: Media, share: MediaShare, check: Check = lambda: None) -> dict[str, Entry]:
        """A part of a clip, by its name; if it is not divisible, the first part is the whole, and the others are
        empty."""
        encoder = self._clip_encoder(item) if self._streams(item) else None
        if encoder is not None and encoder.divisible:
            made = encoder.part(self._decoders, item.data, share, check)
            return {name_of(self._key(item), share.part): to_tensors(made, share.of)}
        if share.part:
            return {}
        with ExitStack() as stack:
            loaded = stack.enter_context(closing(self.load([item], lambda _rows: None, check)))
            entries = stack.enter_context(self.entries([loaded], lambda _rows: None, check))
            return {key.hex(): dict(entry) for key, entry in entries}

    def joined(self, items: Sequence[Media], name: str, parts: Mapping[int, Entry]) -> Entry | None:
        """The entry of the clip among ``items`` whose key has this name (hex), joined from its ``parts`` by number;
        None if they are incomplete."""
        item = next((each for each in items if each.clip and self._key(each).hex() == name), None)
        if item is None or self._source is None:
            return None
        found = joined_parts(parts, self._source.model.device)
        return None if found is None else self._entry(item, [self._clip_encoder(item).joined(found)])

    def _clip_encoder(self, item: Media) -> ClipEncoder:
        assert self._source is not None
        return ClipEncoder(self._source.model, self._source.vision, item.path, item.sampling, _needs(item), self._tower)

    def _streams(self, item: Media) -> bool:
        """Whether the frames of ``item`` run through the tower as they are decoded; not for clips of a single batch."""
        if not item.clip or len(self._sources(item)) > 1 or self._source is None:
            return False
        vision = self._source.vision
        chosen = chosen_frames(item.sampling, vision.frames_per_video, vision.frames_per_second, vision.own_frames)
        return vision.frames_at_once > 0 and (chosen.sampler is not None or chosen.frames > vision.frames_at_once)

    def _encode_clip(
        self, loaded: Loaded, i: int, admit: Callable[[list[int]], None], check: Check, progress: ClipProgress | None
    ) -> None:
        """Fill ``loaded.entries[i]`` for a clip that is decoded, prepared and encoded a few frames at a time."""
        item = loaded.items[i]

        def rows(count: int) -> None:
            admit([count if n == i else self._rows_of(loaded, n) for n in range(len(loaded.items))])

        def make(_chosen: list[int]) -> list[Entry]:
            picture = self._clip_encoder(item).picture(self._decoders, item.data, rows, check, progress)
            return [self._entry(item, [picture])]

        fits = self._fitting([item])
        labels = self._labels([item], [loaded.keys[i]])
        [entry] = loaded._held.enter_context(self.cache.tokens.lease([loaded.keys[i]], make, fits, check, labels))
        loaded.entries = [entry if n == i else one for n, one in enumerate(loaded.entries)]

    def _labels(self, items: Sequence[Media], keys: Sequence[bytes]) -> Labels:
        def label(i: int, entry: Entry) -> Label | None:
            if self._source is None:
                return None
            return Label("visual", self._source.model.spec.name, items[i].cache, len(entry["tokens"]), keys[i].hex())

        return label

    def _fitting(self, items: Sequence[Media]) -> Callable[[int, Entry], bool]:
        def fits(i: int, entry: Entry) -> bool:
            kinds = [(source.model.dtype, source.model.width) for source in self._sources(items[i])]
            return fitting(entry, kinds, axes=self._axes)

        return fits

    @property
    def _axes(self) -> int:
        return 1 if self._source is None else self._source.model.position_axes

    def _sources(self, item: Media) -> list[VisionSource]:
        """The sources that encode an item: the model and, if required, its companion."""
        return [source for source in (self._source, self._second if item.accompanied else None) if source is not None]

    def _key(self, item: Media) -> bytes:
        pruning = "" if item.pruner is None else repr((item.pruner, item.amount))
        return digest(self._file(item), pruning.encode(), *(source.tokens for source in self._sources(item)))

    def _file(self, item: Media) -> bytes:
        kind = "clip" if item.clip else "image among others" if item.among else "image"
        if item.pixels is not None:
            kind += f" {item.pixels[item.clip]!r}"
        if item.sampling is not None:
            kind += f" {item.sampling!r} {self.media.max_sampled_frames}"
        return media_digest(kind, item.data, self.media, item.cache)

    def _visual(self, entry: Entry) -> Visual:
        """A value with its tokens on the devices of their models; entries from disk are on the CPU."""
        tokens = [
            entry[name].to(source.model.device)
            for name, source in (("tokens", self._source), ("beside", self._second))
            if source is not None and name in entry
        ]
        companion_tokens = tokens[1] if len(tokens) > 1 else None
        where = entry["where"].numpy() if "where" in entry else None
        ids, places, grid = (entry[name].numpy() for name in ("ids", "places", "grid"))
        return Visual(tokens[0], ids, places, grid, companion_tokens, where)

    def _rows_of(self, loaded: Loaded, i: int) -> int:
        """Number of an item's prompt rows before pruning; 0 if it is not loaded."""
        entry = loaded.entries[i]
        if entry is not None:
            return len(entry["ids"])
        if i not in loaded.prepared:
            return 0
        assert self._source is not None
        prepared = loaded.prepared[i][0]
        pieces = self._source.vision.pieces(prepared, clip=loaded.items[i].clip)
        if DETAILS in prepared:
            pieces = fewest_pieces(pieces, detailed_grids(prepared[DETAILS], self._source.vision.frames_per_grid))
        return len(ids_of(pieces, self._source.model.tokenizer))

    def _make(self, items: list[Media], prepared: list[list[Prepared]], check: Check) -> list[Entry]:
        """Each item runs through the tower separately, so that its entry does not depend on its batch. On a GPU, images
        of equal size with the same evidence are batched, which saves time."""
        batches: dict[object, list[int]] = defaultdict(list)
        for i, (item, own) in enumerate(zip(items, prepared, strict=True)):
            alone = self._runs_alone(item)
            shapes = tuple((name, tensor.shape) for of_source in own for name, tensor in sorted(of_source.items()))
            batches[i if alone else None, _needs(item), shapes].append(i)
        entries: dict[int, Entry] = {}
        for batch in batches.values():
            check()
            pictures = self._pictures([items[i] for i in batch], [prepared[i] for i in batch])
            for i, of_each_source in zip(batch, pictures, strict=True):
                entries[i] = self._entry(items[i], of_each_source)
        return [entries[i] for i in range(len(items))]

    def _pictures(self, items: list[Media], prepared: list[list[Prepared]]) -> list[list[Picture]]:
        """Each item as encoded by each source; only the first source's evidence is used for pruning."""
        by_source: list[list[Picture]] = []
        for at, source in enumerate(self._sources(items[0])):
            model, wanted = source.model, frozenset() if at else _needs(items[0])
            batch = [{**p[at], "pixels": p[at]["pixels"].to(model.device, model.dtype)} for p in prepared]
            with self._tower:
                pictures = source.vision.encode(batch, wanted, clip=items[0].clip)
            by_source.append([_detailed(one, p[at], source.vision) for one, p in zip(pictures, prepared, strict=True)])
        return [list(of_item) for of_item in zip(*by_source, strict=True)]

    def _read(self, loaded: Loaded, admit: Callable[[list[int]], None], check: Check) -> None:
        """Fill ``loaded.prepared``."""
        missing = [i for i, entry in enumerate(loaded.entries) if entry is None]
        asked = [(i, source) for i in missing for source in self._sources(loaded.items[i])]
        keys = [self._pixel_key(loaded.items[i], source) for i, source in asked]

        def make(chosen: list[int]) -> list[Entry]:
            """Decode each file once for all sources; the sources of an item are consecutive in ``asked``."""
            of_item: dict[int, list[VisionSource]] = defaultdict(list)
            for n in chosen:
                of_item[asked[n][0]].append(asked[n][1])
            works = [partial(self._prepare, loaded.items[i], sources) for i, sources in of_item.items()]
            made: list[Entry] = []
            with closing(self._decoders.map(works, check)) as results:
                for i, prepared in zip(of_item, results, strict=True):
                    made += prepared
                    if len(prepared) == len(self._sources(loaded.items[i])):
                        loaded.prepared[i] = prepared
                    admit([self._rows_of(loaded, n) for n in range(len(loaded.items))])
                    if i != missing[-1] and self._can_encode_early(loaded, i):
                        admit([self._rows_of(loaded, n) or self._rows_of(loaded, i) for n in range(len(loaded.items))])
                        self._encode_early(loaded, i, check)
            return made

        lease = self.cache.pixels.lease(keys, make, are_pixels, check)
        found: dict[int, list[Prepared]] = defaultdict(list)
        for (i, _source), entry in zip(asked, loaded._held.enter_context(lease), strict=True):
            found[i].append(entry)
        loaded.prepared = dict(found)

    def _runs_alone(self, item: Media) -> bool:
        """Whether an item always runs through the tower separately, and not in a batch with others."""
        return item.clip or self._sources(item)[0].model.device.type == "cpu"

    def _can_encode_early(self, loaded: Loaded, i: int) -> bool:
        """Whether item ``i`` can run through the tower before the others are read: it is prepared for all sources and
        always runs separately, and the prompt's length is known, as all items are images with equal token counts."""
        if i not in loaded.prepared:
            return False
        same = self._source is not None and self._source.vision.tokens_per_image > 0
        return same and self._runs_alone(loaded.items[i]) and not any(item.clip for item in loaded.items)

    def _encode_early(self, loaded: Loaded, i: int, check: Check) -> None:
        """Fill ``loaded.entries[i]`` for a prepared item, while the pool decodes later ones."""
        item, key = loaded.items[i], loaded.keys[i]

        def make(_chosen: list[int]) -> list[Entry]:
            return self._make([item], [loaded.prepared[i]], check)

        lease = self.cache.tokens.lease([key], make, self._fitting([item]), check, self._labels([item], [key]))
        [entry] = loaded._held.enter_context(lease)
        loaded.entries = [entry if n == i else one for n, one in enumerate(loaded.entries)]

    def _pixel_key(self, item: Media, source: VisionSource) -> bytes:
        return digest(self._file(item), frames_of(source.vision) if item.clip else b"", source.pixels)

    def _prepare(self, item: Media, sources: list[VisionSource], decode: Decode) -> list[Prepared]:
        """An item prepared for each of ``sources``."""
        first = sources[0].vision
        visions = [source.vision if item.pixels is None else source.vision.within(*item.pixels) for source in sources]
        resizes = {source.vision.first_resize(clip=item.clip, among=item.among) for source in sources}
        resize = resizes.pop() if len(resizes) == 1 else None
        if item.clip:
            file = clip_file(item.data, item.path, item.sampling, first, resize)
        else:
            file = MediaFile(item.data, False, item.path, resize=resize)
        decoded = decode(file)
        try:
            if item.clip:
                details = details_of(item.sampling, decoded.details or (True,) * len(decoded.frames))
                extra = {} if all(details) else {DETAILS: torch.tensor(details)}
                return [
                    {**prepared_clip(vision, decoded.frames, decoded.seconds, decoded.length), **extra}
                    for vision in visions
                ]
            [image] = decoded.frames
            return [vision.prepare_among(image) if item.among else vision.prepare(image) for vision in visions]
        except CannotPrepare as error:
            raise InvalidArgument.of(item.path, str(error)) from error

    def _entry(self, item: Media, pictures: list[Picture]) -> Entry:
        """The pruned tokens of an item from each source; all use the plans of the first source."""
        assert self._source is not None
        own, plans = pictures[0], None
        if item.pruner is not None and item.amount is not None:
            plans = item.pruner.plans([grid.view for grid in own.grids], item.amount)
        ids = ids_of(own.pieces, self._source.model.tokenizer)
        tokens, chosen = pruned(own, plans)
        left = ids != VISUAL
        left[(ids == VISUAL).nonzero().flatten()[chosen]] = True
        entry = {"tokens": tokens, "ids": ids, "places": left.nonzero().flatten(), "grid": grid_of(own)[chosen]}
        if self._axes > 1:
            assert own.coordinates is not None
            entry["where"] = axis_places(ids == VISUAL, own.coordinates)
        if len(pictures) > 1:
            if len(pictures[1].tokens) != len(own.tokens):
                raise FailedPrecondition("the model and its companion make different numbers of visual tokens of this")
            entry["beside"] = pruned(pictures[1], plans)[0]
        return entry


def _needs(item: Media) -> frozenset[Evidence]:
    return item.pruner.needs if item.pruner is not None else frozenset()


def _detailed(picture: Picture, prepared: Prepared, vision: VisionEncoder) -> Picture:
    if DETAILS not in prepared:
        return picture
    return compacted(picture, detailed_grids(prepared[DETAILS], vision.frames_per_grid))
