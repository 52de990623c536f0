"""Streams of video over an engine: rows are appended and evicted, and questions leave no trace."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from clips import video_model
from harness import PATIENCE, Bench, Call, eventually
from helpers import ask, picture
from mmserve_kernels.rope_scatter import rotate
from streaming import LAST, answer, asked, frame, gone, kept, opened, put, reserved, streaming_model, submit

from mmserve.config import VideoConfig
from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.events import Finished
from mmserve.core.request import Amount, Message, Policy, TextPart, Vision
from mmserve.core.session import Memory
from mmserve.core.tenant import ANONYMOUS
from mmserve.errors import Cancelled, FailedPrecondition, Internal, InvalidArgument, ResourceExhausted, Unimplemented
from mmserve.memory import resident, trim
from mmserve.models.alone import kv_alone
from mmserve.models.base import Attention, LoadedModel
from mmserve.video import intake
from mmserve.video.append import append
from mmserve.video.base import Frame, Scope
from mmserve.video.layout import embedded_rows, question
from mmserve.video.memory import Kind
from mmserve.video.streams import EngineStreams

Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    return streaming_model()


@pytest.fixture
def streams(bench: Make, causal: LoadedModel) -> Iterator[EngineStreams]:
    made = EngineStreams(bench(causal).engine)
    yield made
    made.stop()
    assert reserved(made) == 0


def scratch(model: LoadedModel, table: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K/V of the rows of ``table``, all run in one go."""
    x, _deep = embedded_rows(model, table.ids, tokens)
    layers = len(model.decoder.layers)
    made = list(kv_alone(model.decoder, x, torch.from_numpy(table.places), causal=True, layers=layers))
    return torch.stack([k for k, _v in made]), torch.stack([v for _k, v in made])


