"""Processes that begin with what takes seconds to import."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

#: With all that these import, PyTorch and transformers among it.
IMPORTED = ["mmserve.engine", "mmserve.models.towers"]


def forked() -> ForkServerContext:
    """A context whose processes are forks of one that has one thread, and the environment of the first call's time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
