"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported: kernels run on the CPU
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start compile what they import once

from collections.abc import Iterator

import pytest
import torch
from helpers import tiny_model
from hypothesis import settings
from kept_processes import end_kept, media_processes_kept

from mmserve.models.base import LoadedModel

sys.dont_write_bytecode = False  # nor do test modules have to be compiled each time: 17 s of each process
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=40)
settings.register_profile("thorough", deadline=None, database=None, max_examples=400)  # others each time
settings.load_profile("suite")

#: Processes that share the whole suite, at most: each holds torch and a server of its own.
MOST_WORKERS = 8


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs on all cores; named tests, and those whose output is to be seen (`-s`), in this process."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return min(MOST_WORKERS, os.cpu_count() or 1) if whole and config.option.capture != "no" else 0


def pytest_collection_finish() -> None:
    """What is imported stays: full collections need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """A tiny multimodal model with random weights."""
    return tiny_model(vision=True)


@pytest.fixture(scope="session")
def text_model() -> LoadedModel:
    """The same model without its tower."""
    return tiny_model(vision=False)


@pytest.fixture(scope="session", autouse=True)
def kept_processes() -> Iterator[None]:
    with media_processes_kept():
        yield
    end_kept()
