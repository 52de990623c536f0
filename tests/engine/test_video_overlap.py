"""A long clip is decoded, seen and prefilled at the same time, and nothing of the answer depends on that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from clips import clip, video_model
from harness import PATIENCE, Bench, eventually
from helpers import ask, picture

from mmserve.config import MediaConfig
from mmserve.core.decisions import YES_NO, Decision
from mmserve.core.events import Finished
from mmserve.core.request import Amount, Message, Policy, Request, Stage, TextPart, VideoPart, VideoSampling, Vision
from mmserve.encode import video
from mmserve.encode.child import Child, Planned
from mmserve.encode.clip_encoder import ClipEncoder, clip_file
from mmserve.encode.decoding import PROCESSES, DecodePool
from mmserve.encode.sampling import Sampled
from mmserve.encode.visual import MediaEncoder
from mmserve.encode.wire import MediaFile
from mmserve.errors import Cancelled, DeadlineExceeded, InvalidArgument, MMServeError
from mmserve.models.base import Attention, LoadedModel

FRAMES, ROWS = 60, 32  # of the clip, and of a chunk of prefill
FILE = clip(frames=FRAMES, rate=10, gop=10)
#: The same file with a part of its pictures, in the middle, lost.
#: Damaged after more frames than may wait for the tower, so that some are seen before the damage is met.
DAMAGED = FILE[: len(FILE) * 12 // 16] + bytes(len(FILE) // 16) + FILE[len(FILE) * 12 // 16 + len(FILE) // 16 :]
EVERY = VideoSampling(fps=10)


def model_of(attention: Attention | None) -> LoadedModel:
    """Two tokens and a label a frame; ``attention`` None = the diffusion model's own."""
    model = video_model(stride=1, time="{seconds}s:")
    if attention is None:
        return model
    return replace(model, spec=replace(model.spec, attention=attention, logit_shift=1))


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    return model_of(Attention.CAUSAL)


def watching(name: str, file: bytes = FILE, sampling: VideoSampling = EVERY, **changes: Any) -> Request:
    message = Message("user", (TextPart("a text before the clip. " * 4), VideoPart(file, sampling), TextPart("when?")))
    return replace(ask(name, max_new_tokens=8, recompute=Policy(name="last")), messages=(message,), **changes)


