"""Streams of Qwen's vision models: the same frames asked as one clip by file, two of them a patch, at their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from clips import all_frames, clip
from harness import PATIENCE, Bench, Call
from helpers import ask
from mmserve_kernels.rope_scatter import rotate
from PIL import Image
from qwen_vl_checkpoints import KINDS, Qwen
from streaming import LAST, answer, asked, gone, kept, opened, put, reserved, submit

from mmserve.core.request import Amount, Message, Request, TextPart, VideoPart, VideoSampling, Vision
from mmserve.core.session import Memory
from mmserve.core.tenant import ANONYMOUS
from mmserve.errors import Internal, InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel
from mmserve.video import intake
from mmserve.video.base import Frame, Scope
from mmserve.video.layout import question
from mmserve.video.memory import Kind
from mmserve.video.streams import EngineStreams

Make = Callable[..., Bench]
#: A frame a second, of a size that no layout resizes.
COUNT, SIZE = 6, (16, 16)
FILE = clip(frames=COUNT, rate=1, gop=1, size=SIZE)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Qwen:
    return Qwen(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def served(made: Qwen) -> LoadedModel:
    """With an end of text that no answer meets: answers run to their full length."""
    loaded = made.load()
    return dataclasses.replace(loaded, spec=dataclasses.replace(loaded.spec, end_ids=frozenset({-1})))


@pytest.fixture
def streams(bench: Make, served: LoadedModel) -> Iterator[EngineStreams]:
    made = EngineStreams(bench(served, max_tokens=512).engine)
    yield made
    made.stop()
    assert reserved(made) == 0


def of_file(count: int) -> list[Frame]:
    return [Frame(float(i), Image.fromarray(pixels)) for i, pixels in enumerate(all_frames(FILE)[:count])]


def noise(number: int, seconds: float | None = None, size: tuple[int, int] = SIZE, **given: Any) -> Frame:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Frame(float(number) if seconds is None else seconds, Image.fromarray(pixels), **given)


def by_file(name: str, text: str, **options: Any) -> Request:
    """The same question about the first frames of the file."""
    request = ask(name, text, recompute=LAST, max_new_tokens=8)
    clip_part = VideoPart(FILE, VideoSampling(frames=COUNT))
    request = dataclasses.replace(request, messages=(Message("user", (clip_part, TextPart(text))),), **options)
    return dataclasses.replace(request, streaming=dataclasses.replace(request.streaming, tokens=True))


def test_answers_are_those_of_the_same_frames_by_file(streams: EngineStreams, served: LoadedModel) -> None:
    stream = opened(streams, budget=256)
    put(stream, *of_file(COUNT))
    said = set()
    for text in ("what is it?", "how many are there?", "when does it begin to move?"):
        call = Call(by_file(text, text))
        streams._engine.submit(call.request, call.sink)
        expected = call.finished()
        tokens, told = answer(stream, asked(f"stream {text}", text, max_new_tokens=8))
        assert tokens == [t.id for t in expected.tokens]
        assert (told.frames, told.begin, told.end) == (COUNT, 0.0, COUNT - 1.0)
        said.add(tuple(tokens))
    assert len(said) == 3
    encoder = streams._engine.stages.encoder
    [by] = encoder.encode([by_file("places", "what is it?")])
    assert stream.state is not None
    encoded, _run = question(served, asked("places"), stream.state.branch(None), most=512)
    assert by.places is not None and encoded.places is not None
    assert encoded.ids.tolist() == by.ids.tolist()
    assert encoded.places.tolist() == by.places.tolist()


def test_a_question_after_an_odd_frame_sees_it_twice_as_by_file(streams: EngineStreams) -> None:
    """Its rows are run with the question, and are those of both frames once the next one has come."""
    stream, whole = opened(streams, budget=256), opened(streams, budget=256)
    frames = [noise(i) for i in range(6)]
    for i, frame in enumerate(frames):
        put(stream, frame)
        table, keys, _values = kept(stream)
        open_rows = int((table.frame == table.frame[-1]).sum()) if i % 2 == 0 else 0
        assert keys.shape[1] == len(table) - open_rows
        told = answer(stream, asked(f"q{i}"))[1]
        assert told.frames == i + 1
        assert told.end == float(i)
        padded = opened(streams, budget=256)
        put(padded, *frames[: i + 1], *([Frame(i + 1e-9, frame.image)] if i % 2 == 0 else []))
        assert answer(stream, asked(f"a{i}"))[0] == answer(padded, asked(f"b{i}"))[0]
        padded.close()
    put(whole, *frames)
    assert kept(stream)[0].ids.tolist() == kept(whole)[0].ids.tolist()
    assert all(torch.equal(a, b) for a, b in zip(kept(stream)[1:], kept(whole)[1:], strict=True))
    assert stream.stats().frames == whole.stats().frames == 6


def test_answers_are_those_of_the_same_rows_run_from_scratch(streams: EngineStreams, served: LoadedModel) -> None:
    """With rows and columns that differ between frames, and after other messages."""
    stream = opened(streams, budget=256)
    sizes = [(16, 16), (24, 16), (24, 16), (16, 24)]
    seen = put(stream, *(noise(i, size=sizes[i // 2]) for i in range(7)))
    assert stream.state is not None
    branch = stream.state.branch(None)
    tokens = torch.cat([seen[i].tokens_RD for i in (1, 3, 5, 6)])
    plain = dataclasses.replace(branch, keys=None, values=None, tokens_kD=tokens)
    call, told = submit(stream, asked("kept", max_new_tokens=12))
    done = call.finished()
    assert told.recomputed_rows == done.usage.prompt_tokens - done.usage.reused_tokens > 0
    again = Call(asked("plain", max_new_tokens=12))
    encoded, run = question(served, again.request, plain, most=512)
    assert run == len(encoded.ids)
    streams._engine.submit(again.request, again.sink, encoded)
    assert [t.id for t in again.finished().tokens] == [t.id for t in done.tokens]
    first = (Message("user", (TextPart("hello"),)), Message("assistant", (TextPart("a circle"),)))
    request = asked("history")
    longer = dataclasses.replace(request, messages=(*first, *request.messages))
    before = kept(stream)
    encoded, _run = question(served, longer, branch, most=512)
    assert encoded.places is not None
    start = len(encoded.ids) - 1
    assert len({int(place) for place in encoded.places[:, start]}) == 1, "text stands at one place on all axes"
    answer(stream, longer)
    assert all(torch.equal(a, b) for a, b in zip(before[1:], kept(stream)[1:], strict=True))


def test_how_frames_come_together_changes_no_bit(bench: Make, served: LoadedModel) -> None:
    """Three streams whose frames share passes, odd ones too, and each of them alone, a frame at a time."""

    def run(*, wait: bool) -> list[Any]:
        streams = EngineStreams(bench(served, max_tokens=512).engine)
        every = [opened(streams, budget=110) for _ in range(3)]
        waiting = []
        for i in range(11):
            for n, stream in enumerate(every):
                waiting.append(stream.append(noise(31 * n + i, float(i))))
                if wait:
                    waiting[-1].result(PATIENCE)
        for each in waiting:
            each.result(PATIENCE)
        found = [kept(stream) for stream in every]
        streams.stop()
        return found

    for mine, other in zip(run(wait=False), run(wait=True), strict=True):
        assert mine[0].ids.tolist() == other[0].ids.tolist()
        assert mine[0].places.tolist() == other[0].places.tolist()
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], other[1:], strict=True))


def test_a_question_is_about_the_frames_that_were_there(bench: Make, served: LoadedModel) -> None:
    """The second of a pair comes before the question's prompt is run, which has the first alone."""
    b = bench(served, max_tokens=512)
    streams = EngineStreams(b.engine)
    stream = opened(streams, budget=200)
    put(stream, *(noise(i) for i in range(5)))
    expected = answer(stream, asked("undisturbed"))[0]
    gate = b.gate("prefill")
    call, told = submit(stream, asked("waiting"))
    gate.wait()
    put(stream, noise(5), noise(6))
    gate.open()
    assert [t.id for t in call.finished().tokens] == expected
    assert told.frames == 5
    assert answer(stream, asked("later"))[0] != expected
    gone(b, streams)


