"""Media are read apart from text, in processes that can be stopped, within budgets of time and memory."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
from clips import clip, video_model
from harness import PATIENCE, Bench, eventually
from helpers import ask, picture
from PIL import Image
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from mmserve.bench.hostile_media import black_clip, large_png
from mmserve.config import EncoderCacheConfig, MediaConfig
from mmserve.core.request import Message, Stage, TextPart, VideoPart
from mmserve.encode.child import Child, Pictures
from mmserve.encode.decoders import Decode, InPlace
from mmserve.encode.decoding import PROCESSES, DecodePool
from mmserve.encode.visual import Media, MediaEncoder
from mmserve.encode.watch import Unwatched
from mmserve.encode.wire import MediaFile, rows_of_band
from mmserve.errors import Cancelled, InvalidArgument
from mmserve.models.towers import PaddedProcessor
from mmserve.priority import LOW_PRIORITY
from mmserve.tiers.caches import Caches

FRAMES = 1700


@pytest.fixture(scope="module")
def slow_clip() -> bytes:
    """Some seconds of one core."""
    return black_clip(1280, 720, FRAMES)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The processes that were told to stop."""
    found: list[Child] = []
    real = Child._stop
    monkeypatch.setattr(Child, "_stop", lambda child: (found.append(child), real(child))[1])
    return found


@pytest.fixture
def pool() -> Iterator[DecodePool]:
    with closing(DecodePool(MediaConfig(decode_bytes=4 * 500 * 500 * 2))) as made:
        yield made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is not killed for being slow on a busy machine."""
    monkeypatch.setattr("mmserve.encode.child._GRACE", 60.0)


def go_on() -> None:
    return


def ignore(_rows: list[int]) -> None:
    return


def test_text_overtakes_a_clip_and_a_cancelled_clip_is_not_decoded_on(
    stopped: list[Child], patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clip's first frame is not read until its request is cancelled, so its process cannot decode all of it."""
    reading = threading.Event()

    def picture_of(_child: Child, _width: int, _height: int, check: Callable[[], None]) -> Image.Image:
        reading.set()
        while True:
            check()
            time.sleep(0.005)

    monkeypatch.setattr(Child, "_picture", picture_of)
    PROCESSES.end()  # one that has decoded much ends after its next job
    frames, b = 100, Bench(video_model())
    try:
        parts = (VideoPart(black_clip(1280, 720, frames)), TextPart("what is it?"))
        [clip] = b.submit(dataclasses.replace(ask("clip"), messages=(Message("user", parts),)))
        assert b.ask(ask("text")).usage.completion_tokens > 0
        assert reading.wait(PATIENCE)
        b.await_stage("clip", Stage.LOADING)
        b.engine.cancel("clip")
        assert isinstance(clip.error(), Cancelled)
        b.await_nothing_left()
        [child] = stopped
        assert child.decoded < frames
        assert child.alive, "it stopped by itself, between two frames"
    finally:
        b.close()


def test_pixels_held_at_once_stay_within_the_budget(pool: DecodePool) -> None:
    file = MediaFile(large_png(500), False, "image")
    sizes = list(pool.map([lambda decode: decode(file).frames[0].size] * 9, go_on))
    assert sizes == [(500, 500)] * 9
    assert pool.budget.used == 0 < pool.budget.most <= pool.budget.limit
    with pytest.raises(InvalidArgument, match=r"\[media\] decode_bytes"):  # found once its size is known
        list(pool.map([lambda decode: decode(MediaFile(large_png(1000), False, "image"))], go_on))
    assert pool.budget.used == 0


