from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import PIL.Image
import pytest
from echo_server import PATIENCE, EchoEngine, config, late, served, threaded

from mmserve import client as sdk
from mmserve.client import AsyncClient, Client, DkvDecode, Threshold
from mmserve.client.result import to_result
from mmserve.core.events import Admitted, Delta, Finished, Snapshot
from mmserve.core.request import ImagePart, Message, Policy, TextPart, VideoPart
from mmserve.errors import (
    BY_CODE,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

PNG = b"\x89PNG and so on"


def test_public_names() -> None:
    events = ["Admitted", "CommittedToken", "ConstraintStats", "Delta", "Event", "Finished", "Snapshot"]
    events += ["Alternative", "Draft", "DraftAlternative", "DraftPosition", "Prefilled", "PromptToken"]
    events += ["Call", "StageTimes", "Tool", "ToolCall", "ToolCallDelta", "Usage"]
    inputs = [
        "Hole",
        "ImagePart",
        "Message",
        "Options",
        "TLS",
        "Template",
        "TextPart",
        "TokensPart",
        "VideoPart",
        "VideoSampling",
    ]
    inputs += ["SeedCanvas"]
    recompute = ["Adaptive", "DkvDecode", "DkvGreedy"]
    commit = ["Confident", "EarlyCommit", "Edit", "EntropyBound", "Factor", "Learned", "Ngram", "Threshold"]
    commit += ["DraftModel", "Guided", "Scheduler"]
    commit += ["ExpectedAttention", "HeavyHitters", "SinkWindow", "VisualCache"]
    reuse = ["Blend", "KvShare", "LegoLink", "RandomReuse"]
    errors = [
        *(kind.__name__ for kind in BY_CODE.values()),
        "MMServeError",
        "TLSError",
        "ConfigError",
        "FieldViolation",
    ]
    others = ["AsyncClient", "Client", "Measured", "ModelInfo", "Pair", "Result", "Tuning"]
    video = ["Alert", "Alerts", "Asked", "AsyncAlerts", "AsyncQuestion", "AsyncVideoSession", "PushFailed", "Question"]
    video += ["Moment", "SessionOptions", "Statistics", "VideoSession"]
    decisions = ["Answered", "Choice", "Decisions", "Score", "YesNo"]
    caches = ["CacheEntry", "Listing", "Warmed"]
    assert sorted(sdk.__all__) == sorted(
        [*caches, *decisions, *events, *inputs, *recompute, *commit, *reuse, *errors, *others, *video]
    )


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert public(sdk.VideoSession) | {"open"} == public(sdk.AsyncVideoSession)
    assert public(sdk.Question) == public(sdk.AsyncQuestion)
    assert public(sdk.Alerts) == public(sdk.AsyncAlerts)


def test_generate(address: str, engine: EchoEngine) -> None:
    with Client(address) as client:
        result = client.generate("a small echo", request_id="mine")
    assert (result.text, result.finish_reason, result.request_id) == ("a small echo", "end", "mine")
    assert (result.usage.completion_tokens, result.forwards, result.tokens_per_forward) == (3, 3, 1.0)
    assert (result.recomputed_tokens, result.times.decode, result.warnings) == (7, 4.0, ("an echo",))
    assert not engine.requests[0].streaming.deltas
    left = engine.requests[0].deadline - time.monotonic()
    assert 50 < left < 61  # gRPC rounds a timeout up on the wire, by less than a hundredth


def test_samples(address: str, engine: EchoEngine) -> None:
    with Client(address) as client:
        one = client.generate("a small echo")
        assert (one.samples, one.others) == ((one,), ())
        result = client.generate("a small echo", n=3, request_id="mine")
        assert engine.requests[-1].sampling.n == 3
        assert result.samples == (result, *result.others) and len(result.samples) == 3
        assert {(r.text, r.request_id, r.others) for r in result.others} == {("a small echo", "mine", ())}
        events = list(client.stream("a small echo", n=2))
    assert sum(isinstance(e, Admitted) for e in events) == 1
    assert [e.sample for e in events if isinstance(e, Finished)] == [0, 1] and isinstance(events[-1], Finished)
    for sample in (0, 1):
        assert "".join(e.text for e in events if isinstance(e, Delta) and e.sample == sample) == "a small echo"

    async def asked() -> None:
        async with AsyncClient(address) as other:
            assert [r.text for r in (await other.generate("x y", n=2)).samples] == ["x y", "x y"]

    asyncio.run(asked())


def test_a_failed_sample_fails_the_request(address: str, engine: EchoEngine) -> None:
    engine.failure = FailedPrecondition("not this one")
    with Client(address) as client, pytest.raises(FailedPrecondition, match="not this one"):
        client.generate("a small echo", n=3)


@pytest.mark.parametrize("missing", [[], [0], [0, 2], [0, 1, 1]])
def test_a_result_lacks_no_sample(missing: list[int]) -> None:
    done = [Finished("end", "t", sdk.Usage(1, 0, 1), 1, 1, sdk.StageTimes(), sample=i) for i in missing]
    with pytest.raises(Unavailable, match="without an answer"):
        to_result(done, 3, "id")


def test_every_option_reaches_the_engine(address: str, engine: EchoEngine) -> None:
    with Client(address) as client:
        client.generate(
            "x",
            model="echo",
            max_new_tokens=5,
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            min_p=0.125,
            repetition_penalty=1.5,
            logit_bias={3: -1.5},
            tokens=True,
            seed=2**64 - 1,
            stop="end",
            steps=4,
            block_length=2,
            cfg_scale=1.5,
            recompute=DkvDecode(4),
            commit=Threshold(0.5),
        )
        client.generate("x", recompute="dkv_decode", commit="threshold", stop=["a", "b"])
        client.generate("x", recompute="none", commit="low_confidence")
    first, second, third = engine.requests
    s = first.sampling
    assert (s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.seed, s.stop) == (5, 0.5, 0.25, 3, 2**64 - 1, ("end",))
    assert (s.min_p, s.repetition_penalty, first.streaming.tokens) == (0.125, 1.5, True)
    assert s.logit_bias == {3: -1.5} and second.sampling.logit_bias == {}
    assert (second.sampling.min_p, second.sampling.repetition_penalty, second.streaming.tokens) == (0.0, 1.0, False)
    assert (first.diffusion.steps, first.diffusion.block_length, first.diffusion.cfg_scale) == (4, 2, 1.5)
    assert second.diffusion.cfg_scale == 0
    assert first.diffusion.recompute == Policy(name="dkv_decode", options={"refresh": 4})
    assert first.diffusion.commit == Policy(name="threshold", options={"confidence": 0.5})
    assert second.diffusion.recompute == Policy(name="dkv_decode")
    assert second.diffusion.commit == Policy(name="threshold")
    assert second.sampling.stop == ("a", "b")
    assert third.diffusion.recompute == Policy(name="none")
    assert third.diffusion.commit == Policy(name="low_confidence")


def test_images_of_every_kind(address: str, engine: EchoEngine, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(PNG)
    with Client(address) as client:
        uploaded = client.upload(file)
        assert client.upload(PNG) == uploaded
        picture = PIL.Image.new("CMYK", (2, 2))
        result = client.generate("look", images=[PNG, file, uploaded, picture])
    *images, text = engine.requests[0].messages[0].parts
    assert [p.data for p in images[:3] if isinstance(p, ImagePart)] == [PNG] * 3
    assert isinstance(images[3], ImagePart) and images[3].data.startswith(b"\x89PNG\r\n")
    assert text == TextPart("look")
    assert result.usage.visual_tokens == 4 * 81


def test_videos_of_every_kind(address: str, engine: EchoEngine, tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(b"from a file")
    with Client(address) as client:
        uploaded = client.upload(b"uploaded")
        client.generate("look", images=[PNG], videos=[b"inline", file])
        list(client.stream("look", videos=[uploaded]))
        client.generate([Message("user", (VideoPart(b"of a chat"), TextPart("echo")))])
    parts = [request.messages[0].parts for request in engine.requests]
    look = TextPart("look")
    assert parts[0] == (ImagePart(PNG), VideoPart(b"inline"), VideoPart(b"from a file"), look)
    assert parts[1:] == [(VideoPart(b"uploaded"), look), (VideoPart(b"of a chat"), TextPart("echo"))]


def test_chats(address: str, engine: EchoEngine) -> None:
    with Client(address) as client:
        client.generate(
            [
                {"role": "system", "content": "be brief"},
                Message("assistant", (TextPart("yes?"),)),
                Message("user", (ImagePart(PNG), TextPart("echo"))),
            ]
        )
    assert [m.role for m in engine.requests[0].messages] == ["system", "assistant", "user"]
    assert engine.requests[0].messages[2].parts == (ImagePart(PNG), TextPart("echo"))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": [1]}, "sampling.stop[0]"),
        ({"recompute": "sometimes"}, "diffusion.recompute"),
        ({"recompute": DkvDecode(-1)}, "diffusion.dkv_decode.refresh"),
        ({"commit": "never"}, "diffusion.commit"),
        ({"images": ["picture.png"]}, "images[0]"),
        ({"images": [7]}, "images[0]"),
        ({"videos": [b"fine", "clip.mp4"]}, "videos[1]"),
        ({"videos": [PIL.Image.new("RGB", (2, 2))]}, "videos[0]"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"request_id": "ä"}, "request_id"),
    ],
)
def test_arguments_that_cannot_be_sent(arguments: dict, field: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument) as caught:
        client.generate("x", **arguments)
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize(
    "chat", [[{"role": "robot", "content": "x"}], [{"content": "x"}], [{"role": "user", "content": 1}]]
)
def test_chats_that_cannot_be_sent(chat: list) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument):
        client.generate(chat)


