"""Several samples of one request over real gRPC, with the bundled model."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from e2e_helpers import EMPTY, Gates, Running, Stage, answer, command_here, failure, running, settings, wait_for

from mmserve.client import Admitted, AsyncClient, Client, Delta, Finished, Snapshot, Threshold
from mmserve.core.samples import sample_seed
from mmserve.errors import Cancelled, DeadlineExceeded, InvalidArgument, ResourceExhausted

PROMPT = "Start with 12. Add 30. Take away 4. What is the result?"
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "block_length": 8, "temperature": 3.0, "seed": 5}


def test_samples_are_the_answers_to_requests_with_their_seeds(server: Running) -> None:
    for commit in ("low_confidence", Threshold(0.5)):
        options = {**OPTIONS, "commit": commit}
        result = server.client.generate(PROMPT, n=4, **options)
        alone = [server.client.generate(PROMPT, **{**options, "seed": sample_seed(5, i)}) for i in range(4)]
        assert [answer(r) for r in result.samples] == [answer(r) for r in alone]
        assert answer(result) == answer(server.client.generate(PROMPT, **options))
        assert [answer(r) for r in server.client.generate(PROMPT, n=2, **options).samples] == [
            answer(r) for r in alone[:2]
        ]
    assert len({r.text for r in result.samples}) > 1


def test_a_stream_of_samples_says_whose_each_event_is(server: Running) -> None:
    events = list(server.client.stream(PROMPT, n=3, snapshots=True, **OPTIONS))
    assert isinstance(events[0], Admitted) and sum(isinstance(e, Admitted) for e in events) == 1
    done = {e.sample: e for e in events if isinstance(e, Finished)}
    assert set(done) == {0, 1, 2} and isinstance(events[-1], Finished)
    for sample, last in done.items():
        own = [e for e in events[1:] if e.sample == sample]  # type: ignore[union-attr]
        assert own[-1] == last and any(isinstance(e, Snapshot) for e in own)
        assert "".join(e.text for e in own if isinstance(e, Delta)) == last.text

    async def asked() -> list[str]:
        async with AsyncClient(server.address) as client:
            return [r.text for r in (await client.generate(PROMPT, n=3, **OPTIONS)).samples]

    assert asyncio.run(asked()) == [done[i].text for i in range(3)]


def test_a_client_that_leaves_takes_all_samples_along(server: Running, gates: Gates) -> None:
    gates.decode.close()
    stream = server.client.stream(PROMPT, n=4, **OPTIONS)
    assert isinstance(next(stream), Admitted)
    wait_for("a decode batch", lambda: gates.decode.waiting)
    assert server.engine.stats().live == 4
    stream.close()
    gates.open()
    wait_for("an empty engine", lambda: server.engine.stats() == EMPTY)


def test_a_deadline_ends_all_samples(server: Running, gates: Gates) -> None:
    gates.decode.close()
    asked = server.ask(PROMPT, n=3, timeout=0.5)
    assert isinstance(failure(asked), DeadlineExceeded | Cancelled)
    gates.open()


@pytest.mark.parametrize("n", [0, 17, 2**32 - 1])
def test_numbers_of_samples_that_are_refused(server: Running, n: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        server.client.generate(PROMPT, n=n)
    assert [v.field for v in caught.value.violations] == ["sampling.n"]


def test_a_full_queue_takes_none_of_the_samples() -> None:
    with running(settings(engine={"max_queued": 4})) as server:
        gate_open = server.engine.stages.encoding.encode
        held: list[Any] = []
        go = threading.Event()

        def waiting(batch: list[Any]) -> Any:
            held.append(batch)
            assert go.wait(60)
            return gate_open(batch)

        server.engine.stages.encoding.encode = waiting  # type: ignore[method-assign]
        first = server.ask("first", n=2)
        wait_for("the first to be encoded", lambda: held)
        second = server.ask("second", n=3)
        server.reach("second", Stage.QUEUED)
        with Client(server.address, retries=False) as once, pytest.raises(ResourceExhausted):
            once.generate("third", n=2, max_new_tokens=8)
        assert server.engine.stats().live == 5
        go.set()
        assert [len(asked.result(60).samples) for asked in (first, second)] == [2, 3]
        assert len(server.client.generate("third", n=2, max_new_tokens=4).samples) == 2
        wait_for("an empty engine", lambda: server.engine.stats() == EMPTY)


def test_the_command_prints_each_sample(server: Running) -> None:
    arguments = ("generate", PROMPT, "--server", server.address, "--n", "2", "--max-new-tokens", "8")
    drawn = (*arguments, "--temperature", "1.5")
    done = command_here(*drawn)
    assert done.returncode == 0, done.stderr
    texts = [r.text for r in server.client.generate(PROMPT, n=2, max_new_tokens=8, temperature=1.5).samples]
    assert done.stdout == f"[0] {texts[0]}\n[1] {texts[1]}\n"
    rows = json.loads(command_here(*drawn, "--json").stdout)["samples"]
    assert [(r["sample"], r["text"]) for r in rows] == list(enumerate(texts))
