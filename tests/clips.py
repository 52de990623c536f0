"""Video files made in memory, and a tiny model that takes them."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import torch
from helpers import tiny_model
from PIL import Image
from tokenizers import AddedToken

from mmserve.config import MediaConfig
from mmserve.encode.video import read_video
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import Decoder
from mmserve.models.vision import LlavaVision, VideoSettings

SIZE = (64, 48)  # pixels


@dataclass(frozen=True)
class Clip:
    """Frames of a video in order, mode RGB, upright, all as large as they were; ``seconds`` since its first frame."""

    frames: tuple[Image.Image, ...]
    seconds: tuple[float, ...]


def decode_video(data: bytes, limits: MediaConfig, *, frames: int, rate: float = 0.0, field: str = "video") -> Clip:
    """A file's frames as ``read_video`` yields them."""
    seconds, images = zip(*read_video(data, limits, frames=frames, rate=rate, field=field), strict=True)
    return Clip(images, seconds)


def frame_tokens(vision: LlavaVision, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Visual tokens ``[n, D]`` of each of a clip's frames, ``pixels [frames, 3, height, width]``."""
    clip = {"pixels": pixels, "seconds": torch.zeros(len(pixels), dtype=torch.float64)}
    [seen] = vision.encode([clip], frozenset(), clip=True)
    return list(seen.tokens.split([piece for piece in seen.pieces if isinstance(piece, int)]))


@cache
def _noise(size: tuple[int, int]) -> np.ndarray:
    width, height = size
    noise = np.random.default_rng(0).integers(0, 256, (height // 4 + 1, width // 4 + 400, 3), dtype=np.uint8)
    return noise.repeat(4, 0).repeat(4, 1)[:height]


def still(index: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """Frame ``index``: blocks of noise that pan, so that encoders find motion worth a B-frame."""
    return np.ascontiguousarray(_noise(size)[:, 2 * index : 2 * index + size[0]])


def clip(
    kind: str = "mp4",
    codec: str = "libx264",
    *,
    frames: int = 40,
    gop: int = 8,
    rate: int = 10,
    size: tuple[int, int] = SIZE,
    times: Sequence[int] | None = None,
    matrix: Sequence[int] | None = None,
    sound: bool = False,
    **options: str,
) -> bytes:
    """A video file with B-frames where the codec has them; ``times`` are in units of 1 / ``rate`` seconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options={k: v for k, v in options.items() if k == "movflags"}) as container:
        settings = {"bf": "3", "g": str(gop), **{k: v for k, v in options.items() if k != "movflags"}}
        stream: Any = container.add_stream(codec, rate=rate, options=settings)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.thread_count = 1  # the same pictures give the same bytes
        if matrix is not None:
            stream.set_display_matrix(matrix)
        audio = container.add_stream("aac", rate=8000) if sound else None
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(still(index, size), format="rgb24")
            frame.pts, frame.time_base = (index if times is None else times[index]), Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if audio is not None:
            _write_silence(container, audio)
    return file.getvalue()


def pictures_of(data: bytes) -> bytes:
    """The same Matroska file without its sound, packet for packet."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                container.mux(packet)
    return file.getvalue()


def silence() -> bytes:
    """An MP4 with sound alone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        _write_silence(container, container.add_stream("aac", rate=8000))
    return file.getvalue()


def _write_silence(container: Any, stream: Any) -> None:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), dtype=np.float32), format="fltp", layout="mono")
    frame.rate, frame.pts = 8000, 0
    container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def all_frames(data: bytes) -> list[np.ndarray]:
    """Every frame of a file, decoded one after the other."""
    with av.open(io.BytesIO(data)) as container:
        return [np.asarray(frame.to_image()) for frame in container.decode(video=0)]


def video_model(**settings: Any) -> LoadedModel:
    """The tests' tiny model with four patches a frame, taking videos as ``settings`` of ``VideoSettings`` say."""
    model = tiny_model(vision=True)
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens([AddedToken("<video>", special=True, normalized=False)], special_tokens=True)
    video = tokenizer.convert_tokens_to_ids("<video>")
    spec = replace(model.spec, video_id=video, banned_ids=(*model.spec.banned_ids, video))
    vision = model.vision
    assert isinstance(vision, LlavaVision)
    vision.video = VideoSettings(**{"frames": 4, "stride": 2, "mode": "average", **settings})
    vision.frames_per_video = vision.video.frames
    return replace(model, spec=spec, tokenizer=tokenizer, decoder=_with_room(model.decoder, len(tokenizer)))


def _with_room(decoder: Decoder, tokens: int) -> Decoder:
    """The decoder with embeddings for so many tokens, the new ones zero."""
    wider = Decoder(replace(decoder.config, vocab_size=tokens))
    for name, weight in wider.named_parameters():
        old = decoder.get_parameter(name)
        weight.data = torch.zeros_like(weight)
        weight.data[: len(old)] = old
    return wider.eval().requires_grad_(False)
