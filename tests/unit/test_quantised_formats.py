"""Checkpoints of quantised weights: each format is read as the numbers that it stands for, and every family by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llada_checkpoints
import llava_checkpoints
import pytest
import text_checkpoints
import torch
from llama_checkpoints import edit, llama, load, save
from quantised_checkpoints import FORMS, gptq, quantised
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.models.checkpoint import Weights
from mmserve.models.quantized import kind_of, why_not
from mmserve.models.registry import load_model, sketch_model
from mmserve.models.tensor_parts import ExpertSlice

DATA = Path(__file__).parent.parent / "data" / "quantised"
CPU = torch.device("cpu")


def layers(name: str, tensor: Tensor) -> bool:
    """As quantisers do: the linear layers of the decoder, and neither embeddings nor the output layer."""
    return ".layers." in name and tensor.ndim == 2


def same(packed: Path, plain: Path) -> None:
    made, meant = (load_model(ModelConfig(path=str(f), dtype="float32", device="cpu")) for f in (packed, plain))
    sketch_model(ModelConfig(path=str(packed), dtype="float32", device="cpu"))
    states = [m.decoder.state_dict() for m in (made, meant)]  # type: ignore[union-attr]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[1].items():
        assert torch.allclose(states[0][name], tensor, rtol=2e-6, atol=1e-8), name


@pytest.mark.parametrize("form", FORMS)
def test_a_format_is_read_as_the_numbers_it_stands_for(form: str, tmp_path: Path) -> None:
    folder = save(llama(4, 4, intermediate_size=64), tmp_path / "model")
    packed, plain = quantised(folder, FORMS[form], layers)
    same(packed, plain)
    stored = load(packed).stored
    assert stored.startswith(FORMS[form].settings.get("quant_method", "bitsandbytes")) and not load(plain).stored


@pytest.mark.parametrize("file", sorted(path.name for path in DATA.glob("*.safetensors")))
def test_files_of_the_formats_own_packages(file: str) -> None:
    """Written and read by compressed-tensors and bitsandbytes (``python tests/quantised_files.py``)."""
    with safe_open(DATA / file, framework="pt") as opened:
        settings = json.loads(opened.metadata()["quantization_config"])
    weights = Weights(DATA, file, {"quantization_config": settings})
    expected = load_file(DATA / file)["expected"]
    made = weights.tensor("layer.weight", expected.shape, torch.float32, CPU)
    assert torch.allclose(made, expected, rtol=1e-6, atol=1e-7)
    weights.ignore("expected")
    weights.check_all_read()


def test_rows_of_one_tensor_and_experts_are_read_so(tmp_path: Path) -> None:
    """Phi-3 has queries, keys and values in one tensor, Mixtral many small ones."""
    for case, form in (("phi3", "awq"), ("mixtral", "gptq asymmetric, any order")):
        folder = text_checkpoints.save(text_checkpoints.oracle(case), tmp_path / case)
        numbers = load_file(folder / "model.safetensors")
        same(*quantised(folder, FORMS[form], lambda name, t: layers(name, t) and packable(t) and ".gate." not in name))
        assert any("w1" in name or "qkv_proj" in name for name in numbers)


def packable(tensor: Tensor) -> bool:
    """Whether its rows and columns fill words and groups."""
    return all(size % 16 == 0 for size in tensor.shape)


def test_a_vision_language_model_and_a_diffusion_model_are_read_so(tmp_path: Path) -> None:
    llava = llava_checkpoints.llava(tmp_path / "llava")
    same(*quantised(llava.folder, FORMS["awq"], lambda n, t: "language_model" in n and layers(n, t) and packable(t)))
    model = llada_checkpoints.llama(4, 2)
    tensors = {llada_checkpoints.own_name(name): tensor for name, tensor in model.state_dict().items()}
    folder = llada_checkpoints.write(tmp_path / "llada", llada_checkpoints.own_config(model), tensors)
    same(*quantised(folder, FORMS["nf4, double"], lambda name, t: ".blocks." in name and t.ndim == 2))


def test_experts_in_one_tensor_have_scales_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes = torch.randn(3, 32, 40).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3)
    save_file({"experts.up": codes, "experts.up_scale_inv": scales}, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    weights = Weights(tmp_path, config={"quantization_config": settings})
    for expert in range(3):
        for start in (0, 16):
            made = weights.part(
                ExpertSlice("experts.up", expert, 3, start, 32), torch.Size((16, 40)), torch.float32, CPU
            )
            of_each = scales[expert, start // 16].repeat_interleave(16)[:40]
            assert torch.equal(made, codes[expert, start : start + 16].float() * of_each)
    weights.check_all_read()


@pytest.mark.skipif(bool(why_not(CPU)), reason=f"no bytes are multiplied here: {why_not(CPU)}")
def test_weights_are_quantised_anew_where_the_configuration_asks(tmp_path: Path) -> None:
    folder = save(llama(intermediate_size=64), tmp_path / "model")
    packed, _ = quantised(folder, FORMS["gptq"], layers)
    model = load(packed, dtype="int8")
    assert kind_of(model) == "int8" and model.stored == "gptq, 4 bits"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "aqlm"}, "quant_method 'aqlm', which is not read; read are awq, bitsandbytes"),
    "no method": ({"bits": 4}, "quant_method None"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin', which is not read"),
    "awq for another kernel": ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv', which is not read"),
    "awq of 8 bits": ({"quant_method": "awq", "bits": 8}, "bits = 8, which is not read; it can be 4"),
    "nvfp4": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quanti"),
    "sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format = 'sparse-24-bitmask'",
    ),
    "transforms": ({"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}, "transforms run beside"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_refused_with_its_name(what: str, tmp_path: Path) -> None:
    settings, why = REFUSED[what]
    save_file({"x.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=why):
        Weights(tmp_path, config={"quantization_config": settings})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"qzeros": torch.zeros(2, 5, dtype=torch.int32)}, r"qzeros of shape \[2, 5\] is not of 2 groups and 32"),
        ({"qzeros": None}, "has no tensor .*qzeros"),
        ({"g_idx": torch.zeros(31, dtype=torch.int32)}, r"g_idx has shape \[31\], expected \[32\]"),
        ({"g_idx": torch.full((32,), 2, dtype=torch.int32)}, "g_idx must be from 0 to 1"),
        ({"scales": torch.ones(3, 32).half()}, r"qzeros of shape \[2, 4\] is not of 3 groups"),
        ({"left_over": torch.ones(1)}, "1 tensors are not used: model.layers.0.self_attn.q_proj.left_over"),
    ],
)
def test_damaged_tensors_are_named(changed: dict[str, Tensor | None], why: str, tmp_path: Path) -> None:
    folder = save(llama(intermediate_size=64), tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj"
    packed, _ = quantised(folder, gptq(4), lambda each, _: each == f"{name}.weight")
    stored = load_file(packed / "model.safetensors")
    for leaf, tensor in changed.items():
        if tensor is None:
            del stored[f"{name}.{leaf}"]
        else:
            stored[f"{name}.{leaf}"] = tensor
    save_file(stored, packed / "model.safetensors")
    with pytest.raises(ConfigError, match=why):
        load(packed)


def test_groups_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = save(llama(intermediate_size=64), tmp_path / "model")
    packed, _ = quantised(folder, FORMS["packed asymmetric, any order"], layers)
    stored = load_file(packed / "model.safetensors")
    name = next(name for name in stored if name.endswith(".weight_g_idx"))
    save_file({**stored, name: stored[name] + 1}, packed / "model.safetensors")
    with pytest.raises(ConfigError, match="weight_g_idx must be from 0 to"):
        load(packed)


def test_a_network_that_reads_its_own_weights_refuses_quantised_ones(tmp_path: Path) -> None:
    folder = save(llama(intermediate_size=64), tmp_path / "model")
    packed, _ = quantised(folder, FORMS["fp8 of a tensor"], layers)
    edit(packed / "config.json", model_type="diffusion_gemma", architectures=["DiffusionGemmaForBlockDiffusion"])
    with pytest.raises(ConfigError, match="quantised weights of 'diffusion_gemma' are not read"):
        load(packed)
