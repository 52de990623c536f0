"""Where visual tokens come from: a model's vision encoder, and what its pixels and visual tokens depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from mmserve.models.base import EncoderModel
from mmserve.models.picture import VisionEncoder
from mmserve.tiers.keys import digest, settings_digest, software, weights_digest


@dataclass(frozen=True)
class VisionSource:
    """A model's vision encoder, and digests of what decides the pixels and the tokens: keys of caches."""

    model: EncoderModel
    vision: VisionEncoder
    pixels: bytes
    tokens: bytes

    @classmethod
    def of(cls, model: EncoderModel) -> Self | None:
        """That of ``model``; None where it has no vision encoder."""
        vision = model.vision
        if vision is None:
            return None
        settings = vision.settings()
        computes = f"{model.dtype} {model.device.type}".encode()
        spelling = model.tokenizer.backend_tokenizer.to_str().encode()  # of the text between visual tokens
        frames = frames_of(vision)
        tokens = digest(weights_digest(vision), settings_digest(settings), computes, spelling, frames, software())
        return cls(model, vision, digest(settings_digest(settings["processor"]), software()), tokens)


def frames_of(vision: VisionEncoder) -> bytes:
    """All that decides which frames of a video file are sampled by default."""
    return repr((vision.frames_per_video, vision.frames_per_second, vision.own_frames)).encode()
