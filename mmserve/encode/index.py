"""Index of a video stream's frame times and keyframes, from one pass over its packets."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from mmserve.config import MediaConfig
from mmserve.encode.containers import RAW
from mmserve.errors import InvalidArgument

#: Maximum frame rate of accepted files: no camera exceeds it, and each frame costs a decode.
MAX_RATE = 240
NO_FRAMES = "has no video frames"
#: Cost of a frame in the vision tower, in frames that are only decoded.
_TOWER_COST = 8


@dataclass
class Index:
    """Start of each frame, end of the last one, and keyframes of a stream, in ticks of the stream.

    ``ordered`` is False if the container stores no presentation times (AVI, raw streams): then frames are identified by
    their rank. 8 bytes a frame, and 16 a keyframe; packets are not stored.
    """

    times: Sequence[int]  # ascending
    end: int
    ordered: bool
    packets: int
    first: tuple[int | None, int]  # presentation time and size in bytes of the first packet
    begins_with_key: bool
    backwards: bool  # whether times decrease between packets or keyframes
    keys: Sequence[int]  # times of the keyframes that have one, ascending
    key_packets: Sequence[int]  # their packet numbers

    @classmethod
    def of(cls, container: InputContainer, stream: VideoStream, limits: MediaConfig, field: str) -> Index:
        """Read all packets of ``stream`` once."""
        most, packets = MAX_RATE * limits.max_video_seconds, _Packets(raw=container.format.name in RAW)
        for packet in container.demux(stream):
            if not packet.size:
                continue  # end of the stream, or a repeated frame (AVI)
            if packet.is_corrupt:
                raise InvalidArgument.of(field, "is a damaged video: a packet is marked as corrupt")
            packets.add(packet)
            if packets.count > most:
                raise InvalidArgument.of(field, f"has more than {most:g} frames ({MAX_RATE} a second)")
        if not packets.shown:
            raise InvalidArgument.of(field, NO_FRAMES)
        if not packets.any_key:  # some decoders generate pictures without any reference
            raise InvalidArgument.of(
                field, "is a damaged video: it has no keyframe, so no frame can be decoded completely"
            )
        # AVI has no presentation times, and FFmpeg's generated ones are wrong with forward references
        ordered = packets.every_pts and (container.format.name != "avi" or packets.every_key)
        times = _ascending(packets.pts if ordered else packets.dts)
        if not times:
            raise InvalidArgument.of(field, "has no times for its frames")
        duration = (packets.last_pts if ordered else packets.last_dts).duration or _usual_duration(stream, times)
        keys, key_packets = (packets.keys, packets.key_packets) if ordered else (array("q"), array("q"))
        if ordered and packets.backwards:
            keys, key_packets = _sorted_together(keys, key_packets)
        end, first_key = times[-1] + duration, packets.begins_with_key
        return cls(times, end, ordered, packets.count, packets.first, first_key, packets.backwards, keys, key_packets)

    def runs(self, wanted: Sequence[int]) -> list[list[int]]:
        """The frames with these indices (ascending), split wherever decoding jumps to a keyframe."""
        runs: list[list[int]] = []
        for number in wanted:
            if not runs or self._key_before(number) > self.times[runs[-1][-1]]:
                runs.append([])
            runs[-1].append(number)
        return runs

    def decoded(self, runs: Sequence[Sequence[int]]) -> int:
        """Number of frames decoded for these runs."""
        starts = (bisect_left(self.times, self._key_before(run[0])) for run in runs)
        return sum(run[-1] - start + 1 for run, start in zip(runs, starts, strict=True))

    def shared(self, wanted: Sequence[int], part: int, of: int, step: int) -> list[int]:
        """Part ``part`` of the frames with these indices (ascending), divided among ``of`` encoders: consecutive
        frames, split at multiples of ``step`` so that decoding and tower costs are balanced; may be empty."""
        costs: list[int] = []
        for run in self.runs(wanted):
            last = bisect_left(self.times, self._key_before(run[0])) - 1
            for number in run:
                costs.append(number - last + _TOWER_COST)
                last = number
        ends = np.cumsum([0, *costs])
        steps = np.arange(0, len(wanted) + step, step).clip(max=len(wanted))
        begin, end = (int(steps[np.abs(ends[steps] - ends[-1] * k / of).argmin()]) for k in (part, part + 1))
        return list(wanted[begin:end])

    def _key_before(self, number: int) -> int:
        """The time of the last keyframe up to a frame; of the first frame if there is none."""
        place = bisect_right(self.keys, self.times[number]) - 1
        return self.keys[place] if place >= 0 else self.times[0]


@dataclass(slots=True)
class _Last:
    """The latest time of a packet, and the duration of its frame (0 = unknown)."""

    time: int | None = None
    duration: int = 0

    def add(self, time: int, duration: int | None) -> None:
        if self.time is None or time >= self.time:
            self.duration = max(duration or 0, self.duration if time == self.time else 0)
            self.time = time


@dataclass(slots=True)
class _Packets:
    """The times and keyframes of the packets read so far; ``raw``: whether the stream is raw, without times."""

    raw: bool
    count: int = 0
    shown: int = 0  # packets whose frame is presented
    first: tuple[int | None, int] = (None, 0)  # see ``Index``
    begins_with_key: bool = False
    any_key: bool = False
    every_key: bool = True  # of the presented ones
    every_pts: bool = True  # of the presented ones
    backwards: bool = False
    pts: array[int] = field(default_factory=lambda: array("q"))  # of presented frames
    dts: array[int] = field(default_factory=lambda: array("q"))  # of presented frames
    last_pts: _Last = field(default_factory=_Last)
    last_dts: _Last = field(default_factory=_Last)
    keys: array[int] = field(default_factory=lambda: array("q"))
    key_packets: array[int] = field(default_factory=lambda: array("q"))
    _latest_dts: int | None = None

    def add(self, packet: Packet) -> None:
        """Add the next packet, which is not empty."""
        pts, dts, key = packet.pts, packet.dts, packet.is_keyframe
        if not self.count:
            self.first, self.begins_with_key = (pts, packet.size), key
        self.any_key |= key
        if key and pts is not None:
            self.backwards |= bool(self.keys) and pts < self.keys[-1]
            self.keys.append(pts)
            self.key_packets.append(self.count)
        if dts is not None:
            self.backwards |= self._latest_dts is not None and dts < self._latest_dts
            self._latest_dts = dts
        self.count += 1
        if packet.is_discard:
            return
        self.shown += 1
        self.every_key &= key
        if pts is None:
            self.every_pts = False
        else:
            self.pts.append(pts)
            self.last_pts.add(pts, packet.duration)
        if self.raw:
            dts = self.dts[-1] + (packet.duration or 0) if self.dts else 0
        if dts is not None:
            self.dts.append(dts)
            self.last_dts.add(dts, packet.duration)


def _usual_duration(stream: VideoStream, times: Sequence[int]) -> int:
    """Average duration of a frame in ticks."""
    if len(times) > 1:
        return (times[-1] - times[0]) // (len(times) - 1)
    if stream.average_rate and stream.time_base:
        return int(1 / (stream.average_rate * stream.time_base))
    return 0


def _ascending(times: array[int]) -> array[int]:
    return array("q", np.unique(np.frombuffer(times, dtype=np.int64)).tobytes() if times else b"")


def _sorted_together(keys: array[int], packets: array[int]) -> tuple[array[int], array[int]]:
    order = np.argsort(np.frombuffer(keys, dtype=np.int64), kind="stable")
    pair = (np.frombuffer(values, dtype=np.int64)[order] for values in (keys, packets))
    first, second = (array("q", values.tobytes()) for values in pair)
    return first, second
