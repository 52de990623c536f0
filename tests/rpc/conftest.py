from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from echo_server import EchoEngine, threaded


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def address(engine: EchoEngine) -> Iterator[str]:
    with threaded(engine) as found:
        yield found


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as found:
        yield found
