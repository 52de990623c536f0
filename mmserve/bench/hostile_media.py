"""Small files that are expensive to decode, as sent by a hostile client."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from typing import Any

import av
from PIL import Image

_RATE = 30
#: Period with which the packets of a still H.264 picture repeat after these: the wrap of ``frame_num`` (16).
_PERIOD = 16


def black_clip(width: int, height: int, frames: int) -> bytes:
    """An MP4 file of ``frames`` black frames (30 a second) with one keyframe, so that all frames must be decoded.

    1,780 frames of 3840 x 2160 are 430 kB, and take 10 s of one core to decode. Only a few frames are encoded; the
    packets of the unchanged ones are repeated, which takes a second instead of a minute.
    """
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        options = {"g": "99999", "keyint_min": "99999", "bf": "0", "sc_threshold": "0", "preset": "superfast"}
        stream: Any = container.add_stream("libx264", rate=_RATE, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.thread_count = width, height, "yuv420p", 1
        black = av.VideoFrame(width, height, "yuv420p")
        for plane, value in zip(black.planes, (16, 128, 128), strict=True):
            plane.update(bytes([value]) * plane.buffer_size)
        packets: list[av.Packet] = []
        for index in range(min(frames, 1 + 2 * _PERIOD)):
            black.pts, black.time_base = index, Fraction(1, _RATE)
            packets += stream.encode(black)
        packets += stream.encode(None)
        contents = [bytes(packet) for packet in packets]
        last = packets[-1].pts or 0
        ticks = last // (len(packets) - 1) if last else 1
        for index in range(frames):
            at = index if index <= _PERIOD else _PERIOD + 1 + (index - _PERIOD - 1) % _PERIOD
            packet = av.Packet(contents[at])
            packet.stream, packet.time_base = stream, packets[0].time_base
            packet.pts = packet.dts = index * ticks
            packet.duration = ticks
            packet.is_keyframe = index == 0
            container.mux(packet)
    return file.getvalue()


def large_png(side: int, mode: str = "L") -> bytes:
    """A black PNG of ``side`` x ``side`` pixels in one of pillow's modes: 8000 x 8000 of "L" are about 60 kB."""
    file = BytesIO()
    Image.new(mode, (side, side)).save(file, format="PNG", compress_level=9)
    return file.getvalue()
