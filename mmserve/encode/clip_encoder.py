"""Clips whose frames run through the tower as they are decoded: overlapped decoding and encoding, with equal
results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mmserve.core.request import VideoSampling
from mmserve.core.share import MediaShare
from mmserve.encode.child import Planned
from mmserve.encode.decoders import Check, Decoders
from mmserve.encode.sampling import FixedRate, ProcessorFrames, Sampled, unpacked
from mmserve.encode.slow_fast import chosen_frames, compacted, detailed_grids, details_of
from mmserve.encode.wire import MediaFile
from mmserve.errors import InvalidArgument
from mmserve.models.base import EncoderModel
from mmserve.models.picture import CannotPrepare, Picture, Prepared, Resize, Text, Tile, VisionEncoder
from mmserve.prune.base import Evidence

#: In a row of ids: a visual token.
VISUAL = -1


class ClipProgress(Protocol):
    """Receives a clip while it is read; only used if the clip is not pruned afterwards."""

    def planned(self, ids_R: np.ndarray) -> None:
        """Called with the clip's row (int64, ``VISUAL`` for each visual token), before decoding starts."""
        ...

    def arrived(self, tokens_kD: Tensor) -> None:
        """Called with the visual tokens of the next frames, in order."""
        ...


@dataclass(frozen=True)
class _Part:
    """Frames prepared for the tower."""

    prepared: Prepared
    seconds: tuple[float, ...]
    details: tuple[bool, ...]


@dataclass(frozen=True)
class ClipPart:
    """Consecutive frames of a clip after the tower: for each its tile, its ``seconds`` and whether it is in detail.

    ``length``: seconds of the whole file; ``planned``: times of all frames of the whole clip, None if they depend on
    the contents.
    """

    tiles: tuple[Tile, ...]
    seconds: tuple[float, ...]
    details: tuple[bool, ...]
    length: float
    planned: tuple[float, ...] | None