def test_appended_rows_are_those_of_a_prompt_with_all_frames(streams: EngineStreams, causal: LoadedModel) -> None:
    stream = opened(streams, budget=90)
    seen = put(stream, *(frame(i) for i in range(10)))
    table, keys, values = kept(stream)
    assert list(np.unique(table.frame)) == [-1, *range(10)]
    tokens = torch.cat([one.tokens_RD for one in seen])
    for mine, theirs in zip((keys, values), scratch(causal, table, tokens), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    text = causal.tokenizer.decode(table.ids[(table.frame == 9) & (table.kind == Kind.LABEL)])
    assert text == "1s:", "times begin again every 8 seconds"
    assert stream.stats().frames == 10
    assert stream.stats().evicted_rows == 0


def test_what_a_pass_over_frames_needs_goes_with_it(streams: EngineStreams) -> None:
    """Each frame sees another number of rows: masks of all of them would be more than the rows themselves."""

    def masks() -> int:
        gc.collect()
        return sum(type(one) is torch.Tensor and one.dtype == torch.bool and one.dim() == 2 for one in gc.get_objects())

    stream = opened(streams, budget=90)
    put(stream, frame(0))
    before = masks()
    put(stream, *(frame(i) for i in range(1, 10)))
    eventually(lambda: masks() <= before, "no mask is kept")


def test_how_frames_come_together_changes_no_bit(bench: Make, causal: LoadedModel) -> None:
    """Eight streams at once, one frame at a time and all at once: K/V and answers are those of each alone."""

    def run(streams: EngineStreams, count: int, *, wait: bool) -> list[Any]:
        opened_ = [opened(streams, budget=40) for _ in range(count)]
        waiting = []
        for i in range(14):
            for n, stream in enumerate(opened_):
                waiting.append(stream.append(frame(i, seed=n)))
                if wait:
                    waiting[-1].result(PATIENCE)
        [one.result(PATIENCE) for one in waiting]
        questions = [submit(stream, asked(f"q{n}", temperature=0.5)) for n, stream in enumerate(opened_)]
        answers = [[t.id for t in call.finished().tokens] for call, _told in questions]
        return [(*kept(stream)[1:], found) for stream, found in zip(opened_, answers, strict=True)]

    together = EngineStreams(bench(causal).engine)
    alone = EngineStreams(bench(causal).engine)
    for (k, v, told), (k1, v1, told1) in zip(run(together, 8, wait=False), run(alone, 8, wait=True), strict=True):
        assert torch.equal(k, k1)
        assert torch.equal(v, v1)
        assert told == told1
    together.stop()
    alone.stop()


def test_a_pass_that_fails_for_one_stream_fails_no_other(
    streams: EngineStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of three streams in one pass: those of two have the K/V that they would have by themselves."""
    broken, *others = (opened(streams, budget=60) for _ in range(3))
    together = []

    def failing(model: Any, batch: Any, floor: int) -> None:
        together.append(len(batch))
        if any(new.buffers is broken.state._buffers for new in batch if new.start >= len(streams.model.header) + 3):
            raise MemoryError
        append(model, batch, floor)

    put(broken, frame(0))
    see, begun, gate = intake.encode_frame, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        begun.set()
        assert gate.wait(PATIENCE)
        return see(*args)

    monkeypatch.setattr(intake, "append", failing)
    monkeypatch.setattr(intake, "encode_frame", held)
    first = others[0].append(frame(0))
    assert begun.wait(PATIENCE)
    waiting = [stream.append(frame(i)) for i in (1, 2) for stream in (broken, *others)]
    gate.set()
    first.result(PATIENCE)
    failed, fine = waiting[::3], [each for i, each in enumerate(waiting) if i % 3]
    for each in failed:
        assert isinstance(each.exception(PATIENCE), Internal)
    for each in fine:
        each.result(PATIENCE)
    assert max(together) >= 6
    alone = opened(streams, budget=60)
    put(alone, frame(1), frame(2))
    assert all(torch.equal(a, b) for a, b in zip(kept(others[1])[1:], kept(alone)[1:], strict=True))
    assert broken.stats().frames == 1
    monkeypatch.setattr(intake, "append", append)
    put(broken, frame(3))
    assert broken.stats().frames == 2


def test_a_question_leaves_the_stream_bit_identical(streams: EngineStreams) -> None:
    stream = opened(streams, budget=60)
    put(stream, *(frame(i) for i in range(6)))
    before = kept(stream)
    first, told = answer(stream, asked("a"))
    again, _told = answer(stream, asked("b"))
    other, _told = answer(stream, asked("c", "how many shapes are there in it?", max_new_tokens=20))
    after = kept(stream)
    assert first == again != other[:6]
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))
    assert (told.frames, told.begin, told.end) == (6, 0.0, 5.0)
    put(stream, frame(6))
    assert answer(stream, asked("d"))[0] != first


def test_a_question_says_what_a_prompt_of_the_same_rows_says(streams: EngineStreams, causal: LoadedModel) -> None:
    """The same rows taken from the stream, and run with the question: the same tokens."""
    stream = opened(streams, budget=60, positions="reanchor")  # which keeps visual tokens, too
    put(stream, *(frame(i) for i in range(5)))
    assert stream.state is not None
    branch = stream.state.branch(None)
    call, told = submit(stream, asked("kept", max_new_tokens=12))
    done = call.finished()
    assert done.usage.reused_tokens == len(branch.table)
    assert told.recomputed_rows == done.usage.prompt_tokens - len(branch.table)
    features = stream.state._buffers.features
    assert features is not None
    tokens = features[torch.from_numpy(branch.table.visual)]
    plain = dataclasses.replace(branch, keys=None, values=None, tokens_kD=tokens)
    again = Call(asked("plain", max_new_tokens=12))
    encoded, run = question(causal, again.request, plain, most=128)
    assert run == len(encoded.ids)
    streams._engine.submit(again.request, again.sink, encoded)
    assert [t.id for t in again.finished().tokens] == [t.id for t in done.tokens]


RUNS = [("window", "renumber"), ("window", "gaps"), ("carrier", "renumber"), ("carrier", "reanchor")]
RUNS += [("similarity", "gaps"), ("group", "gaps")]


@pytest.mark.parametrize(("policy", "positions"), RUNS)
def test_no_stream_grows_or_passes_the_limit(bench: Make, policy: str, positions: str) -> None:
    """Frames at a limit of 120 positions: rows, places and bytes stay within bounds, questions work."""
    model = streaming_model(max_tokens=120)
    streams = EngineStreams(bench(model).engine)
    stream = opened(streams, budget=44, policy=policy, positions=positions, carriers=6)
    held, most = set(), 0
    for i in range(0, 56, 8):
        put(stream, *(frame(n % 24, float(n)) for n in range(i, i + 8)))
        assert stream.state is not None
        table, stats = stream.state._table, stream.stats()
        assert len(table) == stats.kept_rows <= 44
        assert (table.kind == Kind.SINK).sum() == len(streams.model.header)
        assert (np.diff(table.places) > 0).all()
        most = max(most, int(table.places[-1]))
        held.add((stats.kv_bytes, stats.feature_bytes))
        assert (table.kind == Kind.CARRIER).sum() <= 6 * (policy == "carrier")
        assert table.frame[-1] == i + 7
    assert most < 120 - streams.model.reserve
    assert (most > 44) == (positions != "renumber")
    assert len(held) == 1
    stats = stream.stats()
    assert stats.frames == 56
    if policy != "similarity":
        assert stats.evicted_rows > 80
    if policy == "carrier":
        assert (table.kind == Kind.CARRIER).any()
    before = kept(stream)
    told = answer(stream, asked("q", max_new_tokens=30))[1]
    assert told.end == 55.0
    assert all(torch.equal(a, b) for a, b in zip(before[1:], kept(stream)[1:], strict=True))
    streams.stop()


@pytest.mark.parametrize("positions", ["renumber", "gaps", "reanchor"])
def test_turned_keys_are_those_of_their_places(bench: Make, causal: LoadedModel, positions: str) -> None:
    """Whatever was evicted and moved, what passes read is the unrotated keys at the table's places; evicted rows leave
    no trace in the others' order."""
    streams = EngineStreams(bench(causal).engine)
    stream = opened(streams, budget=40, positions=positions)
    put(stream, *(frame(i) for i in range(37)))
    assert stream.state is not None
    table, buffers = stream.state._table, stream.state._buffers
    assert buffers.keys is not None
    assert buffers.rotated is not None
    n = len(table)
    cos, sin = causal.decoder.rotary(torch.from_numpy(table.places))
    assert torch.equal(buffers.rotated[:, :n], rotate(buffers.keys[:, :n], cos, sin))
    assert table.frame[-1] == 36
    assert (np.diff(np.unique(table.frame[table.frame >= 0])) == 1).all()
    streams.stop()


def test_rows_that_are_run_again_are_those_of_a_prompt(bench: Make) -> None:
    """``reanchor``: once positions began anew, nothing is left of what was evicted before."""
    model = streaming_model(max_tokens=120)
    streams = EngineStreams(bench(model).engine)
    stream = opened(streams, budget=44, positions="reanchor")
    assert stream.state is not None
    seen = {}
    for i in range(80):
        [one] = put(stream, frame(i))
        seen[i] = one.tokens_RD
        table, keys, values = kept(stream)
        if i > 40 and table.places[-1] == len(table) - 1:
            break
    assert i < 79, "positions never began anew"
    tokens = torch.cat([seen[f] for f in np.unique(table.frame) if f >= 0])
    for mine, theirs in zip((keys, values), scratch(model, table, tokens), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    streams.stop()


def test_a_question_about_the_past_is_that_of_a_prompt_of_those_frames(bench: Make, causal: LoadedModel) -> None:
    """``recall``: frames that have left the window are prefilled from their features, no tower runs."""
    b = bench(causal)
    streams = EngineStreams(b.engine)
    stream = opened(streams, budget=40, policy="recall")
    put(stream, *(frame(i) for i in range(40)))
    past, told = answer(stream, asked("past", max_new_tokens=12), Scope(begin=8, end=12))
    assert (told.frames, told.begin, told.end) == (5, 8.0, 12.0)
    fresh = opened(streams, budget=40)
    seen = put(fresh, *(frame(i) for i in range(8, 13)))
    assert fresh.state is not None
    rounded = torch.cat([one.tokens_RD for one in seen]).bfloat16().float()  # as they are kept
    clip = dataclasses.replace(fresh.state.branch(None), keys=None, values=None, tokens_kD=rounded)
    call = Call(asked("fresh", max_new_tokens=12))
    b.engine.submit(call.request, call.sink, question(causal, call.request, clip, most=128)[0])
    assert [t.id for t in call.finished().tokens] == past
    assert answer(stream, asked("now", max_new_tokens=12))[0] != past
    every = answer(stream, asked("all"), Scope())[1]
    assert every.frames <= 8, "thinned out to the budget"
    assert (every.begin < 8, every.end) == (True, 39.0)
    with pytest.raises(FailedPrecondition, match="kept are frames of 0 s to 39 s"):
        stream.ask(asked("future"), Scope(begin=50), lambda _event: None)
    window = opened(streams, budget=40)
    put(window, *(frame(i) for i in range(40)))
    with pytest.raises(FailedPrecondition, match="no frame is kept"):
        window.ask(asked("gone"), Scope(begin=8, end=12), lambda _event: None)
    some = answer(window, asked("some"), Scope(begin=38))[1]
    assert (some.frames, some.begin) == (2, 38.0)
    gone(b, streams)


def test_other_messages_in_front_of_a_question(streams: EngineStreams) -> None:
    """The stream is turned behind them, and they are run with the question."""
    stream = opened(streams, budget=40)
    put(stream, *(frame(i) for i in range(4)))
    before = kept(stream)
    request = asked("q", max_new_tokens=4)
    first = (Message("user", (TextPart("hello"),)), Message("assistant", (TextPart("a circle"),)))
    longer = dataclasses.replace(request, messages=(*first, *request.messages))
    plain, told = answer(stream, request)
    with_history, of_history = answer(stream, dataclasses.replace(longer, id="h"))
    assert of_history.recomputed_rows > told.recomputed_rows + len(streams.model.header)
    assert plain != with_history
    assert all(torch.equal(a, b) for a, b in zip(before[1:], kept(stream)[1:], strict=True))


def test_questions_take_constraints_samples_and_cancellation(bench: Make) -> None:
    b = bench(streaming_model(end_ids=video_model().spec.end_ids))
    streams = EngineStreams(b.engine)
    stream = opened(streams, budget=40)
    put(stream, *(frame(i) for i in range(4)))
    yes = dataclasses.replace(asked("yes"), constraint=ConstraintSpec(Regex("yes|no")))
    call, _told = submit(stream, yes)
    assert call.finished().text in ("yes", "no")
    call, _told = submit(stream, asked("three", n=3, temperature=1.0))
    eventually(lambda: sum(isinstance(e, Finished) for e in call.events) == 3, "three samples")
    gate = b.gate("decode")
    call, _told = submit(stream, asked("cancelled", max_new_tokens=20))
    gate.wait()
    b.engine.cancel("cancelled")
    gate.open()
    assert isinstance(call.error(), Cancelled)
    gone(b, streams)


def test_closing_leaves_nothing_and_questions_go_on(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal)
    streams = EngineStreams(b.engine)
    stream, other = opened(streams, budget=40), opened(streams, budget=40)
    put(stream, *(frame(i) for i in range(4)))
    gate = b.gate("prefill")
    call, _told = submit(stream, asked("q"))
    gate.wait()
    waiting = [stream.append(frame(i)) for i in range(4, 40)]
    stream.close()
    stream.close()
    gate.open()
    call.finished()
    assert isinstance(waiting[-1].exception(PATIENCE), Cancelled)
    assert reserved(streams) == other.held
    assert stream.stats().kv_bytes == 0
    for act in (lambda: stream.append(frame(50)), lambda: submit(stream, asked("late"))):
        with pytest.raises(FailedPrecondition, match="closed"):
            act()
    assert put(other, frame(0))[0].seconds == 0.0
    gone(b, streams)


def test_what_cannot_be_is_refused(bench: Make, causal: LoadedModel, text_model: LoadedModel) -> None:
    b = bench(causal)
    probe = EngineStreams(b.engine)
    need = opened(probe, budget=40).held
    probe.stop()
    streams = EngineStreams(b.engine, VideoConfig(max_sessions=3, session_bytes=2 * need, total_bytes=3 * need))
    for memory, field in (
        ({"budget": 4}, "memory.budget"),
        ({"budget": 1000}, "memory.budget"),
        ({"budget": 90}, "session_bytes"),
        ({"policy": "all"}, "memory.policy"),
        ({"positions": "some"}, "memory.positions"),
        ({"budget": 40, "carriers": -1}, "memory.carriers"),
        ({"budget": 40, "policy": "recall", "host_bytes": 0}, "memory.host_bytes"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            opened(streams, **memory)
    first = opened(streams, budget=40)
    opened(streams, budget=70)
    with pytest.raises(ResourceExhausted, match="total_bytes"):
        opened(streams, budget=40)
    opened(streams, budget=10)
    with pytest.raises(ResourceExhausted, match="max_sessions"):
        opened(streams, budget=10)
    with pytest.raises(FailedPrecondition, match="no frame yet"):
        first.ask(asked("early"), None, lambda _event: None)
    put(first, frame(3))
    with pytest.raises(InvalidArgument, match="must be after 3 s"):
        first.append(frame(3))
    with pytest.raises(InvalidArgument, match=r"diffusion\.recompute"):
        first.ask(asked("none", recompute=Policy(name="none")), None, lambda _event: None)
    with pytest.raises(InvalidArgument, match="exceed the limit"):
        first.ask(asked("long", max_new_tokens=120), None, lambda _event: None)
    with pytest.raises(InvalidArgument, match="must be text"):
        first.ask(ask("image", images=(picture(0),), recompute=LAST), None, lambda _event: None)
    streams.stop()
    with pytest.raises(Unimplemented, match="takes no videos"):
        opened(EngineStreams(bench(text_model).engine))


def test_frames_are_pruned_and_compact_ones_are_one_row(bench: Make, causal: LoadedModel) -> None:
    streams = EngineStreams(bench(streaming_model(stride=1)).engine)
    vision = Vision(pruner="random", amount=Amount("token_budget", 2))
    stream = streams.open(Memory(budget=60), ANONYMOUS, vision)
    put(stream, frame(0), frame(1), frame(2, detail=False))
    table = kept(stream)[0]
    counts = [int(((table.frame == f) & (table.kind == Kind.VISUAL)).sum()) for f in range(3)]
    assert counts == [2, 2, 1]
    assert not ((table.frame == 2) & (table.kind == Kind.LABEL)).any()
    with pytest.raises(Unimplemented, match="cannot prune"):
        streams.open(Memory(budget=60), ANONYMOUS, Vision(pruner="fastv", amount=Amount("token_budget", 2)))
    streams.stop()


@pytest.mark.parametrize("attention", [Attention.FULL, Attention.PREFIX])
def test_without_causal_attention_a_question_runs_the_window(bench: Make, attention: Attention) -> None:
    """Only visual tokens are kept; with ``image_reuse``, K/V of frames are found again at the next question."""
    b = bench(streaming_model(attention, 0))
    streams = EngineStreams(b.engine)
    with pytest.raises(Unimplemented, match=r"memory policy .* needs"):
        opened(streams, budget=60, policy="group")
    stream = opened(streams, budget=60, policy="recall")
    put(stream, *(frame(i) for i in range(30)))
    stats = stream.stats()
    assert (stats.kv_bytes, stats.kept_rows <= 60) == (0, True)
    none = Policy(name="none")
    told = answer(stream, asked("full", recompute=none))[1]
    assert told.recomputed_rows > stats.kept_rows
    reusing = dataclasses.replace(
        asked("reused", recompute=none), image_reuse=Policy(name="lego_link", options={"recompute": 0.0})
    )
    call, told_reused = submit(stream, reusing)
    assert told_reused.recomputed_rows == call.finished().usage.prompt_tokens - call.finished().usage.reused_tokens
    assert told_reused.recomputed_rows < told.recomputed_rows
    made = b.engine.stats().kv_cache.made
    call, _told = submit(stream, dataclasses.replace(reusing, id="again"))
    call.finished()
    assert b.engine.stats().kv_cache.made == made
    assert answer(stream, asked("past", recompute=none), Scope(begin=2, end=3))[1].frames == 2
    gone(b, streams)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_flat_over_ten_thousand_frames(bench: Make, causal: LoadedModel) -> None:
    """Bytes of the process, and of the stream; half a minute. ``pytest -m slow tests/engine/test_streams.py``."""
    streams = EngineStreams(bench(causal).engine)
    stream = opened(streams, budget=60, policy="recall", host_bytes=1 << 20)
    pictures = [frame(i).image for i in range(32)]
    seen = []
    for i in range(0, 10_000, 8):
        put(stream, *(Frame(float(n), pictures[n % 32]) for n in range(i, i + 8)))
        if i % 2000 == 0:
            answer(stream, asked(f"q{i}"), Scope(begin=max(0, i - 5)))
        if i >= 2_000 and i % 500 == 0:
            trim()
            seen.append(resident())
    assert stream.stats().frames == 10_000
    assert stream.stats().feature_bytes <= 1 << 20
    assert max(seen) <= 1.03 * seen[0]
    streams.stop()
