"""Memory of engines that have stopped, while something still refers to them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from mmserve.rpc import reload


class Loop:
    """Garbage that only the collector frees, as an engine is."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def held(seconds: float) -> weakref.ref[Loop]:
    """An engine that a thread refers to for so long."""
    engine, over = Loop(), threading.Event()
    threading.Thread(target=lambda kept, over: over.wait(seconds), args=(engine, over), daemon=True).start()
    return weakref.ref(engine)


def test_an_engine_is_freed_once_the_last_thread_has_let_go_of_it() -> None:
    engine = held(0.2)
    reload.release_memory([engine])
    assert engine() is None and gc.get_freeze_count() > 0


def test_an_engine_that_stays_referenced_is_left_to_the_collector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "_FREEING", (0.0, 0.0))
    kept = Loop()
    engine = weakref.ref(kept)
    gc.freeze()
    reload.release_memory([engine])
    assert "still referenced" in caplog.text and gc.get_freeze_count() == 0
    del kept
    gc.collect()
    assert engine() is None
