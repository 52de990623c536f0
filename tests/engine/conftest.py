"""Engines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import Bench
from kept_processes import constraint_processes_kept

from mmserve.engine.engine import Stats
from mmserve.models.base import LoadedModel


@pytest.fixture(scope="module", autouse=True)
def constraint_processes() -> Iterator[None]:
    with constraint_processes_kept():
        yield


@pytest.fixture
def bench(model: LoadedModel) -> Iterator[Callable[..., Bench]]:
    """Makes engines of the tiny model; each is stopped after the test, and must then hold nothing."""
    made: list[Bench] = []

    def make(other: LoadedModel | None = None, **config: Any) -> Bench:
        made.append(Bench(other or model, **config))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
        assert bench.engine.stats() == Stats(live=0, queued=0, pages_in_use=0, held=0)
