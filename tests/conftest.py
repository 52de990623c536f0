"""Fixtures that more than one folder of tests uses.

PyTorch is imported where it is needed: the process that hands out tests to others needs none of it.
"""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported: kernels run on the CPU
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start compile what they import once

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from first_compilation import compile_share
from hypothesis import settings

if TYPE_CHECKING:
    from mmserve.models.base import LoadedModel

sys.dont_write_bytecode = False  # nor do modules have to be compiled each time: 17 s of each process
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=40)
settings.register_profile("thorough", deadline=None, database=None, max_examples=400)  # others each time
settings.load_profile("suite")

#: Processes that share the whole suite, at most: each holds torch and a server of its own.
MOST_WORKERS = 8


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs in one process more than cores, since some wait for servers that they started.

    Named tests, and those whose output is to be seen (`-s`), run in this process.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return min(MOST_WORKERS, 1 + (os.cpu_count() or 1)) if whole and config.option.capture != "no" else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules are imported without garbage collection, which takes a fifth of the time and finds little."""
    compile_share(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is imported stays: full collections need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """A tiny multimodal model with random weights."""
    from helpers import tiny_model

    return tiny_model(vision=True)


@pytest.fixture(scope="session")
def text_model() -> LoadedModel:
    """The same model without its tower."""
    from helpers import tiny_model

    return tiny_model(vision=False)


@pytest.fixture(scope="session", autouse=True)
def kept_processes() -> Iterator[None]:
    import torch
    from kept_processes import end_kept, media_processes_kept

    torch.set_num_threads(1)
    with media_processes_kept():
        yield
    end_kept()