@pytest.mark.parametrize(
    ("limits", "size"),
    [({"max_pixels": 99}, 10), ({"max_side": 9}, 10), ({"max_item_bytes": 9}, 10)],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_refusal_names_the_setting(limits: dict[str, int], size: int) -> None:
    refused = pytest.raises(InvalidArgument, match=rf"\[media\] {next(iter(limits))} of the server")
    with closing(DecodePool(MediaConfig(**limits))) as pool, refused:
        list(pool.map([lambda decode: decode(MediaFile(large_png(size), False, "image"))], go_on))


@pytest.mark.parametrize("calls", [*range(8), 12, 40])
def test_a_process_is_used_again_wherever_a_job_was_stopped(calls: int, patient: None) -> None:
    """Within a message, within a picture, or between two: what the process still sends belongs to the job."""

    class ClipEncoder:
        left = calls

        def reserve(self, pixels: int) -> None:
            return

        def check(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Cancelled("not wanted")

    child, file = Child(), MediaFile(large_png(1500), False, "image")
    try:
        with suppress(Cancelled):
            child.decode(file, MediaConfig(), ClipEncoder())
        assert child.alive
        [image] = child.decode(file, MediaConfig(), Unwatched()).frames
        assert image.size == (1500, 1500)
    finally:
        child.end()


@pytest.mark.parametrize("bands", [0, 1, 2])
def test_a_process_that_is_stopped_within_a_picture_ends_it_there(
    bands: int, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture is more than a pipe holds, so the process has not sent all of it when it is told to stop."""
    side, received = 1500, 0
    child, file, real = Child(), MediaFile(large_png(side), False, "image"), Child._band

    def band(child: Child, check: Callable[[], None]) -> memoryview:
        nonlocal received
        received += 1
        if received == bands + 1:
            raise Cancelled("not wanted")
        return real(child, check)

    monkeypatch.setattr(Child, "_band", band)
    try:
        with pytest.raises(Cancelled):
            child.decode(file, MediaConfig(), Unwatched())
        assert child.alive
        assert received < side / rows_of_band(side), "the rest of the picture came"
        [image] = child.decode(file, MediaConfig(), Unwatched()).frames
        assert image.size == (side, side)
    finally:
        child.end()


def test_a_file_that_takes_too_long_is_refused(slow_clip: bytes) -> None:
    refused = pytest.raises(InvalidArgument, match=r"0.1 s of processor time .*\[media\] decode_seconds")
    with closing(DecodePool(MediaConfig(decode_seconds=0.1))) as pool, refused:
        list(pool.map([lambda decode: decode(MediaFile(slow_clip, True, "video", 8))], go_on))


def test_a_process_that_is_killed_from_outside_is_replaced(slow_clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = Child.decode

    def killed_once(child: Child, *given: Any) -> Pictures:
        asked.append(child.pid)
        if len(asked) == 1:
            os.kill(child.pid, signal.SIGKILL)
        return real(child, *given)

    monkeypatch.setattr(Child, "decode", killed_once)
    with closing(DecodePool(MediaConfig())) as pool:
        [size] = pool.map([lambda decode: decode(MediaFile(picture(0), False, "image")).frames[0].size], go_on)
    assert len(size) == len(set(asked)) == 2
    assert pool.budget.used == 0


def test_who_has_many_files_takes_turns_with_who_has_one() -> None:
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def work(name: str, *, waits: bool = False) -> Any:
        def run(_decode: Decode) -> None:
            if waits:
                begun.set()
                assert go.wait(30)
            order.append(name)

        return run

    with closing(DecodePool(MediaConfig(decode_workers=1))) as pool:
        many = [work("first", waits=True), *[work(f"many {i}") for i in range(5)]]
        threads = [threading.Thread(target=lambda: list(pool.map(many, go_on)))]
        threads[0].start()
        assert begun.wait(30)
        threads.append(threading.Thread(target=lambda: list(pool.map([work("one")], go_on))))
        threads[1].start()
        eventually(lambda: len(pool._queues) == 2, "both wait")
        go.set()
        for thread in threads:
            thread.join()
    assert order.index("one") <= 2


def test_idle_processes_are_used_again() -> None:
    PROCESSES.end()
    file = MediaFile(picture(0), False, "image")
    with closing(DecodePool(MediaConfig())) as pool:
        for _ in range(3):
            list(pool.map([lambda decode: decode(file)], go_on))
    assert len(PROCESSES._idle) == 1


def test_idle_processes_that_have_ended_are_given_back() -> None:
    """Also those that are never taken again, since later ones are taken first."""
    processes = type(PROCESSES)()
    first, second = processes.take(), processes.take()
    processes.put_back(first)
    processes.put_back(second)
    assert processes.take() is second
    first.kill()
    eventually(lambda: not first.alive, "the process ends")
    processes.put_back(second)
    assert processes._idle == [second]
    assert first._process.stdin is not None and first._process.stdin.closed
    processes.end()


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Width and height of the pictures that processes sent."""
    found: list[tuple[int, int]] = []
    real = Child._picture

    def picture_of(child: Child, width: int, height: int, check: Callable[[], None]) -> Image.Image:
        found.append((width, height))
        return real(child, width, height, check)

    monkeypatch.setattr(Child, "_picture", picture_of)
    return found


@pytest.mark.parametrize("kind", [CLIPImageProcessorPil, SiglipImageProcessorPil])
@pytest.mark.parametrize("size", [(300, 200), (20, 50)])
def test_a_plain_resize_is_done_where_the_file_is_decoded(
    kind: type[Any], size: tuple[int, int], received: list[tuple[int, int]]
) -> None:
    model = video_model()
    vision: Any = model.vision
    vision.processor = vision.frames = kind(size={"height": 28, "width": 28}, do_center_crop=False)
    image, video = picture(0, size), clip(frames=6, size=size)
    items = [Media(image, False, "image", None, None, False), Media(video, True, "video", None, None, False)]
    with closing(DecodePool(MediaConfig())) as pool:
        alone = MediaEncoder(model, MediaConfig(), Caches.of(EncoderCacheConfig())).load(items, ignore)
        loaded = MediaEncoder(model, MediaConfig(), Caches.of(EncoderCacheConfig()), pool).load(items, ignore)
    assert received == [(28, 28)] * (1 + vision.frames_per_video)
    for i in range(len(items)):
        assert torch.equal(loaded.prepared[i][0]["pixels"], alone.prepared[i][0]["pixels"])
    alone.close()
    loaded.close()


@pytest.mark.parametrize(
    "processor",
    [
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        CLIPImageProcessorPil(size={"height": 28, "width": 28}, do_resize=False),
        PaddedProcessor(CLIPImageProcessorPil(size={"height": 28, "width": 28})),
    ],
    ids=["by the shortest side", "none", "after padding"],
)
def test_a_resize_that_depends_on_the_picture_is_left_to_the_processor(processor: Any) -> None:
    vision: Any = video_model().vision
    vision.processor = vision.frames = processor
    assert vision.first_resize(clip=False, among=False) is None
    assert vision.first_resize(clip=True, among=False) is None


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
def test_media_threads_have_a_low_priority_and_those_of_text_do_not() -> None:
    b = Bench(video_model())
    try:
        message = Message("user", (VideoPart(clip(frames=4)), TextPart("what is it?")))
        b.ask(dataclasses.replace(ask("clip"), messages=(message,)))
        b.ask(ask("text"))
        nice = {
            thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
            for thread in threading.enumerate()
            if thread.name.startswith("mmserve-")
        }
    finally:
        b.close()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for low in ("mmserve-load", "mmserve-encode", "mmserve-media-0"):
        assert nice[low] == max(own, LOW_PRIORITY)
    for usual in ("mmserve-tokenize", "mmserve-prefill", "mmserve-decode"):
        assert nice[usual] == own


def test_idle_processes_end_with_the_last_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    file, processes = MediaFile(picture(0), False, "image"), type(PROCESSES)()
    monkeypatch.setattr(
        "mmserve.encode.decoding.PROCESSES", processes
    )  # other tests' servers have pools in this process, too
    first, second = DecodePool(MediaConfig()), DecodePool(MediaConfig())
    first.open()
    second.open()
    list(first.map([lambda decode: decode(file)], go_on))
    first.close()
    [child] = processes._idle
    assert child.alive
    second.close()
    assert not processes._idle
    assert not child.alive


def test_images_go_through_the_tower_while_those_after_them_are_decoded() -> None:
    """The second file is given only once the first has been seen; the last is left to the encode stage."""
    model, seen = video_model(), threading.Event()
    vision: Any = model.vision
    see = vision.encode

    def watched(*given: Any, **how: Any) -> Any:
        seen.set()
        return see(*given, **how)

    class Waiting(InPlace):
        def map(self, works: Any, check: Any) -> Any:
            for n, result in enumerate(super().map(works, check)):
                assert n == 0 or seen.wait(20), "the tower waits for all files"
                yield result

    vision.encode = watched
    items = [Media(picture(i), False, f"images[{i}]", None, None, False) for i in range(3)]
    viewer = MediaEncoder(model, MediaConfig(), Caches.of(EncoderCacheConfig()), Waiting(MediaConfig()))
    with torch.inference_mode(), closing(viewer.load(items, ignore)) as loaded:
        assert [entry is not None for entry in loaded.entries] == [True, True, False]
        with viewer.view([loaded], ignore) as found:
            ahead = [one.tokens_KD for one in found]
    plain = MediaEncoder(model, MediaConfig(), Caches.of(EncoderCacheConfig()))
    for item, tokens in zip(items, ahead, strict=True):
        with torch.inference_mode(), closing(plain.load([item], ignore)) as own, plain.view([own], ignore) as [one]:
            assert torch.equal(one.tokens_KD, tokens)
