"""Streams of block diffusion: whole blocks are appended and never run again, the rest is run with each question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import PATIENCE, Bench, Call
from mmserve_kernels.rope_scatter import rotate
from streaming import answer, asked, frame, gone, kept, opened, put, reserved, streaming_model, submit

from mmserve.core.request import Message, Policy, TextPart
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import DecoderLayer, dense_attention
from mmserve.video import intake
from mmserve.video.base import Scope
from mmserve.video.layout import embedded_rows, question
from mmserve.video.memory import Kind
from mmserve.video.streams import EngineStream, EngineStreams

Make = Callable[..., Bench]

BLOCK = Policy(name="block")
#: Shorter than a frame's four rows, and longer.
LENGTHS = (3, 16)


def block_model(length: int = 4, **spec: Any) -> LoadedModel:
    return streaming_model(Attention.BLOCK_CAUSAL, 0, default_block_length=length, **spec)


@pytest.fixture(scope="module", params=LENGTHS)
def blocks(request: pytest.FixtureRequest) -> LoadedModel:
    return block_model(request.param)


@pytest.fixture
def streams(bench: Make, blocks: LoadedModel) -> Iterator[EngineStreams]:
    made = EngineStreams(bench(blocks).engine)
    yield made
    made.stop()
    assert reserved(made) == 0


def plain_kv(model: LoadedModel, table: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K/V of the rows of ``table``, all run in one go under the mask of blocks."""
    x = embedded_rows(model, table.ids, tokens)[0][None]
    block = np.arange(len(table)) // model.spec.default_block_length
    mask = torch.zeros(len(table), len(table)).masked_fill(torch.from_numpy(block[:, None] < block), -torch.inf)
    cos, sin = model.decoder.rotary(torch.from_numpy(table.places))
    found = []
    for index, layer in enumerate(model.decoder.layers):
        assert isinstance(layer, DecoderLayer)
        found.append(layer.keys_and_values(x[0]))
        x = layer(x, cos, sin, index, dense_attention(mask[None, None]))
    return torch.stack([k for k, _v in found]), torch.stack([v for _k, v in found])


def whole(model: LoadedModel, rows: int) -> int:
    return rows - rows % model.spec.default_block_length


def from_scratch(streams: EngineStreams, stream: EngineStream, name: str, text: str = "what is it?") -> list[int]:
    """The tokens of an answer whose prompt has the rows that ``stream`` keeps, all of them run."""
    assert stream.state is not None
    branch, features = stream.state.branch(None), stream.state._buffers.features
    assert features is not None
    tokens = features[torch.from_numpy(branch.table.visual)]
    plain = dataclasses.replace(branch, keys=None, values=None, tokens_kD=tokens)
    call = Call(asked(name, text, recompute=BLOCK, max_new_tokens=12))
    encoded, run = question(streams.model.model, call.request, plain, most=streams.model.most)
    assert run == len(encoded.ids)
    streams._engine.submit(call.request, call.sink, encoded)
    return [t.id for t in call.finished().tokens]


def test_whole_blocks_are_those_of_a_prompt_with_all_frames(streams: EngineStreams, blocks: LoadedModel) -> None:
    stream = opened(streams, budget=60)
    for i in range(10):
        put(stream, frame(i))
        table, keys, values = kept(stream)
        assert keys.shape[1] == values.shape[1] == whole(blocks, len(table)), "each block is run once it is whole"
        if i == 0:
            first = keys
    assert torch.equal(keys[:, : first.shape[1]], first), "and never again"
    assert stream.state is not None
    assert stream.state._buffers.features is not None
    tokens = stream.state._buffers.features[torch.from_numpy(table.visual)]
    for mine, theirs in zip((keys, values), plain_kv(blocks, table, tokens), strict=True):
        torch.testing.assert_close(mine, theirs[:, : keys.shape[1]], atol=2e-5, rtol=1e-4)
    assert stream.stats().kv_bytes > 0
    assert stream.stats().evicted_rows == 0


def test_answers_are_those_of_the_same_rows_run_from_scratch(streams: EngineStreams, blocks: LoadedModel) -> None:
    """However many rows are pending; and only they and the question's own are run."""
    stream = opened(streams, budget=60)
    pending, answers = set(), set()
    for i in range(9):
        put(stream, frame(i))
        before = kept(stream)
        call, told = submit(stream, asked(f"q{i}", recompute=BLOCK, max_new_tokens=12))
        done = call.finished()
        tokens = [t.id for t in done.tokens]
        assert tokens == from_scratch(streams, stream, f"plain{i}")
        held = before[1].shape[1]
        assert done.usage.reused_tokens == held == whole(blocks, len(before[0]))
        assert told.recomputed_rows == done.usage.prompt_tokens - held
        assert told.frames == i + 1
        pending.add(len(before[0]) - held)
        answers.add(tuple(tokens))
    assert len(pending) > 1
    assert len(answers) > 1


