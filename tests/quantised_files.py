"""Writes ``tests/data/quantised``: a layer in each format, packed and read by the format's own package.

    pip install compressed-tensors bitsandbytes && python tests/quantised_files.py

Versions are in each file's metadata. ``expected`` is what the package makes of the packed tensors, as fp32.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "data" / "quantised"
OUT, IN = 32, 128


def save(name: str, package: str, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    metadata = {"quantization_config": json.dumps(settings), "package": f"{package} {version(package)}"}
    FOLDER.mkdir(parents=True, exist_ok=True)
    stored = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(stored, FOLDER / f"{name}.safetensors", metadata)


def compressed(name: str, form: str, weights: dict[str, Any], weight: torch.Tensor) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**weights)
    if weights["strategy"] == "group":
        parts = weight.unflatten(1, (-1, weights["group_size"]))
        low, high = parts.amin(2), parts.amax(2)
    elif weights["strategy"] == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif weights["strategy"] == "block":
        down, across = weights["block_structure"]
        parts = weight.unflatten(0, (-1, down)).unflatten(2, (-1, across))
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, zero = calculate_qparams(low, high, arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    kind = BaseCompressor.get_value_from_registry(form)
    packed = kind.compress(state, scheme)
    expected = kind.decompress(dict(packed), scheme)["weight"].float()
    settings = {"quant_method": "compressed-tensors", "format": form}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    tensors = {f"layer.{key}": tensor for key, tensor in packed.items() if isinstance(tensor, torch.Tensor)}
    save(name, "compressed-tensors", settings, {**tensors, "expected": expected})


def four_bits(name: str, kind: str, weight: torch.Tensor, *, double: bool) -> None:
    from bitsandbytes.nn import Params4bit

    made = Params4bit(weight.clone(), requires_grad=False, quant_type=kind, compress_statistics=double).to("cpu")
    from bitsandbytes.functional import dequantize_4bit

    expected = dequantize_4bit(made.data, made.quant_state).float()
    packed = {f"layer.weight.{key}": tensor for key, tensor in made.quant_state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    save(name, "bitsandbytes", settings, {"layer.weight": made.data, **packed, "expected": expected})


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN)
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    compressed("packed-symmetric", "pack-quantized", {**group, "symmetric": True}, weight)
    compressed("packed-asymmetric", "pack-quantized", {**group, "symmetric": False}, weight)
    channel = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    compressed("packed-8-bits", "pack-quantized", {**channel, "type": "int"}, weight)
    compressed("int8", "int-quantized", {**channel, "type": "int"}, weight)
    compressed("fp8-channels", "float-quantized", {**channel, "type": "float"}, weight)
    whole = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    compressed("fp8-tensor", "float-quantized", whole, weight)
    blocks = {**whole, "strategy": "block", "block_structure": [16, 64]}
    compressed("fp8-blocks", "float-quantized", blocks, weight)
    for kind in ("nf4", "fp4"):
        for double in (False, True):
            name = f"{kind}-double" if double else kind
            four_bits(name, kind, weight, double=double)


if __name__ == "__main__":
    main()
