"""Tiny random Qwen2-VL, Qwen2.5-VL and Qwen3-VL checkpoints as they are published, and what transformers makes of them.

transformers' video processors need a library that is not required here: their code for sizes and patches is taken from
the installed files, and run as it is.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from clips import Clip, decode_video
from helpers import tokenizer
from llama_checkpoints import ROWS, edit
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmserve.config import MediaConfig, ModelConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import ImagePart, Request, TextPart, VideoPart
from mmserve.decode.forward import forward
from mmserve.decode.loop import DiffusionDecoder
from mmserve.decode.parts import Parts
from mmserve.encode.media import decode_image
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import read_json, write_json
from mmserve.models.registry import load_model

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
#: Those whose keys, times and pixels are Qwen3-VL's.
THIRD = ("qwen3_vl", "qwen3_vl_moe")
PATCH, FRAMES = 4, 5
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR: dict[str, Any] = {
    "min_pixels": 4 * 64,
    "max_pixels": 12 * 64,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
#: Of a frame for the first two, of all frames together for Qwen3-VL.
VIDEOS = {"min_pixels": 4 * 64, "max_pixels": 6 * 64}
TOGETHER = {"size": {"shortest_edge": 64, "longest_edge": FRAMES * 6 * 64}}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
}
_TEXT = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 3, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2},
    "qwen2_5_vl": {
        "depth": 4,
        "hidden_size": 24,
        "out_hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "depth": 4,
        "hidden_size": 24,
        "out_hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
}


def special_ids() -> dict[str, int]:
    return {token: len(tokenizer()) + i for i, token in enumerate(SPECIAL)}


class Qwen:
    """A checkpoint in ``folder`` with the published keys, and transformers' model that it was written from."""

    def __init__(self, folder: Path, kind: str, **changes: Any) -> None:
        self.folder, self.kind = folder, kind
        torch.manual_seed(11)
        config, model = _CLASSES[kind]
        self.oracle = model(_config(kind, config)).eval()
        for name, parameter in self.oracle.named_parameters():
            if "norm" in name or ".ln_q." in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif parameter.dim() > 1:
                spread = 1.6 / parameter[0].numel() ** 0.5 if ".visual." in name else 0.2
                spread = 0.4 if ".experts." in name else spread
                torch.nn.init.normal_(parameter, std=spread)
            else:
                torch.nn.init.normal_(parameter, std=0.3)
        self.oracle.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if kind == "qwen3_vl_moe":
            transpose_experts(folder)
        self._publish()
        edit(folder / "config.json", **changes)

    def _publish(self) -> None:
        """The files beside the weights, with the keys of ``Qwen/Qwen2-VL-7B-Instruct`` and the others."""
        tok = copy.deepcopy(tokenizer())
        tok.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
        tok.chat_template = TEMPLATE
        tok.save_pretrained(self.folder)
        kind = "Qwen2VLImageProcessorFast" if self.kind in THIRD else "Qwen2VLImageProcessor"
        write_json(self.folder / "preprocessor_config.json", {**PROCESSOR, "image_processor_type": kind})
        limits = TOGETHER if self.kind in THIRD else VIDEOS
        write_json(self.folder / "video_preprocessor_config.json", limits)
        if self.kind not in THIRD:
            flatten(self.folder / "config.json")
        edit(self.folder / "config.json", mm_video_frames=FRAMES)

    def load(self, **options: Any) -> LoadedModel:
        return load_model(ModelConfig(path=str(self.folder), **{"dtype": "float32", "device": "cpu", **options}))

    def inputs(self, request: Request, tok: Any) -> dict[str, Tensor]:
        """A request as transformers' model takes it, each picture's placeholder as many times as it has tokens."""
        images, clips = [], []
        chat: list[dict[str, Any]] = []
        for message in request.messages:
            content: list[dict[str, str]] = []
            for part in message.parts:
                match part:
                    case TextPart(text):
                        content.append({"type": "text", "text": text})
                    case ImagePart(data):
                        content.append({"type": "image"})
                        images.append(decode_image(data, MediaConfig()))
                    case VideoPart(data):
                        content.append({"type": "video"})
                        clips.append(decode_video(data, MediaConfig(), frames=FRAMES))
            chat.append({"role": message.role, "content": content})
        text = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        found: dict[str, Tensor] = {}
        if images:
            made = Qwen2VLImageProcessorPil(**PROCESSOR)(images, return_tensors="pt")
            found |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
            text = _expanded(
                text, "<|image_pad|>", ["<|image_pad|>" * int(g.prod() // 4) for g in found["image_grid_thw"]]
            )
        if clips:
            rows = [clip_rows(clip, self.kind) for clip in clips]
            found["pixel_values_videos"] = torch.cat([pixels for pixels, _grid in rows])
            found["video_grid_thw"] = torch.tensor([grid for _pixels, grid in rows])
            if self.kind == "qwen2_5_vl":
                found["second_per_grid_ts"] = torch.tensor([2 * (c.seconds[1] - c.seconds[0]) for c in clips])
            texts = [self._clip_text(clip, grid) for clip, (_pixels, grid) in zip(clips, rows, strict=True)]
            text = _expanded(text, "<|video_pad|>", texts)
        ids = torch.tensor([tok.encode(text, add_special_tokens=False)])
        special = special_ids()
        kinds = (ids == special["<|image_pad|>"]).int() + 2 * (ids == special["<|video_pad|>"]).int()
        return {"input_ids": ids, "mm_token_type_ids": kinds, **found}

    def _clip_text(self, clip: Clip, grid: list[int]) -> str:
        pads = "<|video_pad|>" * (grid[1] * grid[2] // 4)
        if self.kind not in THIRD:
            return pads * grid[0]
        times = [*clip.seconds, clip.seconds[-1]][: 2 * grid[0]]
        middles = [(a + b) / 2 for a, b in zip(times[::2], times[1::2], strict=True)]
        return "".join(f"<{t:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for t in middles)

    @torch.inference_mode()
    def logits(self, inputs: dict[str, Tensor], **options: Any) -> Tensor:
        """``[T, V]``"""
        self.oracle.model.rope_deltas = None
        made: Tensor = self.oracle(**inputs, **options).logits[0]
        return made

    @torch.inference_mode()
    def greedy(self, inputs: dict[str, Tensor], count: int, banned: tuple[int, ...]) -> list[int]:
        """What ``generate`` says, past any end of text."""
        self.oracle.model.rope_deltas = None
        made = self.oracle.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(banned) or None,
        )
        return [int(token) for token in made[0, inputs["input_ids"].shape[1] :]]


@torch.inference_mode()
def served_rows(model: LoadedModel, request: Request, one: Encoded) -> Tensor:
    """Logits ``[T, V]`` of a prompt's rows over paged K/V."""
    store = KVStore(model.decoder.config, pages=100, page_size=4, dtype=model.dtype, device=model.device)
    decoder = DiffusionDecoder(Parts.of(model, store))
    begun = decoder.begin(request, one, PageTable(tuple(range(100))))
    rows = np.arange(len(one.ids))
    whole = replace(decoder.parts.passes.first(begun), rows=rows, targets=rows + 1, wanted=rows, visible=len(rows))
    return forward(model, store, [whole], decoder.parts.runner.floor)[0].whole()


def transpose_experts(folder: Path) -> None:
    """Turn the experts' weights as they are published, ``[experts, in, out]``, or back to how transformers 5 saves."""
    file = folder / "model.safetensors"
    tensors = {n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def flatten(path: Path) -> None:
    """A ``config.json`` with its text keys outside, as Qwen2-VL and Qwen2.5-VL were published."""
    text = read_json(path)["text_config"]
    rope = text["rope_parameters"]
    edit(
        path,
        **{
            k: v for k, v in text.items() if k not in ("model_type", "rope_parameters", "layer_types", "sliding_window")
        },
        text_config=...,
        rope_theta=rope["rope_theta"],
        rope_scaling={"type": "mrope", "mrope_section": rope["mrope_section"]},
        sliding_window=32_768,
    )


def clip_rows(clip: Clip, kind: str) -> tuple[Tensor, list[int]]:
    """Rows of patches and the grid of a clip, by the code of transformers' video processor for ``kind``."""
    file = "qwen3_vl/video_processing_qwen3_vl.py" if kind in THIRD else "qwen2_vl/video_processing_qwen2_vl.py"
    width, height = clip.frames[0].size
    options: dict[str, Any] = {"factor": 2 * PATCH}
    if kind in THIRD:
        least, most = TOGETHER["size"]["shortest_edge"], TOGETHER["size"]["longest_edge"]
        options |= {"num_frames": len(clip.frames), "temporal_factor": 2}
    else:
        least, most = VIDEOS["min_pixels"], VIDEOS["max_pixels"]
    sizes = installed(file, "smart_resize")(height=height, width=width, min_pixels=least, max_pixels=most, **options)
    resized = [f.resize((sizes[1], sizes[0]), Image.Resampling.BICUBIC) for f in clip.frames]
    pixels = torch.from_numpy(np.stack([np.asarray(f, np.float32).transpose(2, 0, 1) / 255 for f in resized]))
    mean, std = (torch.tensor(PROCESSOR[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    rows, *grid = installed(file, "patchify")(
        None, ((pixels - mean) / std)[None], patch_size=PATCH, merge_size=2, temporal_patch_size=2
    )
    return rows[0], grid


@functools.cache
def installed(file: str, name: str) -> Callable[..., Any]:
    """A function or method of a file of transformers, without importing the file."""
    tree = ast.parse((Path(transformers.__file__).parent / "models" / file).read_text())
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    found.returns = None
    for argument in [*found.args.args, *found.args.kwonlyargs]:
        argument.annotation = None
    made: dict[str, Any] = {"math": math, "np": np, "torch": torch}
    exec(compile(ast.Module([found], []), file, "exec"), made)
    function: Callable[..., Any] = made[name]
    return function


def _config(kind: str, config: Any) -> Any:
    special = special_ids()
    sections = [4, 2, 2] if kind in THIRD else [2, 3, 3]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 50_000.0, "mrope_section": sections}
    text = {**_TEXT, "eos_token_id": special["<|im_end|>"], "bos_token_id": None, "rope_parameters": rope}
    if kind in THIRD:
        text |= {"head_dim": 16}
        if kind == "qwen3_vl_moe":
            text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
        rope["mrope_interleaved"] = True
    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2}
    return config(
        text_config=text,
        vision_config={**_TOWERS["qwen3_vl" if kind in THIRD else kind], **sizes},
        image_token_id=special["<|image_pad|>"],
        video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
        attn_implementation="eager",
    )


def _expanded(text: str, placeholder: str, texts: list[str]) -> str:
    pieces = text.split(placeholder)
    assert len(pieces) == len(texts) + 1
    return "".join(piece + more for piece, more in zip(pieces, [*texts, ""], strict=True))
