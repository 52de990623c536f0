"""Large messages are read in turn, over a real socket, and health checks wait for none of them."""

from __future__ import annotations

import grpc
import pytest
from echo_server import EchoEngine, threaded
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.client import Client
from mmserve.errors import DeadlineExceeded
from mmserve.rpc import turns


def test_health_is_answered_between_the_turns_of_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONG_SECONDS", -1.0)  # every message counts as long,
    monkeypatch.setattr(turns, "REST_SECONDS", 3600.0)  # and the second one's turn does not come
    with threaded(EchoEngine()) as address, Client(address, timeout=30) as client:
        assert client.generate("the first").text == "the first"
        with pytest.raises(DeadlineExceeded):
            client.generate("the second", timeout=0.5)
        with grpc.insecure_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
