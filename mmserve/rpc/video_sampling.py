"""Which frames of video files the model sees, as messages name it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mmserve.config import MediaConfig
from mmserve.core.request import VideoSampling
from mmserve.errors import InvalidArgument
from mmserve.rpc.policies import put
from mmserve.v1 import generation_pb2 as pb

#: Frames a second, and frames of a scene, at most; for files and for sessions.
MAX_RATE, MAX_SCENE_FRAMES = 30.0, 64
_FIELDS = tuple(field.name for field in dataclasses.fields(VideoSampling))


def wrong_video_sampling(sampling: pb.VideoSampling, path: str, limits: MediaConfig) -> Iterator[tuple[str, str]]:
    """Each field of ``sampling`` that is wrong, with ``path`` in front, and what it must be."""
    given = _asked(sampling)
    if given.fps is not None and not 0 < given.fps <= MAX_RATE:
        yield f"{path}.fps", f"must be above 0 and at most {MAX_RATE:g}, not {given.fps}"
    if given.frames is not None and not 1 <= given.frames <= limits.max_sampled_frames:
        most = f"{limits.max_sampled_frames} ([media] max_sampled_frames of the server)"
        yield f"{path}.frames", f"must be at least 1 and at most {most}, not {given.frames}"
    if given.frames is not None and (given.fps is not None or given.scenes):
        yield f"{path}.frames", "must not be set with fps, scene_similarity or scene_frames: they are other rules"
    if given.scene_similarity is not None and not -1 <= given.scene_similarity <= 1:
        yield f"{path}.scene_similarity", f"must be in [-1, 1], not {given.scene_similarity}"
    if given.scene_frames is not None and not 1 <= given.scene_frames <= MAX_SCENE_FRAMES:
        yield f"{path}.scene_frames", f"must be in [1, {MAX_SCENE_FRAMES}], not {given.scene_frames}"
    if given.detail_every is not None and given.detail_every < 1:
        yield f"{path}.detail_every", "must be at least 1"


def asked_video_sampling(video: pb.Video) -> VideoSampling | None:
    """The core form of a video's sampling; None where it asks for nothing."""
    found = _asked(video.sampling)
    return None if found == VideoSampling() else found


def with_sampling(video: pb.Video, sampling: VideoSampling | None, where: str) -> pb.Video:
    """``video`` with ``sampling``; ``InvalidArgument`` naming ``where`` for what cannot be put into a message."""
    if sampling is None:
        return video
    if not isinstance(sampling, VideoSampling):
        raise InvalidArgument.of(where, f"must be a VideoSampling, not {sampling!r}")
    put(video.sampling, f"{where}.", **{name: getattr(sampling, name) for name in _FIELDS})
    return video


def _asked(sampling: pb.VideoSampling) -> VideoSampling:
    return VideoSampling(**{name: getattr(sampling, name) for name in _FIELDS if sampling.HasField(name)})
