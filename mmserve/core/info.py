"""What a served model tells about itself: plain data, the same on the server and in the client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Capabilities, limits and defaults of one model.

    Limits count tokens (``max_tokens``: prompt and answer of one request) and bytes; ``visual_tokens_per_image`` is
    0 where it depends on the image. A video is sampled at ``frames_per_video`` frames and may last
    ``max_video_seconds``. Policies go by their registered names.
    """

    name: str
    architecture: str
    images: bool
    videos: bool
    diffusion: bool
    recompute_policies: tuple[str, ...]
    commit_policies: tuple[str, ...]
    max_tokens: int
    max_images: int
    visual_tokens_per_image: int
    max_image_bytes: int
    max_videos: int  # a request
    frames_per_video: int  # 0 without videos
    max_video_seconds: float
    max_video_bytes: int
    max_new_tokens: int
    block_length: int
    recompute_policy: str
    commit_policy: str
    parameters: int
    dtype: str
    device: str
