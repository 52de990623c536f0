"""The options and reports of a video session: plain data, the same on the server and in the client.

Times are seconds of the session's clock, unless a field's description differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.core.values import at_least, value, within
from mmserve.errors import MMServeError


@dataclass(frozen=True)
class Memory:
    """The memory of a stream. ``policy``: "window", "carrier", "similarity", "group" or "recall";
    ``positions``: "renumber", "gaps" or "reanchor"."""

    policy: str = value("window", meaning="which rows of K/V are evicted when there are more than the budget")
    positions: str = value("renumber", meaning="how the remaining rows are numbered")
    budget: int = value(256, meaning="rows of K/V that are kept, including the chat's header and carriers")
    host_bytes: int = value(
        64 << 20, meaning="bytes of features of old frames kept for questions about the past", shown="64 MiB"
    )
    carriers: int = value(64, meaning="with carrier: largest number of rows that represent old frames")


@dataclass(frozen=True)
class FrameSampling:
    """How frames of segments are sampled."""

    rate: float = value(1.0, within(0, 30, above=True), "frames a second that are taken from segments")
    scene_similarity: float | None = value(
        None,
        within(-1, 1),
        "a frame less similar (cosine) than this to the previous one begins a scene; few other frames of it are taken",
        shown="all frames at the rate",
    )
    scene_frames: int = value(4, within(1, 64), "with scene_similarity: largest number of frames of a scene")
    detail_every: int | None = value(
        None, at_least(1), "one in this many frames is in detail, the others are one token each", shown="all in detail"
    )


@dataclass(frozen=True)
class Asked:
    """The frames that a question refers to: those whose rows it can attend to."""

    frames: int
    begin: float  # seconds of the first of them
    end: float  # seconds of the last of them
    recomputed_rows: int  # rows prefilled only for this question


@dataclass(frozen=True)
class Moment:
    """A time that an answer mentions: its position in the text, and the second of the stream's clock.

    ``seconds`` is None if no frame of the question has that time label. ``ambiguous``: whether an older frame has the
    same label; ``seconds`` is then that of the newest one.
    """

    start: int
    end: int
    seconds: int | None
    ambiguous: bool = False


@dataclass(frozen=True)
class PushFailed:
    """A push, or the rest of its frames, failed."""

    index: int
    error: MMServeError


@dataclass(frozen=True)
class Alert:
    """A standing question became true or false; ``probability``: that of the answers that make it true."""

    watch_id: str
    active: bool
    probability: float
    mass: float
    seconds: float
    answer: str


@dataclass(frozen=True)
class Statistics:
    """Counters of a session; bytes and rows are those held now."""

    frames_taken: int = 0
    frames_dropped: int = 0
    pushes_failed: int = 0
    questions: int = 0
    alerts: int = 0
    resumes: int = 0
    waiting_bytes: int = 0
    kept_rows: int = 0
    evicted_rows: int = 0
    kv_bytes: int = 0
    feature_bytes: int = 0
    seconds: float = 0.0
