"""A stream that is saved, sent as bytes and made again elsewhere goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import all_frames, clip
from harness import PATIENCE, Bench
from PIL import Image
from qwen_vl_checkpoints import KINDS, Qwen
from streaming import answer, asked, frame, kept, opened, put, streaming_model

from mmserve.core.request import Policy
from mmserve.core.session import Memory
from mmserve.core.tenant import ANONYMOUS
from mmserve.models.base import Attention, LoadedModel
from mmserve.transfer.payloads import PAYLOADS
from mmserve.video.base import Frame, Scope
from mmserve.video.streams import EngineStream, EngineStreams

Make = Callable[..., Bench]
FRAMES = 30


def elsewhere(streams: EngineStreams, stream: EngineStream, memory: Memory) -> EngineStream:
    saved = stream.save().result(PATIENCE)
    return streams.open(memory, ANONYMOUS, saved=PAYLOADS.decode(PAYLOADS.encode(saved)))


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    return streaming_model(stride=1)


@pytest.mark.parametrize(
    ("policy", "positions"),
    [
        ("window", "gaps"),
        ("window", "reanchor"),
        ("carrier", "renumber"),
        ("carrier", "reanchor"),
        ("similarity", "gaps"),
        ("group", "renumber"),
        ("recall", "renumber"),
    ],
)
def test_a_stream_goes_on_elsewhere_bit_for_bit(bench: Make, causal: LoadedModel, policy: str, positions: str) -> None:
    here, there = EngineStreams(bench(causal).engine), EngineStreams(bench(causal).engine)
    memory = Memory(policy=policy, positions=positions, budget=60, host_bytes=20_000, carriers=4)
    stays, moves = (streams.open(memory, ANONYMOUS) for streams in (here, here))
    for i in range(FRAMES):
        for stream in (stays, moves):
            put(stream, frame(i))
        if i in (0, 6, 17):
            left, moves = moves, elsewhere(there if i % 2 == 0 else here, moves, memory)
            left.close()
    assert stays.stats() == moves.stats()
    if policy != "recall":
        for mine, theirs in zip(kept(stays)[1:], kept(moves)[1:], strict=True):
            assert torch.equal(mine, theirs)
    for scope in (None, Scope(FRAMES - 8.0, FRAMES - 3.0)):
        questions = [asked(f"{name}.{scope}", temperature=0.7, seed=3) for name in ("stays", "moves")]
        one, other = (answer(each, q, scope) for each, q in zip((stays, moves), questions, strict=True))
        assert one == other
    here.stop()
    there.stop()


def test_a_state_holds_the_frames_before_it_and_no_other(bench: Make, causal: LoadedModel) -> None:
    streams = EngineStreams(bench(causal).engine)
    stream = opened(streams, budget=60)
    waiting = [stream.append(frame(i)) for i in range(3)]
    saving = stream.save()
    waiting += [stream.append(frame(i)) for i in range(3, 6)]
    saved = saving.result(PATIENCE)
    assert (saved.frames, saved.last) == (3, 2.0)
    [each.result(PATIENCE) for each in waiting]
    again = streams.open(Memory(budget=60), ANONYMOUS, saved=saved)
    put(again, *(frame(i) for i in range(3, 6)))
    assert all(torch.equal(a, b) for a, b in zip(kept(stream)[1:], kept(again)[1:], strict=True))
    streams.stop()


@pytest.mark.parametrize(
    ("attention", "recompute"), [(Attention.FULL, "none"), (Attention.BLOCK_CAUSAL, "block")], ids=["full", "blocks"]
)
def test_streams_of_models_with_other_attention_are_saved(bench: Make, attention: Attention, recompute: str) -> None:
    spec: dict[str, Any] = {"default_block_length": 16} if attention is Attention.BLOCK_CAUSAL else {}
    model = streaming_model(attention, 0, **spec)
    here, there = EngineStreams(bench(model).engine), EngineStreams(bench(model).engine)
    memory = Memory(budget=50)
    stays, moves = (streams.open(memory, ANONYMOUS) for streams in (here, here))
    for i in range(21):
        for stream in (stays, moves):
            put(stream, frame(i))
        if i == 12:
            moves = elsewhere(there, moves, memory)
    policy = Policy(name=recompute)
    assert stays.stats() == moves.stats()
    one, other = (answer(each, asked(f"q{n}", recompute=policy)) for n, each in enumerate((stays, moves)))
    assert one == other
    here.stop()
    there.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_places_in_time_and_frames_that_wait_for_their_second_half_are_saved(
    bench: Make, tmp_path: Path, kind: str
) -> None:
    model = Qwen(tmp_path / kind, kind).load()
    streams = EngineStreams(bench(model, max_tokens=512).engine)
    memory = Memory(budget=30)
    stays, moves = (streams.open(memory, ANONYMOUS) for _ in range(2))
    pictures = [Image.fromarray(pixels) for pixels in all_frames(clip(frames=17, rate=1, gop=1, size=(16, 16)))]
    for i, picture in enumerate(pictures):
        for stream in (stays, moves):
            put(stream, Frame(float(2 * i), picture))
        if i in (4, 11):  # in the middle of a unit of two frames, and after one
            left, moves = moves, elsewhere(streams, moves, memory)
            left.close()
    assert stays.stats() == moves.stats() and stays.stats().evicted_rows
    assert all(torch.equal(a, b) for a, b in zip(kept(stays)[1:], kept(moves)[1:], strict=True))
    assert np.array_equal(kept(stays)[0].places, kept(moves)[0].places)
    one, other = (answer(each, asked(f"q{n}")) for n, each in enumerate((stays, moves)))
    assert one == other
    streams.stop()