def test_stream(address: str) -> None:
    with Client(address) as client:
        events = list(client.stream("one two three", snapshots=True))
    assert isinstance(events[0], Admitted) and isinstance(events[-1], Finished)
    assert any(isinstance(e, Snapshot) for e in events)
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "one two three" == events[-1].text


def test_leaving_the_loop_cancels(engine: EchoEngine) -> None:
    engine.pause = 0.02
    with threaded(engine) as address, Client(address) as client:
        for event in client.stream("word " * 5000):
            if isinstance(event, Delta):
                break
        assert engine.cancel_seen.wait(PATIENCE)
        assert [type(e) for e in engine.cancelled.values()] == [Cancelled]


def test_closing_the_client_ends_its_calls(engine: EchoEngine) -> None:
    engine.go.clear()
    with threaded(engine) as address:
        client = Client(address)
        threading.Thread(target=lambda: engine.run_seen.wait(PATIENCE) and client.close()).start()
        with pytest.raises(Cancelled):
            client.generate("word")
        assert engine.cancel_seen.wait(PATIENCE)
        with pytest.raises(RuntimeError, match="closed"):
            client.models()


def test_deadline(engine: EchoEngine) -> None:
    engine.go.clear()
    with threaded(engine) as address, Client(address, timeout=0.4) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("word")
        with pytest.raises(DeadlineExceeded):
            late(client, engine)
        assert engine.cancel_seen.wait(PATIENCE)


