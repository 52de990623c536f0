"""The table of an engine's requests, where one id names two of them: samples of one request that went separate ways."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ask

from mmserve.core.events import Failed
from mmserve.engine.live import LiveRequests
from mmserve.engine.request_state import RequestState, open_group
from mmserve.errors import Cancelled

#: Of a request with two samples, the second is still where both began, and the first has come back from elsewhere.
FIRST, SECOND = ask("x"), ask("x.1")


class Table:
    """Of both, the older first; ``ended`` by the ids of their samples."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        nothing: Any = SimpleNamespace(leave=lambda *_: None, end=lambda *_: None, release=lambda *_: None)
        stages: Any = SimpleNamespace(release=self.ended.append)
        self.live = LiveRequests(nothing, nothing, stages)
        self.events: list[tuple[str, Any]] = []
        second = self._state(ask("x"), "second")
        second.request = SECOND
        for state in (second, self._state(FIRST, "first")):
            self.live.by_id[state.request.id] = state

    def _state(self, request: Any, name: str) -> RequestState:
        return open_group(replace(request), lambda event: self.events.append((name, event)), 0.0)


@pytest.fixture
def table() -> Table:
    return Table()


def test_both_are_cancelled(table: Table) -> None:
    table.live.cancel("x", Cancelled("the request was cancelled"))
    assert sorted(table.ended) == ["x", "x.1"] and not table.live.by_id
    assert sorted(name for name, event in table.events if isinstance(event, Failed)) == ["first", "second"]


def test_only_the_one_that_came_is_withdrawn(table: Table) -> None:
    table.live.withdraw("x")
    assert table.ended == ["x"] and list(table.live.by_id) == ["x.1"] and not table.events
    table.live.withdraw("x")
    table.live.withdraw("gone")
    assert list(table.live.by_id) == ["x.1"]
