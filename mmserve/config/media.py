"""``[media]``, ``[encoder_cache]`` and ``[video]``: what is decoded and kept of images, videos and sessions."""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.config.media_hosts import are_hosts
from mmserve.core.values import ABOVE_0, Range, at_least, value

_COUNT, _ANY = at_least(1), at_least(0)
_BYTES = at_least(0, meaning="that nothing is kept")
_HOSTS = Range("hosts: names, '*.' and a name for all below it, or addresses, each with a port or without", are_hosts)


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Limits on what is decoded and kept."""

    max_item_bytes: int = value(32 << 20, _COUNT, "bytes of an image or video file")
    max_pixels: int = value(25_000_000, _COUNT, "of an image, or of a frame of a video (a camera's 24 megapixels)")
    max_side: int = value(16_384, _COUNT, "pixels of a side")
    max_images: int = value(16, _ANY, "images of a request")
    max_videos: int = value(2, _ANY, "videos of a request")
    max_video_seconds: float = value(60.0, _ANY, "length of a video")
    max_video_pixels: int = value(
        4_000_000_000, _ANY, "all frames of a video together (a minute of 1920 x 1080 at 30 a second)"
    )
    max_sampled_pixels: int = value(
        134_000_000, _ANY, "the frames of a video that the model sees, together (64 of 1920 x 1080)"
    )
    max_sampled_frames: int = value(768, _COUNT, "their number, where a request names the sampling")
    decode_workers: int = value(2, _COUNT, "processes that decode images and videos, an item each at a time")
    decode_threads: int = value(2, _COUNT, "threads of such a process, for a long video")
    decode_seconds: float = value(10.0, _COUNT, "processor time that an item may take")
    decode_bytes: int = value(512 << 20, _COUNT, "decoded pixels held at once, 4 bytes each, of all requests")
    store_bytes: int = value(256 << 20, _ANY, "uploaded media kept, least recently used first out")
    live_bytes: int = value(
        1 << 30, _COUNT, "files and long texts of all live requests; more is refused with RESOURCE_EXHAUSTED"
    )
    url_hosts: tuple[str, ...] = value(
        (),
        _HOSTS,
        "hosts whose http and https URLs are fetched, at ports 80 and 443 or the one named; of their addresses public "
        "ones, and those listed here",
    )
    url_seconds: float = value(10.0, ABOVE_0, "until a file is fetched, redirects and the wait for a place included")
    url_fetches: int = value(16, _COUNT, "files fetched at once; others wait")


@dataclass(frozen=True, kw_only=True)
class EncoderCacheConfig:
    """What is kept of media for later requests with the same, in bytes, least recently used first out."""

    token_bytes: int = value(256 << 20, _BYTES, "visual tokens")
    pixel_bytes: int = value(64 << 20, _BYTES, "pixels as towers take them: for the same media under another pruner")
    kv_bytes: int = value(256 << 20, _BYTES, "K/V for requests with image_reuse, on the models' devices")
    disk_folder: str = value(
        "", meaning="visual tokens are also kept here, over restarts; processes of a host may share it; empty = nowhere"
    )
    disk_bytes: int = value(1 << 30, _BYTES, "bytes of that folder")


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Sessions of streaming video: how many, and what each may hold."""

    max_sessions: int = value(64, _COUNT, "sessions open at once")
    session_bytes: int = value(256 << 20, _COUNT, "K/V, features and initialisation segment that one may keep")
    total_bytes: int = value(
        2 << 30, _COUNT, "the same of all sessions of a model; more is refused with RESOURCE_EXHAUSTED"
    )
    sessions_per_tenant: int = value(0, _ANY, "sessions of a tenant; 0 = as many as there may be")
    resume_seconds: float = value(60.0, _ANY, "how long a session without a connection is kept")
    idle_seconds: float = value(300.0, _COUNT, "a session without a question ends that sends nothing for so long")
    max_questions: int = value(8, _COUNT, "questions of a session at once")
    max_watches: int = value(32, _ANY, "standing questions of a session")
    credit_pushes: int = value(32, _COUNT, "pushes of a session that wait to be decoded")
    credit_bytes: int = value(8 << 20, _COUNT, "their bytes together; no push may be larger")
    waiting_frames: int = value(16, _COUNT, "decoded frames of a session that wait for the model")
    waiting_bytes: int = value(64 << 20, _COUNT, "their pixels, 4 bytes each")
    frames_under_way: int = value(4, _COUNT, "frames of a session that the model takes in at once")
    outbox_bytes: int = value(4 << 20, _COUNT, "unread responses of a client; as much again is kept for a resume")
