"""SLO classes from the SDK to the engine; one that the server does not have is refused by name."""

from __future__ import annotations

import dataclasses

import pytest
from echo_server import EchoEngine, config, threaded
from video_client import picture, video_engine

from mmserve.client import Client
from mmserve.core.slo import SLO
from mmserve.errors import InvalidArgument

CHAT = SLO(name="chat", first_token_seconds=1.0, per_token_seconds=0.05)
BATCH = SLO(name="batch", first_token_seconds=60.0)


def test_a_request_names_its_class(engine: EchoEngine) -> None:
    settings = dataclasses.replace(config(), slo=(CHAT, BATCH))
    with threaded(engine, settings) as address, Client(address) as client:
        for name in ("chat", "batch", None, ""):
            client.generate("x", slo_class=name)
        assert [r.slo for r in engine.requests] == [CHAT, BATCH, None, None]
        with pytest.raises(InvalidArgument) as caught:
            client.generate("x", slo_class="free", temperature=-1)
        told = {v.field: v.description for v in caught.value.violations}
        assert told["slo_class"] == "must be one of chat, batch, not 'free'" and "sampling.temperature" in told
    assert len(engine.requests) == 4


def test_a_server_without_classes_takes_none(address: str) -> None:
    with (
        Client(address) as client,
        pytest.raises(InvalidArgument, match=r"slo_class: .* has no \[slo.NAME\]"),
    ):
        client.generate("x", slo_class="chat")


def test_a_question_of_a_session_names_its_class() -> None:
    settings, engine = video_engine()
    with (
        threaded(engine, dataclasses.replace(settings, slo=(CHAT,))) as address,  # type: ignore[arg-type]
        Client(address) as client,
        client.video_session() as session,
    ):
        session.push(picture(0, (40, 40)), 0.0)
        assert session.ask("x", slo_class="chat", max_new_tokens=2).forwards
        with pytest.raises(InvalidArgument, match="slo_class: must be one of chat, not 'free'"):
            session.ask("x", slo_class="free", max_new_tokens=2)
