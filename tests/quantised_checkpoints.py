"""Checkpoints of quantised weights, made of plain ones: each format's packing written out a number at a time, with the
numbers that it stands for beside it.

``quantised`` writes two folders: one with packed linear layers, one with plain weights of the same numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmserve.models.checkpoint import read_json, write_json

GROUP = 16
Tensors = dict[str, Tensor]
#: Of a weight [out, in] (fp32 numbers): the tensors that its name's stem gets, and the numbers they stand for.
Packer = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]


@dataclass(frozen=True)
class Form:
    """A format: its ``quantization_config``, and how a weight is packed."""

    settings: Mapping[str, Any]
    pack: Packer


def words(integers: np.ndarray, bits: int) -> np.ndarray:
    """Integers along the last axis as one stream of bits, lowest first, cut into int32."""
    rows = integers.reshape(-1, integers.shape[-1])
    made = np.zeros((len(rows), -(-integers.shape[-1] * bits // 32)), np.uint32)
    for r, row in enumerate(rows):
        for i, number in enumerate(row.tolist()):
            for bit in range(bits):
                place = i * bits + bit
                made[r, place // 32] |= np.uint32(((number >> bit) & 1) << (place % 32))
    return made.view(np.int32).reshape(*integers.shape[:-1], -1)


def grouped(weight: np.ndarray, bits: int, order: np.ndarray, *, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Integers [out, in], scales (fp16) and zero points [out, groups]; inputs are in groups ``order``."""
    groups, most = int(order.max()) + 1, (1 << bits) - 1
    codes, scales = np.zeros(weight.shape, np.int64), np.zeros((len(weight), groups), np.float16)
    zeros = np.zeros((len(weight), groups), np.int64)
    for g in range(groups):
        mine = weight[:, order == g]
        low, high = np.minimum(mine.min(1), 0), np.maximum(mine.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[:, g] = np.maximum((high - low) / most, 1e-4)
        scale = scales[:, g].astype(np.float32)
        zeros[:, g] = (most + 1) // 2 if symmetric else np.clip(np.rint(-low / scale), 0, most)
        codes[:, order == g] = np.clip(np.rint(mine / scale[:, None]) + zeros[:, g, None], 0, most)
    return codes, scales, zeros


def _numbers(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, order: np.ndarray) -> np.ndarray:
    return (codes - zeros[:, order]).astype(np.float32) * scales.astype(np.float32)[:, order]


def _t(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def gptq(bits: int, *, version: int = 1, symmetric: bool = True, act_order: bool = False, index: bool = True) -> Form:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        order = np.arange(weight.shape[1]) // GROUP
        if act_order:
            order = np.random.default_rng(0).permutation(order)
        codes, scales, zeros = grouped(weight, bits, order, symmetric=symmetric)
        stored = (zeros - 1) & ((1 << bits) - 1) if version == 1 else zeros
        tensors = {
            "qweight": _t(words(codes, bits).T),
            "qzeros": _t(words(stored.T, bits)),
            "scales": _t(scales.T),
            **({"g_idx": _t(order.astype(np.int32))} if index else {}),
        }
        return tensors, _numbers(codes, scales, zeros, order)

    form = "gptq" if version == 1 else "gptq_v2"
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": symmetric}
    return Form(settings | {"checkpoint_format": form}, pack)


def awq() -> Form:
    places = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs of a word, from its lowest bits on

    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        order = np.arange(weight.shape[1]) // GROUP
        codes, scales, zeros = grouped(weight, 4, order, symmetric=False)

        def packed(integers: np.ndarray) -> Tensor:  # [rows, out]
            in_words = integers.reshape(len(integers), -1, 8)[:, :, places]
            return _t(words(in_words.reshape(integers.shape), 4))

        tensors = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": _t(scales.T)}
        return tensors, _numbers(codes, scales, zeros, order)

    return Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, pack)


def packed_integers(
    bits: int, *, symmetric: bool = True, act_order: bool = False, channel: bool = False, unset: bool = False
) -> Form:
    """compressed-tensors, ``pack-quantized``; ``unset``: an order of groups was asked for, and none was found."""

    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        order = np.arange(weight.shape[1]) // (weight.shape[1] if channel else GROUP)
        if act_order:
            order = np.random.default_rng(0).permutation(order)
        codes, scales, zeros = grouped(weight, bits, order, symmetric=symmetric)
        tensors = {
            "weight_packed": _t(words(codes, bits)),
            "weight_scale": _t(scales),
            "weight_shape": torch.tensor(weight.shape),
            **({} if symmetric else {"weight_zero_point": _t(words(zeros.T, bits).T)}),
            **({"weight_g_idx": _t(order.astype(np.int32))} if act_order else {}),
            **({"weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)} if unset else {}),
        }
        return tensors, _numbers(codes, scales, zeros, order)

    return Form({"quant_method": "compressed-tensors", "format": "pack-quantized"}, pack)


def integers_of_8_bits() -> Form:
    """compressed-tensors, ``int-quantized``: a scale a channel."""

    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        codes = np.clip(np.rint(weight / scales), -128, 127).astype(np.int8)
        beside = {"input_scale": torch.ones(1), "weight_scale": _t(scales)}
        return {"weight": _t(codes), **beside}, codes.astype(np.float32) * scales

    return Form({"quant_method": "compressed-tensors", "format": "int-quantized"}, pack)


def fp8(method: str, name: str, block: tuple[int, int] | None, *, channel: bool = False) -> Form:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        out, width = weight.shape
        down, across = block or ((1, width) if channel else (out, width))
        scales = np.zeros((-(-out // down), -(-width // across)), np.float32)
        codes, numbers = torch.zeros(out, width, dtype=torch.float8_e4m3fn), np.zeros(weight.shape, np.float32)
        for r in range(0, out, down):
            for c in range(0, width, across):
                here = slice(r, r + down), slice(c, c + across)
                scales[r // down, c // across] = scale = np.float32(np.abs(weight[here]).max() / 448)
                codes[here] = torch.from_numpy(weight[here] / scale).to(torch.float8_e4m3fn)
                numbers[here] = codes[here].float().numpy() * scale
        stored = _t(scales) if block or channel else _t(scales).reshape(())
        beside = {name: stored, "input_scale": torch.ones(()), "k_scale": torch.ones(())}
        return {"weight": codes, **beside}, numbers

    settings: dict[str, Any] = {"quant_method": method, "activation_scheme": "dynamic"}
    if method == "compressed-tensors":
        weights = {"num_bits": 8, "block_structure": None if block is None else list(block)}
        settings |= {"format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}}
    elif block:
        settings["weight_block_size"] = list(block)
    return Form(settings, pack)


def bitsandbytes(kind: str, *, double: bool = False) -> Form:
    """Of 4 bits. The numbers of ``kind`` do not matter to who reads them: they are in the file."""
    block, nested = 64, 4

    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        levels = np.sort(np.random.default_rng(1).uniform(-1, 1, 16)).astype(np.float32)
        levels[[0, -1]] = -1, 1
        flat = weight.reshape(-1, block)
        scales = np.abs(flat).max(1).astype(np.float32)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float16",
            "shape": list(weight.shape),
        }
        tensors: Tensors = {"weight.quant_map": _t(levels)}
        if double:
            mean, table = np.float32(scales.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
            own = np.array([np.abs(s - mean).max() for s in np.split(scales, range(nested, len(scales), nested))])
            own = own.astype(np.float32) + np.float32(1e-6)
            spread = own[np.arange(len(scales)) // nested]
            indices = np.abs((scales - mean)[:, None] / spread[:, None] - table).argmin(1).astype(np.uint8)
            scales = table[indices] * spread + mean
            state |= {"nested_blocksize": nested, "nested_offset": float(mean), "nested_dtype": "float32"}
            tensors |= {"weight.nested_absmax": _t(own), "weight.nested_quant_map": _t(table)}
        tensors["weight.absmax"] = _t(indices if double else scales)
        codes = np.abs((flat / scales[:, None])[..., None] - levels).argmin(-1)
        pairs = codes.reshape(-1, 2)
        tensors["weight"] = _t((pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8))
        data = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = _t(data)
        return tensors, (levels[codes] * scales[:, None]).reshape(weight.shape)

    return Form({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}, pack)


def bitsandbytes_of_8_bits() -> Form:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        most = np.abs(weight).max(1).astype(np.float32)
        codes = np.rint(weight * (127 / most[:, None])).astype(np.int8)
        beside = {"SCB": _t(most), "weight_format": torch.zeros((), dtype=torch.uint8)}
        return {"weight": _t(codes), **beside}, codes.astype(np.float32) * (most / np.float32(127))[:, None]

    return Form({"load_in_8bit": True}, pack)  # as its first checkpoints: the method is not named


FORMS = {
    "gptq": gptq(4),
    "gptq of 2 bits": gptq(2, symmetric=False),
    "gptq of 3 bits": gptq(3, symmetric=False),
    "gptq of 8 bits, any order": gptq(8, act_order=True),
    "gptq asymmetric, any order": gptq(4, symmetric=False, act_order=True),
    "gptq v2": gptq(4, version=2, symmetric=False, act_order=True),
    "gptq without an index": gptq(4, symmetric=False, index=False),
    "awq": awq(),
    "packed": packed_integers(4),
    "packed asymmetric, any order": packed_integers(4, symmetric=False, act_order=True),
    "packed, an order that is not set": packed_integers(4, unset=True),
    "packed of 8 bits, channels": packed_integers(8, symmetric=False, channel=True),
    "int8": integers_of_8_bits(),
    "fp8 of DeepSeek": fp8("fp8", "weight_scale_inv", (24, 20)),
    "fp8 of a tensor": fp8("fp8", "weight_scale", None),
    "fp8 of FBGEMM": fp8("fbgemm_fp8", "weight_scale", None, channel=True),
    "compressed fp8, tensors": fp8("compressed-tensors", "weight_scale", None),
    "compressed fp8, channels": fp8("compressed-tensors", "weight_scale", None, channel=True),
    "compressed fp8, blocks": fp8("compressed-tensors", "weight_scale", (24, 20)),
    "nf4": bitsandbytes("nf4"),
    "nf4, double": bitsandbytes("nf4", double=True),
    "fp4": bitsandbytes("fp4"),
    "LLM.int8()": bitsandbytes_of_8_bits(),
}


def quantised(folder: Path, form: Form, taken: Callable[[str, Tensor], bool]) -> tuple[Path, Path]:
    """Two copies of a plain checkpoint in one file: with the weights ``taken`` packed, and with their numbers."""
    packed, plain = folder.with_name(folder.name + "-packed"), folder.with_name(folder.name + "-plain")
    for copy in (packed, plain):
        shutil.copytree(folder, copy, dirs_exist_ok=True)
    stored, numbers = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(stored.items()):
        if name.endswith(".weight") and taken(name, tensor):
            made, meant = form.pack(tensor.float().numpy())
            numbers[name] = _t(meant)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{each}": part.contiguous() for each, part in made.items()}
        else:
            numbers[name] = tensor
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    config = read_json(packed / "config.json")
    write_json(packed / "config.json", config | {"quantization_config": dict(form.settings)})
    return packed, plain
