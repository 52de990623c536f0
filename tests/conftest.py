"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported: kernels run on the CPU

import pytest
import torch
from helpers import tiny_model
from hypothesis import settings

from mmserve.models.base import LoadedModel

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """A tiny multimodal model with random weights."""
    return tiny_model(vision=True)


@pytest.fixture(scope="session")
def text_model() -> LoadedModel:
    """The same model without its tower."""
    return tiny_model(vision=False)