def test_full_is_tried_again_when_the_server_says(address: str, engine: EchoEngine) -> None:
    engine.refusals = [ResourceExhausted("full", retry_after=0.3), ResourceExhausted("full", retry_after=0.01)]
    started = time.monotonic()
    with Client(address) as client:
        assert client.generate("x", request_id="again").text == "x"
    assert time.monotonic() - started > 0.3
    assert len(engine.requests) == 3


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (ResourceExhausted("full"), 1),
        (ResourceExhausted("full", retry_after=3600), 1),
        (FailedPrecondition("not now"), 1),
    ],
)
def test_how_often_a_refusal_is_tried(address: str, engine: EchoEngine, error: Exception, attempts: int) -> None:
    engine.refusals = [error] * 9
    with Client(address) as client, pytest.raises(type(error)):
        client.generate("x")
    assert len(engine.requests) == attempts


def test_nothing_is_tried_again_after_the_first_event(address: str, engine: EchoEngine) -> None:
    engine.failure = Unavailable("the server stops")
    with Client(address) as client, pytest.raises(Unavailable, match="the server stops"):
        client.generate("one two")
    assert len(engine.requests) == 1


def test_models_and_describe() -> None:
    engines = {"echo": EchoEngine(), "other": EchoEngine()}
    with threaded(engines) as address, Client(address) as client:
        assert client.models() == [engines["echo"].info, engines["other"].info]
        assert client.describe() == client.describe("echo") == engines["echo"].info
        with pytest.raises(NotFound, match=r"'nothing'.*echo, other"):
            client.describe("nothing")


