"""An op's implementation is chosen once, from what is asked, and told."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmserve_kernels import dispatch
from mmserve_kernels.dispatch import OPS, pick

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_runs_the_reference(op: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mmserve.kernels"):
        chosen = pick(op, CPU, torch.float32, 64)
    assert chosen.path == "pytorch"
    assert chosen.run is getattr(import_module(f"{OPS[op].package}.reference"), op)
    assert caplog.messages == [f"{op} runs as pytorch: kernels run on GPUs, and the device is cpu"]


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_of_its_name_and_the_variants_it_is_launched_in(op: str) -> None:
    package = Path(*OPS[op].package.split("."))
    source = (Path(dispatch.__file__).parents[1] / package / "kernel.py").read_text()
    assert f"\ndef {op}(" in source
    assert "\ndef variants()" in source


@pytest.mark.parametrize(
    ("dtype", "head_size", "reason"),
    [(torch.float64, 64, "float64"), (torch.bfloat16, 512, "not 512"), (torch.bfloat16, None, "not None")],
)
def test_what_a_kernel_cannot_take_runs_as_the_reference_with_a_warning(
    dtype: torch.dtype,
    head_size: int | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    chosen = pick("cached_attention", GPU, dtype, head_size)
    assert chosen.path == "pytorch"
    assert reason in chosen.reason
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_kernels_that_would_be_interpreted_serve_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in pick("cached_attention", GPU, torch.bfloat16, 64).reason


def test_an_unknown_op_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no op is called 'attention'; there are .*cached_attention"):
        pick("attention", CPU, torch.float32, 64)