@dataclass(frozen=True)
class ClipEncoder:
    """Encodes a clip. ``tower`` is locked while the tower runs; ``field``: of the request, for errors."""

    model: EncoderModel
    vision: VisionEncoder
    field: str
    sampling: VideoSampling | None
    wanted: frozenset[Evidence]
    tower: threading.Lock

    def picture(
        self, decoders: Decoders, data: bytes, rows: Callable[[int], None], check: Check, progress: ClipProgress | None
    ) -> Picture:
        """The clip as returned by ``VisionEncoder.encode``, with some of its frames compact.

        ``rows`` is called with a lower bound of the number of its prompt rows, whenever that increases. ``check`` is
        called between frames. Raises the exceptions of both, and ``InvalidArgument`` for a bad file.
        """

        def planned(plan: Planned) -> None:
            if plan.seconds is not None:
                self._plan(plan.seconds, plan.length, rows, progress)

        def arrived(so_far: int, new: Sequence[Tile]) -> None:
            rows(so_far)
            if progress is not None:
                progress.arrived(torch.cat([tile.tokens for tile in new]))

        return self.joined([self._read(decoders, self._file(data), check, planned, arrived)])

    def part(self, decoders: Decoders, data: bytes, share: MediaShare, check: Check) -> ClipPart:
        """The result of one of several encoders for its frames of a clip; raises as ``picture``.

        Parts are split between batches of the tower, so that each batch is the same as in the whole clip.
        """
        file = replace(self._file(data), part=(share.part, share.of, self.vision.frames_at_once))
        return self._read(decoders, file, check, lambda _plan: None, lambda _so_far, _new: None)

    def joined(self, parts: Sequence[ClipPart]) -> Picture:
        """The clip from its ``parts``, in order."""
        seconds = [at for part in parts for at in part.seconds]
        details = details_of(self.sampling, [detail for part in parts for detail in part.details])
        tiles = [tile for part in parts for tile in part.tiles]
        picture = self.vision.clip_of(tiles, self._labels(seconds), parts[0].length)
        return picture if all(details) else compacted(picture, detailed_grids(torch.tensor(details), 1))

    @property
    def divisible(self) -> bool:
        """Whether several encoders can share the clip: its frames are selected by time only, and encoded in small
        batches."""
        chosen = self._file(b"").sampler
        by_time = chosen is None or isinstance(unpacked(chosen), FixedRate | ProcessorFrames)
        return by_time and self.vision.frames_at_once > 0 and not self.wanted

    def _file(self, data: bytes) -> MediaFile:
        resize = self.vision.first_resize(clip=True, among=False)
        window = 1 if resize is not None else self.vision.frames_at_once + 1
        return clip_file(data, self.field, self.sampling, self.vision, resize, window)

    def _read(
        self,
        decoders: Decoders,
        file: MediaFile,
        check: Check,
        planned: Callable[[Planned], None],
        arrived: Callable[[int, Sequence[Tile]], None],
    ) -> ClipPart:
        """The frames of ``file``; ``arrived`` is called with the number of frames so far, and the new ones."""
        tiles: list[Tile] = []
        seconds: list[float] = []
        details: list[bool] = []
        plan = Planned(None, 0.0)
        try:
            with closing(decoders.chunks(file, self.vision.frames_at_once, self._prepared, check)) as chunks:
                for chunk in chunks:
                    check()
                    if isinstance(chunk, Planned):
                        plan = chunk
                        planned(plan)
                        continue
                    new = self._run_tower(chunk.prepared)
                    tiles += new
                    seconds += chunk.seconds
                    details += chunk.details
                    arrived(len(tiles), new)
        except CannotPrepare as error:
            raise InvalidArgument.of(self.field, str(error)) from error
        return ClipPart(tuple(tiles), tuple(seconds), tuple(details), plan.length, plan.seconds)

    def _plan(
        self, seconds: Sequence[float], length: float, rows: Callable[[int], None], progress: ClipProgress | None
    ) -> None:
        """Reject a clip early if it will be too long, and inform ``progress``."""
        every = None if self.sampling is None else self.sampling.detail_every
        if every not in (None, 1):
            rows(len(seconds))
            return
        whole = torch.tensor(length, dtype=torch.float64)
        outline = {"pixels": torch.empty(len(seconds), 0), "seconds": self._labels(seconds), "length": whole}
        ids = ids_of(self.vision.pieces(outline, clip=True), self.model.tokenizer)
        rows(len(ids))
        if progress is not None:
            progress.planned(ids.numpy())

    def _labels(self, seconds: Sequence[float]) -> Tensor:
        return torch.tensor([self.vision.label_seconds(at) for at in seconds], dtype=torch.float64)

    def _prepared(self, frames: list[Sampled]) -> _Part:
        seconds = tuple(frame.seconds for frame in frames)
        prepared = prepared_clip(self.vision, [frame.image for frame in frames], seconds)
        return _Part(prepared, seconds, tuple(frame.detail for frame in frames))

    @torch.inference_mode()
    def _run_tower(self, prepared: Prepared) -> list[Tile]:
        pixels = prepared["pixels"].to(self.model.device, self.model.dtype)
        with self.tower:
            return self.vision.encode_frames({**prepared, "pixels": pixels}, self.wanted)


def clip_file(
    data: bytes,
    name: str,
    sampling: VideoSampling | None,
    vision: VisionEncoder,
    resize: Resize | None,
    window: int = 0,
) -> MediaFile:
    """A clip with the frames selected by ``sampling``, or by default by ``vision``."""
    chosen = chosen_frames(sampling, vision.frames_per_video, vision.frames_per_second, vision.own_frames)
    return MediaFile(data, True, name, chosen.frames, chosen.rate, resize, sampler=chosen.sampler, window=window)


def prepared_clip(
    vision: VisionEncoder, frames: Sequence[Image.Image], seconds: Sequence[float], length: float | None = None
) -> Prepared:
    """Frames of a clip, ``seconds`` after its start, prepared with the labels used in the model's training."""
    return vision.prepare_clip(frames, [vision.label_seconds(at) for at in seconds], length=length)


def ids_of(pieces: Sequence[Text | int], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The row of ids (int64) of a picture with these ``pieces``, ``VISUAL`` for each visual token."""
    row: list[int] = []
    for piece in pieces:
        match piece:
            case int(count):
                row += [VISUAL] * count
            case str(text):
                row += tokenizer.encode(text, add_special_tokens=False)
            case ids:
                row += ids
    return torch.tensor(row, dtype=torch.int64)