def bench_of(model: LoadedModel, **config: Any) -> Bench:
    return Bench(model, max_tokens=1024, prefill_tokens=ROWS, **config)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have clips read, seen and prefilled one after the other from now on."""
    return lambda: monkeypatch.setattr(MediaEncoder, "_streams", lambda *_of: False)


def told(done: Finished) -> tuple[Any, ...]:
    usage = done.usage
    return done.text, done.reason, done.tokens, usage.prompt_tokens, usage.visual_tokens, usage.visual_tokens_before


class Hold:
    """Holds the reading of clips once so many frames were seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        seen, real = [0], ClipEncoder._run_tower

        def held(watching: ClipEncoder, prepared: Any) -> Any:
            if seen[0] >= after and not self._go.is_set():
                self.reached.set()
                assert self._go.wait(PATIENCE), "nobody let it go on"
            seen[0] += len(prepared["pixels"])
            return real(watching, prepared)

        monkeypatch.setattr(ClipEncoder, "_run_tower", held)

    def go_on(self) -> None:
        self._go.set()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Half of the clip is seen."""
    made = Hold(monkeypatch, FRAMES // 2)
    yield made
    made.go_on()


REQUESTS = {
    "every frame": watching("every"),
    "by number, pruned": watching(
        "number",
        sampling=VideoSampling(frames=37),
        vision=Vision(pruner="cls_attention", amount=Amount("keep_ratio", 0.4)),
    ),
    "slow-fast": watching("slow", sampling=VideoSampling(fps=10, detail_every=4)),
    "scenes": watching("scenes", sampling=VideoSampling(fps=10, scene_frames=5)),
}


@pytest.mark.parametrize("attention", [Attention.CAUSAL, None], ids=["causal", "diffusion"])
def test_answers_are_bit_for_bit_those_of_one_stage_after_the_other(
    attention: Attention | None, whole: Callable[[], None]
) -> None:
    """With tokens and their log-probabilities; cold, and again from the caches."""
    model = model_of(attention)
    found: list[dict[str, Any]] = []
    for overlaps in (True, False):
        if not overlaps:
            whole()
        b = bench_of(model)
        try:
            wanted = [replace(r, streaming=replace(r.streaming, tokens=True)) for r in REQUESTS.values()]
            if attention is None:
                fewer = wanted[:2]
                wanted = [replace(r, diffusion=replace(r.diffusion, recompute=Policy(name="none"))) for r in fewer]
            answers = {r.id: told(b.ask(r)) for r in wanted}
            before = b.engine.stats()
            assert told(b.ask(replace(wanted[0], id="again"))) == answers["every"]
            after = b.engine.stats()
            assert after.token_cache.hits - before.token_cache.hits == 1, "its visual tokens were kept"
            if attention is not None:
                assert after.prefix_hits > before.prefix_hits, "and so were its K/V"
            found.append(answers)
        finally:
            b.close()
    assert found[0] == found[1]


def test_prefill_begins_before_the_clip_is_read(causal: LoadedModel, hold: Hold) -> None:
    b = bench_of(causal)
    try:
        [call] = b.submit(watching("v"))
        assert hold.reached.wait(PATIENCE)
        prefilling = b.engine.stages.prefilling.begun
        eventually(lambda: "v" in prefilling and prefilling["v"].run >= 2 * ROWS, "chunks of its prompt are prefilled")
        state, page = b.engine._live.by_id["v"], b.engine.config.page_size
        eventually(lambda: state.stage is Stage.ENCODED and state.awaits(page, ROWS), "all whole chunks are prefilled")
        assert prefilling["v"].run % ROWS == 0 and b.stage("v") is Stage.ENCODED and not call.ended
        assert b.ask(ask("text")).usage.completion_tokens > 0, "others go on meanwhile"
        hold.go_on()
        assert call.finished().usage.visual_tokens == 4 * FRAMES
        b.await_nothing_left()
    finally:
        b.close()


@pytest.mark.parametrize("how", ["cancelled", pytest.param("late", marks=pytest.mark.slow)])
def test_what_is_not_wanted_any_more_ends_between_two_chunks(how: str, causal: LoadedModel, hold: Hold) -> None:
    b = bench_of(causal)
    try:
        deadline = time.monotonic() + 2.0 if how == "late" else None
        [call] = b.submit(watching("v", deadline=deadline))
        assert hold.reached.wait(PATIENCE)
        eventually(lambda: b.engine.stats().pages_in_use > 0, "it has pages")
        if how == "cancelled":
            b.engine.cancel("v")
        error: MMServeError = call.error()
        assert isinstance(error, Cancelled if how == "cancelled" else DeadlineExceeded)
        hold.go_on()
        eventually(lambda: b.engine.stats().live == 0, "it ends")
        left = b.engine.stats()
        assert (left.pages_in_use, left.held) == (0, 0) and not b.engine.stages.encoder.cache.tokens._kept
        assert b.ask(watching("again")).usage.visual_tokens == 4 * FRAMES
    finally:
        b.close()


def test_a_file_that_is_damaged_in_the_middle_leaves_nothing(
    causal: LoadedModel, monkeypatch: pytest.MonkeyPatch, whole: Callable[[], None]
) -> None:
    b = bench_of(causal, media=MediaConfig(decode_threads=1))  # another would meet the damage before a frame is used
    try:
        hold = Hold(monkeypatch, 8)
        [call] = b.submit(watching("v", DAMAGED))
        assert hold.reached.wait(PATIENCE)
        eventually(lambda: b.engine.stats().pages_in_use > 0, "its prefill has begun")
        hold.go_on()
        error = call.error()
        assert isinstance(error, InvalidArgument)
        eventually(lambda: b.engine.stats().live == 0, "it ends")
        left = b.engine.stats()
        assert (left.pages_in_use, left.held, left.token_cache.entries) == (0, 0, 0)
        whole()
        before = b.submit(watching("w", DAMAGED))[0].error()
        assert (str(error), error.violations) == (str(before), before.violations)  # type: ignore[attr-defined]
    finally:
        b.close()


def test_a_clip_that_is_not_as_foreseen_begins_again(causal: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some files less can be decoded than their packets promise."""
    b, expected = bench_of(causal), bench_of(causal)
    picture_of, again = ClipEncoder.picture, []
    discard = b.engine.stages.prefilling.discard

    def other(watching: ClipEncoder, decoders: Any, *rest: Any) -> Any:
        class Promising:
            def chunks(self, *given: Any) -> Any:
                with closing(decoders.chunks(*given)) as chunks:
                    for chunk in chunks:
                        yield (
                            replace(chunk, seconds=(*chunk.seconds[:-1], 7.0)) if isinstance(chunk, Planned) else chunk
                        )

        return picture_of(watching, Promising(), *rest)  # type: ignore[arg-type]

    try:
        answer = told(expected.ask(watching("v")))
        monkeypatch.setattr(ClipEncoder, "picture", other)
        monkeypatch.setattr(
            b.engine.stages.prefilling, "discard", lambda request: (again.append(request), discard(request))
        )
        assert told(b.ask(watching("v"))) == answer
        eventually(lambda: (b.engine.stats().pages_in_use, b.engine.stats().held) == (0, 0), "nothing is left")
        assert again == ["v", "v"], "once to begin again, and once at its end"
    finally:
        b.close()
        expected.close()


