"""Tenants with a model: nobody finds traces of another one's requests, and nobody can take all of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from e2e_helpers import EMPTY, PATIENCE, gated, settings, text_of, wait_for
from helpers import picture

from mmserve.assembly import BackgroundServer
from mmserve.client import Blend, Client
from mmserve.config import ModelConfig
from mmserve.constraint.compile.service import Compiler
from mmserve.constraint.compile.wire import CompileReply
from mmserve.core.constraint import ConstraintSpec
from mmserve.core.events import Event, Finished
from mmserve.core.request import ImagePart, Message, Request, TextPart
from mmserve.engine.engine import Engine
from mmserve.errors import ResourceExhausted

QUEUE = 8
ASKED = [Message("user", (TextPart("Look.\n"), ImagePart(picture(1)), TextPart("What colour is the circle?")))]


@pytest.fixture(scope="module")
def server() -> Iterator[BackgroundServer]:
    """A next-token model that runs two requests at a time, for whoever has one of three tokens."""
    sizes = {"max_running": 2, "max_pending_per_stage": 1, "encode_batch": 1, "max_queued": QUEUE}
    config = settings(server={"auth_tokens": ("alice", "bob", "carol")}, engine=sizes)
    with BackgroundServer(replace(config, models=(ModelConfig(path="bundled-causal", name="m"),))) as found:
        yield found


@pytest.fixture
def engine(server: BackgroundServer) -> Engine:
    return server.engines["m"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[ConstraintSpec]:
    """The constraints that are compiled from now on."""
    found: list[ConstraintSpec] = []
    real = Compiler.compile

    def counting(self: Compiler, spec: ConstraintSpec, budget: int | None = None) -> CompileReply:
        found.append(spec)
        return real(self, spec, budget)

    monkeypatch.setattr(Compiler, "compile", counting)
    return found


def client(server: BackgroundServer, token: str, *, retries: bool = True) -> Client:
    return Client(server.address, token=token, timeout=PATIENCE, retries=retries)


def test_no_grammar_shows_what_another_tenant_asked(server: BackgroundServer, compiled: list[ConstraintSpec]) -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 9}}, "required": ["count"]}
    for token, before in (("alice", 0), ("alice", 1), ("bob", 1), ("alice", 2)):
        assert len(compiled) == before
        with client(server, token) as who:
            who.generate("How many?", schema=schema, max_new_tokens=12)
    assert len(compiled) == 2


def test_no_cache_shows_what_another_tenant_asked(server: BackgroundServer, engine: Engine) -> None:
    """Visual tokens, pixels, images' K/V and prompts' pages are made again; the answers are the same."""
    with client(server, "alice") as alice, client(server, "bob") as bob:

        def asked(who: Client) -> tuple[str, int, int, int, int]:
            before = engine.stats()
            answer = who.generate(ASKED, max_new_tokens=4)
            who.generate(ASKED, max_new_tokens=1, image_reuse=Blend())
            after = engine.stats()
            made = [
                getattr(after, cache).made - getattr(before, cache).made
                for cache in ("token_cache", "pixel_cache", "kv_cache")
            ]
            return answer.text, answer.usage.cached_tokens, *made

        first, again, other = asked(alice), asked(alice), asked(bob)
        assert first[1:] == other[1:] == (0, 1, 1, 1)
        assert again[1] > 0 and again[2:] == (0, 0, 0)
        assert first[0] == again[0] == other[0]


def test_a_tenant_with_many_requests_delays_anothers_first_by_its_share_only(
    server: BackgroundServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []  # by the engine
    submit = engine.submit

    def noted(request: Request, sink: Callable[[Event], None]) -> None:
        def seen(event: Event) -> None:
            if isinstance(event, Finished):
                ended.append(text_of(request).split()[0])
            sink(event)

        submit(request, seen)

    def ask(who: Client, name: str) -> None:
        who.generate(f"{name} asks what there is", max_new_tokens=2)

    monkeypatch.setattr(engine, "submit", noted)
    with (
        client(server, "alice") as alice,
        client(server, "bob") as bob,
        ThreadPoolExecutor(16) as pool,
        gated(engine, monkeypatch) as gates,
    ):
        for gate in gates.all:
            gate.close()
        flood = [pool.submit(ask, alice, f"alice {i}") for i in range(QUEUE)]
        wait_for("the flood to wait", lambda: engine.stats().live == QUEUE)
        one = pool.submit(ask, bob, "bob")
        wait_for("bob's request to wait", lambda: engine.stats().live == QUEUE + 1)
        gates.open()
        for future in [*flood, one]:
            future.result()
    # Ahead of it is what was being encoded when it came, and one more that arrived before it.
    assert ended.index("bob") <= 4, ended


def test_a_tenant_that_fills_the_queue_leaves_others_their_places(
    server: BackgroundServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        client(server, "alice") as alice,
        client(server, "bob") as bob,
        client(server, "alice", retries=False) as hasty,
        ThreadPoolExecutor(16) as pool,
        gated(engine, monkeypatch) as gates,
    ):
        gates.encode.close()
        waiting = [pool.submit(alice.generate, f"{i}", max_new_tokens=1) for i in range(QUEUE + 1)]  # one is encoded
        wait_for("a full queue", lambda: engine.stats().queued == QUEUE)
        with pytest.raises(ResourceExhausted, match="max_queued"):
            hasty.generate("one more", max_new_tokens=1)
        waiting += [pool.submit(bob.generate, f"bob {i}", max_new_tokens=1) for i in range(QUEUE // 2)]
        wait_for("half a queue more", lambda: engine.stats().queued == QUEUE + QUEUE // 2)
        with pytest.raises(ResourceExhausted, match="max_queued"), client(server, "bob", retries=False) as other:
            other.generate("one more", max_new_tokens=1)
        gates.open()
        for future in waiting:
            assert future.result().forwards
    wait_for("an empty engine", lambda: engine.stats() == EMPTY)