def test_questions_leave_the_stream_bit_identical(streams: EngineStreams, bench: Make, blocks: LoadedModel) -> None:
    """Several at once, while frames go on arriving: the stream is that of nobody who ever asked."""
    stream = opened(streams, budget=40)
    quiet = EngineStreams(bench(blocks).engine)
    unasked = opened(quiet, budget=40)
    calls = []
    for i in range(16):
        put(unasked, frame(i))
        put(stream, frame(i))
        calls += [submit(stream, asked(f"{i}-{n}", "is it?"[n:], recompute=BLOCK))[0] for n in range(2)]
    for call in calls:
        call.finished()
    mine, other = kept(stream), kept(unasked)
    assert mine[0].frame.tolist() == other[0].frame.tolist()
    assert all(torch.equal(a, b) for a, b in zip(mine[1:], other[1:], strict=True))
    assert stream.stats() == unasked.stats()
    assert answer(stream, asked("a", recompute=BLOCK))[0] == answer(unasked, asked("a", recompute=BLOCK))[0]
    gone(bench(blocks), quiet)


def test_how_frames_come_together_changes_no_bit(bench: Make, blocks: LoadedModel) -> None:
    """Four streams whose frames share passes, and each of them alone, a frame at a time."""

    def run(count: int, *, wait: bool) -> list[Any]:
        streams = EngineStreams(bench(blocks).engine)
        every = [opened(streams, budget=40) for _ in range(count)]
        waiting = []
        for i in range(14):
            for n, stream in enumerate(every):
                waiting.append(stream.append(frame(i, seed=n)))
                if wait:
                    waiting[-1].result(PATIENCE)
        for each in waiting:
            each.result(PATIENCE)
        found = [kept(stream) for stream in every]
        streams.stop()
        return found

    for mine, other in zip(run(4, wait=False), run(4, wait=True), strict=True):
        assert mine[0].ids.tolist() == other[0].ids.tolist()
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], other[1:], strict=True))


RUNS = [("window", "renumber"), ("window", "gaps"), ("carrier", "renumber"), ("carrier", "gaps")]
RUNS += [("carrier", "reanchor"), ("similarity", "gaps"), ("group", "renumber"), ("recall", "reanchor")]


@pytest.mark.parametrize(("policy", "positions"), RUNS)
def test_no_stream_grows_or_passes_the_limit(bench: Make, policy: str, positions: str) -> None:
    """Frames at a limit of 120 positions: what was final stays so, and what keys are read by are those places'."""
    model = block_model(8, max_tokens=120)
    streams = EngineStreams(bench(model).engine)
    stream = opened(streams, budget=44, policy=policy, positions=positions, carriers=6)
    held, most = set(), 0
    for i in range(0, 56, 8):
        put(stream, *(frame(n % 24, float(n)) for n in range(i, i + 8)))
        assert stream.state is not None
        table, buffers, stats = stream.state._table, stream.state._buffers, stream.stats()
        final = kept(stream)[1].shape[1]
        assert 0 <= len(table) - final < 8
        assert len(table) == stats.kept_rows <= 44
        assert (np.diff(table.places) > 0).all()
        assert (table.kind == Kind.CARRIER).any() == (policy == "carrier" and stats.evicted_rows > 0)
        most = max(most, int(table.places[-1]))
        held.add((stats.kv_bytes, stats.feature_bytes)) if policy != "recall" else None
        assert buffers.keys is not None
        assert buffers.rotated is not None
        cos, sin = model.decoder.rotary(torch.from_numpy(table.places[:final]))
        assert all(bool(kv[:, :final].isfinite().all()) for kv in kept(stream)[1:])
        assert torch.equal(buffers.rotated[:, :final], rotate(buffers.keys[:, :final], cos, sin))
    assert most < 120 - streams.model.reserve
    assert len(held) <= 1
    assert stream.stats().frames == 56
    before = kept(stream)
    assert answer(stream, asked("q", recompute=BLOCK, max_new_tokens=30))[1].end == 55.0
    assert all(torch.equal(a, b) for a, b in zip(before[1:], kept(stream)[1:], strict=True))
    streams.stop()


def test_rows_that_are_run_again_are_those_of_a_prompt(bench: Make) -> None:
    """``reanchor``: once positions began anew, nothing is left of what was evicted before."""
    model = block_model(8, max_tokens=120)
    streams = EngineStreams(bench(model).engine)
    stream = opened(streams, budget=44, positions="reanchor")
    begun_anew = 0
    for i in range(80):
        put(stream, frame(i))
        table, keys, values = kept(stream)
        if i > 40 and table.places[-1] == len(table) - 1:
            begun_anew += 1
            assert stream.state is not None
            assert stream.state._buffers.features is not None
            tokens = stream.state._buffers.features[torch.from_numpy(table.visual)]
            for mine, theirs in zip((keys, values), plain_kv(model, table, tokens), strict=True):
                torch.testing.assert_close(mine, theirs[:, : mine.shape[1]], atol=2e-5, rtol=1e-4)
            assert answer(stream, asked("q", recompute=BLOCK, max_new_tokens=12))[0] == from_scratch(
                streams, stream, "s"
            )
            break
    assert begun_anew
    streams.stop()