def test_a_prompt_that_is_too_long_is_refused_before_its_clip_is_decoded(
    causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench_of(causal)
    seen = Hold(monkeypatch, 0)
    try:
        error = b.submit(replace(watching("v"), sampling=replace(watching("v").sampling, max_new_tokens=900)))[
            0
        ].error()
        assert isinstance(error, InvalidArgument) and "exceed the limit" in str(error)
        assert not seen.reached.is_set(), "no frame was seen"
    finally:
        b.close()


def test_more_questions_about_a_clip_than_there_are_pages_for_are_refused_before_it_is_read(
    causal: LoadedModel, hold: Hold
) -> None:
    """Others would wait until it gets its pages, which it never does."""
    b = bench_of(causal, pages=128)
    try:
        questions = (Decision(kind=YES_NO, text="Is there a red circle?"),)
        [call] = b.submit(watching("many", decisions=questions * 128))
        error = call.error()
        assert isinstance(error, InvalidArgument) and "128 questions need" in str(error)
        hold.go_on()
        assert b.ask(ask("other")).usage.completion_tokens > 0
        assert len(b.ask(watching("few", decisions=questions)).decisions) == 1
        b.await_nothing_left()
    finally:
        b.close()


def read(pool: DecodePool, file: MediaFile, make: Callable[[list[Sampled]], Any]) -> list[Any]:
    with closing(pool.chunks(file, 8, make, lambda: None)) as chunks:
        return list(chunks)


def test_frames_wait_for_the_tower_a_few_at_a_time_and_hold_up_nobody_else(causal: LoadedModel) -> None:
    assert causal.vision is not None
    pool = DecodePool(MediaConfig(decode_workers=1, decode_threads=1))
    pool.open()
    made: list[int] = []
    file = clip_file(FILE, "video", EVERY, causal.vision, None, window=9)
    try:
        with closing(pool.chunks(file, 8, lambda frames: made.append(len(frames)), lambda: None)) as chunks:
            assert isinstance(next(chunks), Planned)
            next(chunks)
            eventually(lambda: pool._waiting_for_tower == 1, "the reader waits")
            assert len(made) <= 4, "one is seen, two wait, one is made"
            assert pool.budget.used == 4 * 9 * 64 * 48, "pixels of a few frames, not of all"
            small = MediaFile(picture(0), False, "image")
            [size] = pool.map([lambda decode: decode(small).frames[0].size], lambda: None)
            assert size and len(made) <= 4
            assert len(list(chunks)) == 7 and sum(made) == FRAMES
        assert (pool.budget.used, pool._waiting_for_tower, pool._working) == (0, 0, 0)
    finally:
        pool.close()


def test_a_process_that_is_killed_is_replaced_without_frames_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DecodePool(MediaConfig(decode_workers=1))
    pool.open()
    file = clip_file(FILE, "video", EVERY, video_model().vision, None, window=9)  # type: ignore[arg-type]
    try:
        expected = [f.seconds for f in video.clip_frames(file, MediaConfig())]
        killed: list[int] = []

        def make(frames: list[Sampled]) -> list[float]:
            if not killed:
                [one] = [child for child in children if child.alive]
                killed.append(one.pid)
                one.kill()
            return [frame.seconds for frame in frames]

        children: list[Child] = []
        begin = Child.__init__
        monkeypatch.setattr(Child, "__init__", lambda child: (begin(child), children.append(child))[0])
        PROCESSES.end()
        found = [at for part in read(pool, file, make) if not isinstance(part, Planned) for at in part]
        assert found == expected and killed
    finally:
        pool.close()
