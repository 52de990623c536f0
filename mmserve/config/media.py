"""``[media]``, ``[encoder_cache]`` and ``[video]``: limits of images, videos, their caches, and sessions."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.config.media_hosts import are_hosts
from mmserve.core.values import ABOVE_0, Range, at_least, value

_COUNT, _ANY = at_least(1), at_least(0)
_BYTES = at_least(0, meaning="nothing is kept")
_HOSTS = Range("host names, '*.NAME' for all subdomains, or addresses, each with or without a port", are_hosts)


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Limits of decoded and stored media."""

    max_item_bytes: int = value(32 << 20, _COUNT, "bytes of an image or video file")
    max_pixels: int = value(
        25_000_000, _COUNT, "pixels of an image, or of a frame of a video (24 megapixels, as of a camera)"
    )
    max_side: int = value(16_384, _COUNT, "pixels of one side of an image or a frame")
    max_images: int = value(16, _ANY, "images in a request")
    max_videos: int = value(2, _ANY, "videos in a request")
    max_video_seconds: float = value(60.0, _ANY, "length of a video, in seconds")
    max_video_pixels: int = value(
        4_000_000_000, _ANY, "pixels of all frames of a video together (a minute of 1920 x 1080 at 30 frames a second)"
    )
    max_sampled_pixels: int = value(
        134_000_000, _ANY, "pixels of all frames of a video that the model sees (64 frames of 1920 x 1080)"
    )
    max_sampled_frames: int = value(
        768, _COUNT, "frames of a video that the model sees, where a request sets video_sampling"
    )
    decode_workers: int = value(2, _COUNT, "processes that decode images and videos, each one item at a time")
    decode_threads: int = value(2, _COUNT, "threads of such a process for a long video")
    decode_seconds: float = value(10.0, _COUNT, "processor time to decode one item, in seconds")
    decode_bytes: int = value(512 << 20, _COUNT, "decoded pixels of all requests held at once, 4 bytes a pixel")
    store_bytes: int = value(256 << 20, _ANY, "uploaded media that are kept; the least recently used are dropped first")
    live_bytes: int = value(
        1 << 30, _COUNT, "files and long texts of all requests in progress; more is refused with RESOURCE_EXHAUSTED"
    )
    url_hosts: tuple[str, ...] = value(
        (),
        _HOSTS,
        "hosts whose http and https URLs are fetched, on ports 80 and 443 or the port given here; only public "
        "addresses, and addresses listed here",
    )
    url_seconds: float = value(
        10.0, ABOVE_0, "time to fetch a file, in seconds, with redirects and the wait for a free place"
    )
    url_fetches: int = value(16, _COUNT, "files fetched at once; further ones wait")


@dataclass(frozen=True, kw_only=True)
class EncoderCacheConfig:
    """Sizes of media caches in bytes, with LRU eviction."""

    token_bytes: int = value(256 << 20, _BYTES, "visual tokens")
    pixel_bytes: int = value(64 << 20, _BYTES, "preprocessed pixels: used when the same media come with another pruner")
    kv_bytes: int = value(256 << 20, _BYTES, "K/V for requests with image_reuse, on the models' devices")
    disk_folder: str = value(
        "", meaning="folder where visual tokens are kept over restarts; processes of a host can share it; empty = none"
    )
    disk_bytes: int = value(1 << 30, _BYTES, "size of that folder")


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Video sessions: their number, and the limits of each."""

    max_sessions: int = value(64, _COUNT, "sessions open at once")
    session_bytes: int = value(256 << 20, _COUNT, "K/V, features and initialisation segment of one session")
    total_bytes: int = value(
        2 << 30, _COUNT, "the same for all sessions of a model; more is refused with RESOURCE_EXHAUSTED"
    )
    sessions_per_tenant: int = value(0, _ANY, "sessions of one tenant; 0 = max_sessions")
    resume_seconds: float = value(60.0, _ANY, "time that a session is kept after its connection is lost")
    idle_seconds: float = value(
        300.0, _COUNT, "a session ends after this time without a message and without a question in progress"
    )
    max_questions: int = value(8, _COUNT, "concurrent questions of a session")
    max_watches: int = value(32, _ANY, "standing questions of a session")
    credit_pushes: int = value(32, _COUNT, "pushes of a session that can wait to be decoded")
    credit_bytes: int = value(8 << 20, _COUNT, "bytes of these pushes together, and of the largest push")
    waiting_frames: int = value(16, _COUNT, "decoded frames of a session that can wait for the model")
    waiting_bytes: int = value(64 << 20, _COUNT, "bytes of these frames, 4 a pixel")
    frames_under_way: int = value(4, _COUNT, "frames of a session that the model processes at once")
    outbox_bytes: int = value(
        4 << 20, _COUNT, "responses that a client has not read; as many bytes again are kept for a resume"
    )
