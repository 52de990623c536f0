"""Cost of decoding: sampling a frame a second, compared with plain PyAV, sequential and seeking.

One minute of 1920 x 1080 H.264 at 30 frames a second with a keyframe every 30 or 250 frames, encoded once and cached in
the temporary directory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from mmserve.bench.hostile_media import black_clip
from mmserve.bench.measures import Figures, Progress, at_least, at_most, in_turns
from mmserve.config import MediaConfig
from mmserve.encode.frames import opened
from mmserve.encode.video import read_video
from mmserve.encode.watch import UNWATCHED

SECONDS, RATE, SIZE, GOPS = 60, 30, (1920, 1080), (30, 250)
#: Goals: CPU seconds relative to the cheaper baseline, bytes of memory for a frame of a long file.
DEARER, INDEX_BYTES = 1.1, 64
_LIMITS = MediaConfig(max_item_bytes=1 << 30, max_video_seconds=3600.0)
#: Minimum rounds; each starts with a different method.
REPEATS = 5
#: Side of the squares in the moving picture, in pixels.
_BLOCK = 8

Frames = list[tuple[float, Image.Image]]


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each keyframe interval, and one for a file of an hour."""
    rows = [_row(gop, arguments.repeats, progress) for gop in GOPS]
    progress("decoding: the index of an hour")
    index = _index_of_an_hour()
    measures = [measure for row in rows for measure in _measures(row)]
    measures.append(at_most("index of an hour's file", index["bytes_a_frame"], "bytes a frame", INDEX_BYTES))
    settings = {"seconds": SECONDS, "rate": RATE, "size": list(SIZE), "codec": "H.264", "sampled": "1 frame/s"}
    return {
        "rows": [*rows, index],
        "measures": measures,
        "settings": {**settings, "repeats": max(arguments.repeats, REPEATS)},
    }


def _row(gop: int, repeats: int, progress: Progress) -> Figures:
    progress(f"decoding: a keyframe every {gop} frames")
    path = _minute(gop)
    data = path.read_bytes()
    with opened(data, "mov", _LIMITS, "video") as video:
        index = video.index
        wanted = [index.times[(2 * second + 1) * RATE // 2] for second in range(SECONDS)]

    def ours(threads: int) -> Frames:
        limits = MediaConfig(max_item_bytes=1 << 30, decode_threads=threads)
        return list(read_video(data, limits, frames=SECONDS))

    ways: dict[str, Callable[[], Frames]] = {
        "sequential": lambda: _sequential(path, wanted),
        "seeking": lambda: _seeking(path, wanted),
        "mmserve": lambda: ours(1),
        "mmserve, 2 threads": lambda: ours(2),
    }
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    wall: dict[str, list[float]] = {way: [] for way in ways}
    equal = True
    expected = ways["sequential"]()
    for turn, way in in_turns(ways, max(repeats, REPEATS)):
        read = ways[way]
        begun, used = time.perf_counter(), time.process_time()
        frames = read()
        wall[way].append(time.perf_counter() - begun)
        cpu[way].append(time.process_time() - used)
        if not turn:
            equal &= _same(frames, expected)
        del frames
    row: Figures = {"measured": f"decoding, GOP {gop}", "gop": gop, "bit_equal": equal}
    row["cpu_seconds"] = {way: round(statistics.median(values), 3) for way, values in cpu.items()}
    row["wall_seconds"] = {way: round(statistics.median(values), 3) for way, values in wall.items()}
    return row


def _measures(row: Figures) -> list[Figures]:
    cpu, wall, name = row["cpu_seconds"], row["wall_seconds"], row["measured"]
    cheaper = min(cpu["sequential"], cpu["seeking"])
    return [
        at_most(f"{name}: CPU over the cheaper of sequential and seeking", cpu["mmserve"] / cheaper, "x", DEARER),
        at_most(f"{name}: CPU of two threads over one", cpu["mmserve, 2 threads"] / cpu["mmserve"], "x", DEARER),
        at_most(f"{name}: wall time of two threads over one", wall["mmserve, 2 threads"] / wall["mmserve"], "x", 0.7),
        at_least(f"{name}: frames bit-equal to sequential decoding", float(row["bit_equal"]), "", 1),
    ]


def _same(frames: Frames, expected: Frames) -> bool:
    pairs = zip(frames, expected, strict=True)
    return len(frames) == len(expected) and all(
        np.array_equal(np.asarray(a), np.asarray(b)) for (_s, a), (_t, b) in pairs
    )


def _sequential(path: Path, wanted: Sequence[int]) -> Frames:
    """Decode every frame, and convert the wanted ones."""
    found: Frames = []
    left = list(reversed(wanted))
    with av.open(path) as container:
        stream = _one_thread(container)
        for frame in container.decode(stream):
            if left and frame.pts == left[-1]:
                found.append((float(frame.time or 0), frame.to_image(threads=1)))
                left.pop()
            if not left:
                break
    return found


def _seeking(path: Path, wanted: Sequence[int]) -> Frames:
    """Decode from the preceding keyframe for each wanted frame."""
    found: Frames = []
    with av.open(path) as container:
        stream = _one_thread(container)
        for moment in wanted:
            container.seek(moment, stream=stream)
            for frame in container.decode(stream):
                if frame.pts == moment:
                    found.append((float(frame.time or 0), frame.to_image(threads=1)))
                    break
    return found


def _one_thread(container: Any) -> Any:
    stream = container.streams.video[0]
    stream.codec_context.thread_type, stream.codec_context.thread_count = "SLICE", 1
    return stream


def panning(size: tuple[int, int], rate: int, seconds: int) -> Iterator[av.VideoFrame]:
    """The frames of a textured picture, panned by a camera of that size (width, height)."""
    width, height = size
    shape = (height // _BLOCK, (width + 2 * seconds * rate) // _BLOCK + 1, 3)
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8).repeat(_BLOCK, 0).repeat(_BLOCK, 1)
    for number in range(seconds * rate):
        still = np.ascontiguousarray(picture[:, 2 * number : 2 * number + width])
        frame = av.VideoFrame.from_ndarray(still, format="rgb24")
        frame.pts, frame.time_base = number, Fraction(1, rate)
        yield frame


def _minute(gop: int) -> Path:
    """A minute of ``panning``, encoded with B-frames."""
    folder = Path(tempfile.gettempdir()) / "mmserve-bench-video"
    folder.mkdir(exist_ok=True)
    path = folder / f"{SIZE[1]}p-{SECONDS}s-gop{gop}.mp4"
    if path.exists():
        return path
    partial = path.with_suffix(".partial")
    with av.open(partial, "w", format="mp4") as container:
        options = {"g": str(gop), "keyint_min": str(gop), "sc_threshold": "0", "preset": "veryfast"}
        stream: Any = container.add_stream("libx264", rate=RATE, options=options)
        (stream.width, stream.height), stream.pix_fmt = SIZE, "yuv420p"
        for frame in panning(SIZE, RATE, SECONDS):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    partial.replace(path)
    return path


def _index_of_an_hour() -> Figures:
    """Memory used for a file of an hour while it is decoded, besides its bytes."""
    count = 3600 * RATE
    data = black_clip(64, 48, count)
    tracemalloc.start()
    try:
        with opened(data, "mov", _LIMITS, "video") as video:
            list(video.sequence(range(0, count, count // 4), UNWATCHED))
            _now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {"measured": "index of an hour", "frames": count, "bytes": most, "bytes_a_frame": round(most / count, 1)}
