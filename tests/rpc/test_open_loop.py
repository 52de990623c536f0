"""An open-loop load over real sockets: nothing waits for what came before it, and every request is accounted for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from echo_server import EchoEngine, model_info, served, threaded
from harness import eventually

from mmserve.bench.open_loop import ANSWERED, LOST, Asked, Outcome, run_open_loop
from mmserve.bench.serve_mix import mix_of, requests, weights_text
from mmserve.client import AsyncClient
from mmserve.errors import ConfigError, Internal, ResourceExhausted
from mmserve.v1 import generation_pb2_grpc


def asked(prompt: str, kind: str = "text") -> Asked:
    return Asked(kind, prompt, (), {}, lambda text: text == prompt)


def run(address: str, schedule: Sequence[tuple[float, Asked]], timeout: float = 30.0) -> list[Outcome]:
    async def main() -> list[Outcome]:
        async with AsyncClient(address, retries=False) as one, AsyncClient(address, retries=False) as other:
            return await run_open_loop([one, other], schedule, timeout=timeout)

    return asyncio.run(main())


def test_outcomes_come_in_the_order_of_the_schedule(address: str, engine: EchoEngine) -> None:
    schedule = [(0.01 * i, asked(f"number {i}", "image" if i % 3 else "text")) for i in range(12)]
    found = run(address, schedule)
    assert [o.kind for o in found] == [a.kind for _due, a in schedule]
    for outcome in found:
        assert outcome.ended == ANSWERED and outcome.right and outcome.tokens == 2
        assert outcome.late >= 0
        assert outcome.first is not None and outcome.last is not None and outcome.total is not None
        assert outcome.late <= outcome.first <= outcome.last <= outcome.total
        assert outcome.per_token == outcome.last - outcome.first


def test_a_server_that_answers_nothing_gets_the_whole_load_all_the_same(engine: EchoEngine) -> None:
    """All requests are under way at once, though none of them has been answered."""
    engine.pause = 3600.0
    most: list[int] = []

    async def main() -> list[Outcome]:
        async with served(engine) as server, AsyncClient(f"127.0.0.1:{server.port}", retries=False) as client:
            load = asyncio.create_task(
                run_open_loop([client], [(0.0, asked("x"))] * 20 + [(0.01, asked("y"))] * 20, timeout=60.0)
            )
            await asyncio.to_thread(eventually, lambda: engine.running == 40, "all to be under way")
            most.append(engine.running)
            for name in list(engine._running):
                engine.cancel(name)
            return await load

    found = asyncio.run(main())
    assert most == [40] and Counter(o.ended for o in found) == {"CANCELLED": 40}
    assert all(o.first is None and o.per_token is None and not o.good(1e9, 1e9) for o in found)


def test_a_refusal_is_an_outcome_and_not_tried_again(address: str, engine: EchoEngine) -> None:
    engine.refusals = [ResourceExhausted("full", retry_after=0.001)] * 3 + [Internal("broken", error_id="7")]
    found = run(address, [(0.0, asked(f"{i}")) for i in range(6)])
    assert Counter(o.ended for o in found) == {"RESOURCE_EXHAUSTED": 3, "INTERNAL": 1, ANSWERED: 2}
    assert len(engine.requests) == 6
    assert sum(o.right for o in found) == 2


def test_a_server_that_dies_and_a_deadline_are_outcomes(engine: EchoEngine) -> None:
    engine.pause = 3600.0
    with threaded(engine) as address:
        late = run(address, [(0.0, asked("x"))] * 2, timeout=0.3)
    assert [o.ended for o in late] == ["DEADLINE_EXCEEDED"] * 2
    gone = run(address, [(0.0, asked("x"))] * 2)
    assert [o.ended for o in gone] == ["UNAVAILABLE"] * 2 and all(o.error for o in gone)


def test_a_stream_that_ends_without_an_answer_is_lost() -> None:
    class Silent(generation_pb2_grpc.GenerationServiceServicer):
        async def Generate(self, message: Any, context: Any) -> None:
            return

    async def main() -> list[Outcome]:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(Silent(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with AsyncClient(f"127.0.0.1:{port}", retries=False) as client:
                return await run_open_loop([client], [(0.0, asked("x"))], timeout=30.0)
        finally:
            await server.stop(0)

    [outcome] = asyncio.run(main())
    assert outcome.ended == LOST and not outcome.good(1e9, 1e9) and outcome.total is not None


@pytest.mark.parametrize(
    ("values", "good"),
    [
        ({"first": 1.0, "last": 1.4, "tokens": 11, "total": 1.5}, True),
        ({"first": 1.01, "last": 1.2, "tokens": 11, "total": 1.5}, False),  # its first text is late
        ({"first": 0.5, "last": 1.0, "tokens": 11, "total": 1.0}, False),  # 50 ms a token
        ({"first": 0.9, "last": 0.9, "tokens": 1, "total": 9.0}, True),
        ({"tokens": 0, "total": 0.9}, True),  # an empty answer
        ({"tokens": 0, "total": 1.1}, False),
        ({"first": 0.1, "last": 0.2, "tokens": 11, "total": 0.2, "ended": "UNAVAILABLE"}, False),
    ],
)
def test_good_is_within_both_targets(values: dict[str, Any], good: bool) -> None:
    assert Outcome("text", 0.0, **{"ended": ANSWERED, **values}).good(1.0, 0.04) is good


def test_a_mix_is_of_what_the_model_takes() -> None:
    seeing, reading = model_info(), model_info(images=False, videos=False)
    assert mix_of("", seeing) == {"text": 2.0, "image": 2.0, "video": 1.0} and mix_of("", reading) == {"text": 2.0}
    assert mix_of("image=3,text", seeing) == {"image": 3.0, "text": 1.0}
    assert mix_of(weights_text({"image": 0.5, "text": 2}), seeing) == {"image": 0.5, "text": 2.0}
    for text, told in (
        ("sound=1", "KIND=WEIGHT"),
        ("text=x", "KIND=WEIGHT"),
        ("text=-1", "KIND=WEIGHT"),
        ("text=0", "weight above 0"),
    ):
        with pytest.raises(ConfigError, match=told):
            mix_of(text, seeing)
    with pytest.raises(ConfigError, match="takes no video"):
        mix_of("video=1", reading)


def test_no_two_requests_are_alike() -> None:
    drawn = ["image", "text", "video"] * 4
    made = requests(drawn, 3, {"commit": "threshold"})
    assert [a.kind for a in made] == drawn and all(a.options["commit"] == "threshold" for a in made)
    media = [(*a.images, *a.options.get("videos", ())) for a in made if a.kind != "text"]
    assert len(set(media)) == 8 and all(media)
    assert len({a.prompt for a in made if a.kind == "text"}) == 4
    assert requests(drawn[:6], 3, {})[4].prompt == made[4].prompt