def test_a_window_within_one_block_is_run_with_each_question(bench: Make) -> None:
    """No block of it is ever whole: nothing is appended, and questions see all of it."""
    streams = EngineStreams(bench(block_model(64)).engine)
    stream = opened(streams, budget=40, policy="carrier", carriers=4)
    put(stream, *(frame(i) for i in range(30)))
    table, keys, _values = kept(stream)
    assert keys.shape[1] == 0
    assert (table.kind == Kind.CARRIER).sum() == 4
    tokens, told = answer(stream, asked("q", recompute=BLOCK, max_new_tokens=12))
    assert told.recomputed_rows > len(table)
    assert tokens == from_scratch(streams, stream, "s")
    streams.stop()


def test_a_question_about_the_past_is_that_of_a_prompt_of_those_frames(bench: Make, blocks: LoadedModel) -> None:
    b = bench(blocks)
    streams = EngineStreams(b.engine)
    stream, window = opened(streams, budget=40, policy="recall"), opened(streams, budget=60)
    put(stream, *(frame(i) for i in range(30)))
    past, told = answer(stream, asked("past", recompute=BLOCK), Scope(begin=8, end=12))
    assert (told.frames, told.begin, told.end) == (5, 8.0, 12.0)
    assert told.recomputed_rows > 5
    assert len(past) == 6
    put(window, *(frame(i) for i in range(10)))
    some = answer(window, asked("some", recompute=BLOCK), Scope(begin=8))[1]
    assert (some.frames, some.begin) == (2, 8.0)
    gone(b, streams)


def test_other_messages_in_front_of_a_question(streams: EngineStreams) -> None:
    """They are run with it, and the stream is as it was."""
    stream = opened(streams, budget=40)
    put(stream, *(frame(i) for i in range(4)))
    before = kept(stream)
    request = asked("q", recompute=BLOCK, max_new_tokens=4)
    first = (Message("user", (TextPart("hello"),)), Message("assistant", (TextPart("a circle"),)))
    longer = dataclasses.replace(request, id="h", messages=(*first, *request.messages))
    _plain, told = answer(stream, request)
    _with_history, of_history = answer(stream, longer)
    assert of_history.recomputed_rows > told.recomputed_rows
    assert all(torch.equal(a, b) for a, b in zip(before[1:], kept(stream)[1:], strict=True))


def test_a_pass_that_fails_is_repeated_for_each_frame(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame that completes the block fails; what comes after it completes the same block."""
    streams = EngineStreams(bench(block_model(16)).engine)
    stream, alone = opened(streams, budget=60), opened(streams, budget=60)
    append, refused = intake.append, []

    def failing(model: Any, batch: Any, floor: int) -> None:
        if batch and not refused:
            refused.append(len(batch))
            raise MemoryError
        append(model, batch, floor)

    numbers = iter(range(100))
    while True:
        table = kept(stream)[0] if stream.stats().frames else ()
        if len(table) >= 12:
            break
        put(stream, frame(next(numbers)))
    monkeypatch.setattr(intake, "append", failing)
    lost = next(numbers)
    while not refused:
        waiting = stream.append(frame(lost))
        error = waiting.exception(PATIENCE)
        if error is None:
            lost = next(numbers)
    after = next(numbers)
    put(stream, frame(after))
    put(alone, *(frame(i) for i in range(after + 1) if i != lost))
    assert kept(stream)[0].seconds.tolist()[-1] == kept(alone)[0].seconds.tolist()[-1]
    assert all(torch.equal(a, b) for a, b in zip(kept(stream)[1:], kept(alone)[1:], strict=True))
    streams.stop()


def test_what_cannot_be_is_refused(streams: EngineStreams) -> None:
    stream = opened(streams, budget=40, policy="group")
    put(stream, frame(0))
    with pytest.raises(InvalidArgument, match=r"diffusion\.recompute: must be 'block'"):
        stream.ask(asked("none", recompute=Policy(name="none")), None, lambda _event: None)
    reusing = dataclasses.replace(
        asked("reuse", recompute=BLOCK), image_reuse=Policy(name="lego_link", options={"recompute": 0.0})
    )
    with pytest.raises(Unimplemented, match="image_reuse"):
        stream.ask(reusing, None, lambda _event: None)
