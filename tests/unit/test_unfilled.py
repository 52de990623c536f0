"""Modules that are made for a checkpoint to fill."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from mmserve.models.unfilled import unfilled


def test_tensors_have_shapes_and_no_numbers() -> None:
    with unfilled():
        module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.Conv2d(3, 4, 2), nn.LayerNorm(4))
        places, drawn = torch.arange(2, 7, dtype=torch.int32), nn.init.normal_(tensor=torch.empty(4))
        here = torch.arange(3, device="cpu")
    assert {p.device.type for p in module.parameters()} == {places.device.type, drawn.device.type} == {"meta"}
    assert (places.shape, places.dtype, drawn.shape) == ((5,), torch.int32, (4,)) and here.tolist() == [0, 1, 2]
    assert torch.arange(2).device.type == "cpu"


def test_numbers_of_tensors_that_have_some_are_drawn() -> None:
    with unfilled():
        drawn = nn.init.normal_(torch.zeros(100, device="cpu"))
    assert drawn.std() > 0.5


def test_nothing_is_imported_for_it() -> None:
    made = "nn.Embedding(5, 3), torch.arange(4), nn.init.trunc_normal_(torch.empty(4))"
    program = (
        "import sys, torch\nfrom torch import nn\nfrom mmserve.models.unfilled import unfilled\n"
        f"with unfilled():\n    {made}\nprint([n for n in ('torch._dynamo', 'sympy') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