def test_wait_ready() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable, match=r"127.0.0.1:1 is not ready after 0.3 s"):
        client.wait_ready(0.3)
    with threaded(EchoEngine()) as address, Client(address) as client:
        client.wait_ready(PATIENCE)


def test_nobody_there_is_unavailable() -> None:
    with Client("127.0.0.1:1", reconnect_seconds=0.2) as client, pytest.raises(Unavailable, match="tried"):
        client.models()
    with Client("127.0.0.1:1", timeout=0.3) as client, pytest.raises((Unavailable, DeadlineExceeded)):
        client.upload(PNG)


def test_asyncio_client(engine: EchoEngine) -> None:
    async def main() -> None:
        async with served(engine) as server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            await client.wait_ready(PATIENCE)
            assert await client.models() == [engine.info] == [await client.describe("echo")]
            media = await client.upload(PNG)
            result = await client.generate("a small echo", images=[media], request_id="mine")
            assert (result.text, result.request_id) == ("a small echo", "mine")
            events = [e async for e in client.stream("one two", snapshots=True)]
            assert "".join(e.text for e in events if isinstance(e, Delta)) == "one two"
            engine.refusals = [ResourceExhausted("full", retry_after=0.01), Unavailable("restarting")]
            assert (await client.generate("x")).text == "x"
            with pytest.raises(NotFound):
                await client.generate("x", model="nothing")

    asyncio.run(main())


def test_asyncio_stream_left_early(engine: EchoEngine) -> None:
    engine.pause = 0.02

    async def main() -> None:
        async with served(engine) as server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            async with contextlib.aclosing(client.stream("word " * 5000)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        break
            assert await asyncio.to_thread(engine.cancel_seen.wait, PATIENCE)
            engine.cancel_seen.clear()
            async for event in client.stream("word " * 5000):
                if isinstance(event, Delta):
                    break
            assert await asyncio.to_thread(engine.cancel_seen.wait, PATIENCE)

    asyncio.run(main())


def test_asyncio_cancelled_task_and_closed_client(engine: EchoEngine) -> None:
    engine.go.clear()

    async def main() -> None:
        async with served(engine) as server:
            client = AsyncClient(f"127.0.0.1:{server.port}")
            task = asyncio.create_task(client.generate("word"))
            assert await asyncio.to_thread(engine.run_seen.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(engine.cancel_seen.wait, PATIENCE)
            engine.run_seen.clear()
            task = asyncio.create_task(client.generate("word"))
            assert await asyncio.to_thread(engine.run_seen.wait, PATIENCE)
            await client.close()
            with pytest.raises(Cancelled):
                await task

    asyncio.run(main())


def test_asyncio_nobody_there() -> None:
    async def main() -> None:
        async with AsyncClient("127.0.0.1:1", timeout=0.5) as client:
            with pytest.raises(Unavailable):
                await client.wait_ready(0.2)
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await client.generate("x")

    asyncio.run(main())


def test_large_messages_pass() -> None:
    engine = EchoEngine()
    with (
        threaded(engine, config({"max_message_bytes": 80 << 20}, max_item_bytes=70 << 20)) as address,
        Client(address) as client,
    ):
        client.generate("x", images=[b"\1" * (64 << 20)])
    assert len(engine.requests[0].messages[0].parts[0].data) == 64 << 20


def test_a_message_over_the_servers_limit_is_refused_once(engine: EchoEngine) -> None:
    with threaded(engine, config({"max_message_bytes": 1 << 20})) as address, Client(address) as client:
        with pytest.raises(ResourceExhausted, match="larger than max"):
            client.generate("x", images=[b"1" * (2 << 20)])
        assert client.generate("x").text == "x"


def test_a_server_that_comes_back_is_found_again() -> None:
    engine = EchoEngine()
    with threaded(engine) as address:
        client = Client(address)
        client.generate("x")
    with threaded(EchoEngine(), config({"port": int(address.split(":")[1])})), client:
        client.wait_ready(10)
        assert client.generate("y").text == "y"


def test_the_sdk_does_not_need_torch() -> None:
    code = "import sys, mmserve.client; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
