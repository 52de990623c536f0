"""End-to-end cost of a long video file, compared with decoding, encoding and prefilling it alone.

A file of ``--seconds`` (1280 x 720, H.264, 30 frames a second, a keyframe a second) is asked about at one frame a
second, in one process, with the bundled causal model: its limit of positions is raised, which affects its answers but
not the costs. The methods take turns within each repeat, starting with a different one each time.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import torch

from mmserve.bench.in_process import ask_all, torch_threads
from mmserve.bench.measures import Figures, Progress, at_least, at_most, in_turns, stated
from mmserve.bench.video_decoding import panning
from mmserve.config import EncoderCacheConfig, EngineConfig, MediaConfig, ModelConfig, resolve
from mmserve.core.request import Diffusion, Message, Policy, Request, Sampling, TextPart, VideoPart, VideoSampling
from mmserve.encode.child import Planned
from mmserve.encode.clip_encoder import ClipEncoder, clip_file
from mmserve.encode.decoding import DecodePool
from mmserve.encode.visual import MediaEncoder
from mmserve.engine.engine import Engine
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.registry import load_model
from mmserve.tiers.caches import Caches

#: Goal: end-to-end wall time relative to that of the most expensive stage alone.
OVER_DEAREST = 1.15
RATE, SIZE, SAMPLED = 30, (1280, 720), VideoSampling(fps=1)
#: Seconds of distinct pictures, which the file repeats.
_PERIOD = 20
#: Prompt rows of a frame, and the maximum of the surrounding text.
_ROWS_A_FRAME, _TEXT_ROWS = 16, 256
_PATIENCE = 3600.0


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """One row, and the measures of a file of ``arguments.seconds``."""
    path = arguments.model[0] if arguments.model else "bundled-causal"
    model = load_model(ModelConfig(path=path))
    if not isinstance(model, LoadedModel) or model.vision is None or not model.vision.frames_at_once:
        raise ConfigError(f"{path} takes no videos whose frames can be seen as they come")
    seconds = max(1, round(arguments.seconds))
    rows = seconds * _ROWS_A_FRAME + _TEXT_ROWS
    model = replace(model, spec=replace(model.spec, max_tokens=rows))
    progress(f"files: making {seconds} s of video")
    bench = _Bench(model, _file(seconds), rows)
    with closing(bench), torch_threads(bench.torch_threads):  # as the engine's workers
        return _measured(bench, seconds, arguments.repeats, progress)


def _measured(bench: _Bench, seconds: int, repeats: int, progress: Progress) -> Figures:
    ways: dict[str, Callable[[], str | None]] = {
        "end to end": bench.overlapped,
        "one after the other": bench.in_turn,
        "decode": bench.decode,
        "encode": bench.encode,
        "prefill": bench.prefill,
    }
    for way in ways.values():
        way()  # starts processes and allocates memory
    wall: dict[str, list[float]] = {name: [] for name in ways}
    answers: set[str] = set()
    for turn, name in in_turns(ways, repeats):
        progress(f"files: {turn + 1} of {repeats}, {name}")
        begun = time.perf_counter()
        answer = ways[name]()
        wall[name].append(time.perf_counter() - begun)
        answers |= {answer} - {None}  # type: ignore[arg-type]
    medians = {name: statistics.median(values) for name, values in wall.items()}
    dearest = max(medians[name] for name in ("decode", "encode", "prefill"))
    row: Figures = {
        "measured": "files: end to end",
        "seconds": seconds,
        "wall_seconds": {name: round(value, 3) for name, value in medians.items()},
        "all_wall_seconds": {name: [round(value, 3) for value in values] for name, values in wall.items()},
        "decoded_bytes_at_most": bench.most_bytes,
        "same_answer": len(answers) == 1,
    }
    measures = [
        at_most("end to end over the dearest stage alone", medians["end to end"] / dearest, "x", OVER_DEAREST),
        stated("one after the other over end to end", medians["one after the other"] / medians["end to end"], "x"),
        at_least("answers are the same", float(row["same_answer"]), "", 1),
        stated("decoded pixels held at most", bench.most_bytes / 2**20, "MiB"),
    ]
    settings = {"seconds": seconds, "size": list(SIZE), "rate": RATE, "sampled": "1 frame/s", "repeats": repeats}
    return {"rows": [row], "measures": measures, "settings": settings}


class _Bench:
    """One file, and engines to ask about it."""

    def __init__(self, model: LoadedModel, file: bytes, rows: int) -> None:
        assert model.vision is not None
        self._model, self._vision, self._file = model, model.vision, file
        most = 1 << 40
        self._media = MediaConfig(
            max_item_bytes=most, max_video_seconds=1e6, max_video_pixels=most, max_sampled_pixels=most,
            max_sampled_frames=1 << 20, decode_seconds=1e6,
            decode_bytes=most,
        )  # fmt: skip
        self._config = resolve(EngineConfig(max_tokens=rows, max_running=2, prefix_cache=False))
        self._pool = DecodePool(self._media)
        self._pool.open()
        cache = Caches.of(EncoderCacheConfig(token_bytes=0, pixel_bytes=0))
        self._cold = Engine(model, self._config, self._media, cache=cache, decoders=self._pool)
        self._warm = Engine(model, self._config, self._media, decoders=self._pool)
        for engine in (self._cold, self._warm):
            engine.start()
        self._clip_encoder = ClipEncoder(model, self._vision, "video", SAMPLED, frozenset(), threading.Lock())
        self._prepared = [part.prepared for part in self._parts()]
        self._asked = 0
        self.most_bytes = 0

    @property
    def torch_threads(self) -> int:
        """Number of torch threads of each of the engines' workers."""
        return self._config.torch_threads

    def close(self) -> None:
        """Stop the engines and their decoding processes."""
        for engine in (self._cold, self._warm):
            engine.stop()
        self._pool.close()

    def overlapped(self) -> str:
        """End to end with overlapping stages: the file is not cached, and the answer is one token."""
        before, self._pool.budget.most = self._pool.budget.most, 0
        answer = self._ask(self._cold)
        self.most_bytes = max(self.most_bytes, self._pool.budget.most)
        self._pool.budget.most = before
        return answer

    def in_turn(self) -> str:
        """The same with sequential stages."""
        streams = MediaEncoder._streams
        MediaEncoder._streams = lambda *_of: False  # type: ignore[method-assign]
        try:
            return self._ask(self._cold)
        finally:
            MediaEncoder._streams = streams  # type: ignore[method-assign]

    def decode(self) -> None:
        """Decode the file, and preprocess its frames for the tower."""
        self._parts()

    def encode(self) -> None:
        """Run the tower on all frames."""
        with torch.inference_mode():
            for prepared in self._prepared:
                self._clip_encoder._run_tower(prepared)

    def prefill(self) -> str:
        """Prefill with cached visual tokens; the answer is one token."""
        return self._ask(self._warm)

    def _parts(self) -> list[Any]:
        file = clip_file(
            self._file, "video", SAMPLED, self._vision, self._vision.first_resize(clip=True, among=False), 1
        )
        made = self._clip_encoder._prepared
        with closing(self._pool.chunks(file, self._vision.frames_at_once, made, lambda: None)) as chunks:
            return [chunk for chunk in chunks if not isinstance(chunk, Planned)]

    def _ask(self, engine: Engine) -> str:
        self._asked += 1
        request = Request(
            id=f"file {self._asked}",
            model=self._model.spec.name,
            messages=(Message("user", (VideoPart(self._file, SAMPLED), TextPart("What moves?"))),),
            sampling=Sampling(max_new_tokens=1),
            diffusion=Diffusion(recompute=Policy(name="last")),
        )
        [answer] = ask_all(engine, [request], patience=_PATIENCE)
        return answer.whole().text


def _file(seconds: int) -> bytes:
    """A textured picture that pans; its first seconds are encoded, and their packets repeated."""
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        options = {"g": str(RATE), "keyint_min": str(RATE), "sc_threshold": "0", "bf": "0", "preset": "veryfast"}
        stream: Any = container.add_stream("libx264", rate=RATE, options=options)
        (stream.width, stream.height), stream.pix_fmt = SIZE, "yuv420p"
        contents: list[tuple[bytes, bool]] = []
        for frame in panning(SIZE, RATE, min(seconds, _PERIOD)):
            contents += [(bytes(packet), packet.is_keyframe) for packet in stream.encode(frame)]
        contents += [(bytes(packet), packet.is_keyframe) for packet in stream.encode(None)]
        for number in range(seconds * RATE):
            data, key = contents[number % len(contents)]
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, RATE), key
            packet.pts = packet.dts = number
            packet.duration = 1
            container.mux(packet)
    return file.getvalue()
