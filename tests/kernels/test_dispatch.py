"""An op's implementation is chosen once, from what is asked, and told."""

from __future__ import annotations

import logging
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from mmserve_kernels import dispatch
from mmserve_kernels.cached_attention.tiles import QUANTIZED_HEAD_SIZE
from mmserve_kernels.dispatch import OPS, pick

from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.store import KVStore
from mmserve.models.decoder_config import DecoderConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_runs_the_tuned_path_or_else_the_reference(op: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mmserve.kernels"):
        chosen = pick(op, CPU, torch.float32, 64)
    assert chosen.path == "pytorch"
    tuned = (Path(dispatch.__file__).parents[1] / Path(*OPS[op].package.split(".")) / "cpu.py").exists()
    assert chosen.run is getattr(import_module(f"{OPS[op].package}.{'cpu' if tuned else 'reference'}"), op)
    assert caplog.messages == [f"{op} runs as pytorch: kernels run on GPUs, and the device is cpu"]


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_of_its_name_and_the_variants_it_is_launched_in(op: str) -> None:
    package = Path(*OPS[op].package.split("."))
    source = (Path(dispatch.__file__).parents[1] / package / "kernel.py").read_text()
    assert f"\ndef {op}(" in source
    assert "\ndef variants()" in source
    reference, run = (getattr(import_module(f"{OPS[op].package}.{m}"), op) for m in ("reference", OPS[op].pytorch))
    assert signature(run) == signature(reference)


@pytest.mark.parametrize(
    ("dtype", "head_size", "reason"),
    [(torch.float64, 64, "float64"), (torch.bfloat16, 512, "not 512"), (torch.bfloat16, None, "not None")],
)
def test_what_a_kernel_cannot_take_runs_in_pytorch_with_a_warning(
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


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """There is one, as far as the dispatcher can tell; the devices that were made the current one."""
    current: list[torch.device] = []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.append(CPU)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    return current


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_is_launched_on_the_device_it_was_picked_for(op: str, a_gpu: list[torch.device]) -> None:
    """Triton launches on the current device, and a pointer of another one is an illegal address there."""
    second = torch.device("cuda:1")
    chosen = pick(op, second, torch.bfloat16, 64)
    assert chosen.path == "triton" and a_gpu == []
    with pytest.raises(TypeError, match=f"{op}.. missing"):
        chosen.run()
    assert a_gpu == [second, CPU]


def test_quantised_pages_of_large_heads_are_read_by_what_can(
    a_gpu: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OPS["cached_attention"].max_quantized == QUANTIZED_HEAD_SIZE == OPS["kv_quant"].max_head_size
    paths = {
        (size, quantized): pick("cached_attention", GPU, torch.bfloat16, size, quantized=quantized).path
        for size in (128, 256)
        for quantized in (False, True)
    }
    assert paths == {
        (128, False): "triton",
        (128, True): "triton",
        (256, False): "triton",
        (256, True): "pytorch",
    }
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    config = DecoderConfig(vocab_size=9, head_dim=256, **sizes)
    asked = {"pages": 1, "page_size": 4, "dtype": torch.bfloat16, "device": torch.device("meta")}
    monkeypatch.setattr("mmserve.kv.store.pick", lambda op, device, **of: pick(op, GPU, **of))
    monkeypatch.setattr("mmserve.kv.quantized.pick", lambda op, device, *of: pick(op, GPU, *of))
    assert KVStore(config, **asked).kernels == {"rope_scatter": "triton", "cached_attention": "triton"}
    assert QuantizedStore(config, **asked, bits=8).kernels == {
        "rope_scatter": "triton",
        "cached_attention": "pytorch",
        "kv_quant": "pytorch",
    }


def test_kernels_that_would_be_interpreted_serve_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in pick("cached_attention", GPU, torch.bfloat16, 64).reason


def test_an_unknown_op_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no op is called 'attention'; there are .*cached_attention"):
        pick("attention", CPU, torch.float32, 64)
