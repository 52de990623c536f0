"""Models that are unloaded in the tests' process are freed without a collection of all that this process holds.

Such a collection takes a second, for it holds every test. That objects which were frozen at a server's start are freed
is tested in ``unit/test_forget.py``, and in a process of its own in ``e2e/test_e2e_loading.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch


@contextmanager
def nothing_unfrozen() -> Iterator[None]:
    """What was frozen before stays so, and nothing else is frozen."""
    collector = SimpleNamespace(unfreeze=lambda: None, collect=gc.collect)
    with patch("mmserve.rpc.reload.gc", collector), patch("mmserve.rpc.reload.settle", lambda: None):
        yield