def test_a_pair_that_fails_leaves_its_first_frame(
    bench: Make, served: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a frame seen twice, with K/V of its own once the next one comes."""
    streams = EngineStreams(bench(served, max_tokens=512).engine)
    stream, alone = opened(streams, budget=200), opened(streams, budget=200)
    append, failures = intake.append, iter([False, True])

    def failing(model: Any, batch: Any, floor: int) -> None:
        if batch and next(failures, False):
            raise MemoryError
        append(model, batch, floor)

    monkeypatch.setattr(intake, "append", failing)
    put(stream, *(noise(i) for i in range(2)), noise(2))
    assert isinstance(stream.append(noise(3)).exception(PATIENCE), Internal)
    expected = answer(stream, asked("now"))
    assert expected[1].frames == 3
    put(stream, noise(4))
    assert kept(stream)[1].shape[1] == len(kept(stream)[0]) - int((kept(stream)[0].frame == 2).sum())
    put(stream, noise(5))
    put(alone, noise(0), noise(1), noise(2), Frame(2 + 1e-9, noise(2).image), noise(4), noise(5))
    assert kept(stream)[0].places.tolist() == kept(alone)[0].places.tolist()
    assert all(torch.equal(a, b) for a, b in zip(kept(stream)[1:], kept(alone)[1:], strict=True))
    assert answer(stream, asked("q"))[1].frames == 5
    streams.stop()


def test_a_pause_does_not_use_up_the_positions(bench: Make, served: LoadedModel) -> None:
    """However long nothing came, times of a whole window stay below the limit, and go up with every pair."""
    model = dataclasses.replace(served, spec=dataclasses.replace(served.spec, max_tokens=400))
    streams = EngineStreams(bench(model, max_tokens=400).engine)
    stream = opened(streams, budget=120)
    seconds = 0.0
    for i in range(24):
        seconds += (1.0, 86_400.0)[i % 4 == 2]
        put(stream, noise(i, seconds))
        table = kept(stream)[0]
        assert int(table.places.max()) + streams.model.reserve < 400
    visual = table.take(table.visual)
    times = [int(visual.places[0, visual.frame == unit].min()) for unit in np.unique(visual.frame)]
    assert times == sorted(set(times))
    assert answer(stream, asked("q"))[1].end == seconds
    streams.stop()


RUNS = [("window", "renumber"), ("similarity", "reanchor"), ("group", "gaps")]


@pytest.mark.parametrize(("policy", "positions"), RUNS)
def test_no_stream_grows_or_passes_the_limit(bench: Make, served: LoadedModel, policy: str, positions: str) -> None:
    """Rows, places on each axis and bytes stay within bounds, whatever is asked, and however long nothing comes."""
    model = dataclasses.replace(served, spec=dataclasses.replace(served.spec, max_tokens=160))
    streams = EngineStreams(bench(model, max_tokens=160).engine)
    budget = 64
    stream, quiet = (opened(streams, budget=budget, policy=policy, positions=positions) for _ in range(2))
    held, most, evicted = set(), 0, 0
    for i in range(0, 54, 9):
        frames = [noise(n % 12, n + 1000.0 * (n > 33)) for n in range(i, i + 9)]
        put(stream, *frames)
        put(quiet, *frames)
        assert stream.state is not None
        table, buffers, stats = stream.state._table, stream.state._buffers, stream.stats()
        assert len(table) == stats.kept_rows <= budget
        assert table.places.shape == (3, len(table))
        assert (np.diff(table.places[:, table.kind == Kind.SINK]) == 1).all()
        most = max(most, int(table.places.max()))
        held.add(stats.kv_bytes)
        final = kept(stream)[1].shape[1]
        cos, sin = model.decoder.rotary(torch.from_numpy(table.places[:, :final]))
        assert buffers.keys is not None
        assert buffers.rotated is not None
        assert torch.equal(buffers.rotated[:, :final], rotate(buffers.keys[:, :final], cos, sin))
        if positions == "renumber" and stats.evicted_rows > evicted:
            assert table.places[0, int((table.kind == Kind.SINK).sum())] == (table.kind == Kind.SINK).sum()
        evicted = stats.evicted_rows
        told = answer(stream, asked(f"q{i}"))[1]
        assert told.end == frames[-1].seconds
    assert most < 160 - streams.model.reserve
    assert len(held) == 1
    assert evicted > 0 or policy == "similarity"
    assert all(torch.equal(a, b) for a, b in zip(kept(stream)[1:], kept(quiet)[1:], strict=True)), (
        "questions left traces"
    )
    streams.stop()


def test_a_question_about_the_past_is_that_of_a_stream_of_those_frames(bench: Make, served: LoadedModel) -> None:
    b = bench(served, max_tokens=512)
    streams = EngineStreams(b.engine)
    stream, window = opened(streams, budget=110, policy="recall"), opened(streams, budget=110)
    put(stream, *(noise(i) for i in range(21)))
    past, told = answer(stream, asked("past", max_new_tokens=12), Scope(begin=3, end=7))
    assert (told.frames, told.begin, told.end) == (6, 2.0, 7.0), "whole patches whose newest frame is of that time"
    fresh = opened(streams, budget=110)
    seen = put(fresh, *(noise(i) for i in range(2, 8)))
    assert fresh.state is not None
    rounded = torch.cat([one.tokens_RD for one in seen[1::2]]).bfloat16().float()  # as they are kept
    whole = dataclasses.replace(fresh.state.branch(None), keys=None, values=None, tokens_kD=rounded)
    call = Call(asked("fresh", max_new_tokens=12))
    encoded = question(served, call.request, whole, most=512)[0]
    assert stream.state is not None
    mine = question(served, call.request, stream.state.branch(Scope(begin=3, end=7)), most=512)[0]
    assert mine.places is not None and encoded.places is not None
    assert mine.ids.tolist() == encoded.ids.tolist()
    assert mine.places.tolist() == encoded.places.tolist()
    b.engine.submit(call.request, call.sink, encoded)
    assert [t.id for t in call.finished().tokens] == past
    newest = answer(stream, asked("newest"), Scope(begin=20))[1]
    assert (newest.frames, newest.begin, newest.end) == (1, 20.0, 20.0)
    put(window, *(noise(i) for i in range(8)))
    some = answer(window, asked("some"), Scope(begin=5))[1]
    assert (some.frames, some.begin, some.end) == (4, 4.0, 7.0)
    gone(b, streams)


def test_frames_are_pruned_and_compact_ones_are_one_token(streams: EngineStreams) -> None:
    vision = Vision(pruner="random", amount=Amount("token_budget", 2))
    stream = streams.open(Memory(budget=200), ANONYMOUS, vision)
    put(stream, *(noise(i, size=(24, 16)) for i in range(2)), *(noise(i, detail=False) for i in (2, 3)))
    table = kept(stream)[0]
    counts = [int(((table.frame == f) & (table.kind == Kind.VISUAL)).sum()) for f in range(2)]
    assert counts == [2, 1]
    assert answer(stream, asked("q"))[1].frames == 4
    with pytest.raises(Unimplemented, match="a carrier has neither"):
        opened(streams, budget=200, policy="carrier")
    line = stream.append(Frame(9.0, Image.new("RGB", (402, 2))))
    error = line.exception(20.0)
    assert isinstance(error, InvalidArgument) and "200 times the short one" in str(error)
    put(stream, noise(10))
