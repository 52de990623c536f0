"""A model's vision encoder, with digests of the inputs of its pixels and visual tokens for cache keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from mmserve.models.base import EncoderModel
from mmserve.models.picture import VisionEncoder
from mmserve.tiers.keys import digest, settings_digest, software, weights_digest


@dataclass(frozen=True)
class VisionSource:
    """A model's vision encoder, and digests of everything that affects its pixels and tokens, for cache keys."""

    model: EncoderModel
    vision: VisionEncoder
    pixels: bytes
    tokens: bytes

    @classmethod
    def of(cls, model: EncoderModel) -> Self | None:
        """The source of ``model``; None if it has no vision encoder."""
        vision = model.vision
        if vision is None:
            return None
        settings = vision.settings()
        computes = f"{model.dtype} {model.device.type}".encode()
        spelling = model.tokenizer.backend_tokenizer.to_str().encode()  # affects the text between visual tokens
        frames = frames_of(vision)
        tokens = digest(weights_digest(vision), settings_digest(settings), computes, spelling, frames, software())
        return cls(model, vision, digest(settings_digest(settings["processor"]), software()), tokens)


def frames_of(vision: VisionEncoder) -> bytes:
    """Digest input: all settings that determine the default sampling of a video file."""
    return repr((vision.frames_per_video, vision.frames_per_second, vision.own_frames)).encode()
