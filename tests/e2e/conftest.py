from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_helpers import Gates, Running, gated, running, settings
from kept_processes import constraint_processes_kept


@pytest.fixture(scope="module", autouse=True)
def constraint_processes() -> Iterator[None]:
    with constraint_processes_kept():
        yield


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Running]:
    with running(settings(media={"max_item_bytes": 4 << 20})) as found:
        yield found


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """A server that each test must leave empty and serving."""
    yield shared_server
    shared_server.assert_serves()


@pytest.fixture
def gates(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    with gated(server.engine, monkeypatch) as found:
        yield found
