"""Vision parameters in messages: pixel limits, pruning of visual tokens, and video frames."""

from __future__ import annotations

from collections.abc import Iterator

from mmserve.config import MediaConfig
from mmserve.core.options import AMOUNTS, PIXELS, Amounts, Pixels
from mmserve.core.request import Amount, PixelRange, VideoSampling, Vision
from mmserve.core.values import wrong
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.plain import from_message


def wrong_vision(vision: pb.VisionParams) -> Iterator[tuple[str, str]]:
    """Yields the violations of pixel limits and pruning amount that are independent of model and pruner."""
    asked = {name: getattr(vision, name) for name in (*PIXELS, *AMOUNTS) if vision.HasField(name)}
    for kind in (Pixels, Amounts):
        for name, rule in wrong(kind, asked):
            yield f"vision.{name}", rule
    for of in ("", "video_"):
        least, most = asked.get(f"{of}min_pixels", 0), asked.get(f"{of}max_pixels")
        if most is not None and least > most:
            yield f"vision.{of}min_pixels", f"must be at most {of}max_pixels, which is {most}"


def parse_vision(vision: pb.VisionParams) -> Vision:
    """The core form of ``vision``."""
    amount = vision.WhichOneof("amount")
    pixels = [int(getattr(vision, name)) if vision.HasField(name) else None for name in PIXELS]
    return Vision(
        pruner=vision.WhichOneof("pruner") or "none",
        amount=None if amount is None else Amount(amount, getattr(vision, amount)),
        images=PixelRange(*pixels[:2]),
        videos=PixelRange(*pixels[2:]),
    )


def wrong_video_sampling(sampling: pb.VideoSampling, path: str, limits: MediaConfig) -> Iterator[tuple[str, str]]:
    """Yields the violations of ``sampling``: field, prefixed by ``path``, and what it must be."""
    given = from_message(VideoSampling, sampling)
    asked = {name: number for name, number in vars(given).items() if number is not None}
    for name, rule in wrong(VideoSampling, asked):
        yield f"{path}.{name}", rule
    if given.frames is not None and given.frames > limits.max_sampled_frames:
        most = f"{limits.max_sampled_frames} ([media] max_sampled_frames of the server)"
        yield f"{path}.frames", f"must be at least 1 and at most {most}, not {given.frames}"
    if given.frames is not None and (given.fps is not None or given.scenes):
        yield f"{path}.frames", "must not be set with fps, scene_similarity or scene_frames: they are other rules"


def parse_video_sampling(video: pb.Video) -> VideoSampling | None:
    """The core form of a video's sampling; None if it is empty."""
    found = from_message(VideoSampling, video.sampling)
    return None if found == VideoSampling() else found
