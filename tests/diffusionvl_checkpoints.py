"""A tiny random checkpoint in DiffusionVL's layout, and transformers' Qwen2.5-VL that it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from qwen_checkpoints import CHATML, block_mask
from qwen_vl_checkpoints import PROCESSOR, Qwen
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmserve.models.checkpoint import read_json, write_checkpoint

MASK_ID, BLOCK = 638, 8
#: What Qwen2.5-VL's configuration has and DiffusionVL's has not, and the other way round.
KEYS: dict[str, Any] = {
    "architectures": ["DiffusionVL_Qwen2_5_VL_ForConditionalGeneration"],
    "bd3lm_antithetic_sampling": True,
    "bd3lm_block_aligned_eos": True,
    "bd3lm_block_size": BLOCK,
    "enable_bd3lm": True,
    "image_aspect_ratio": "pad",
    "image_token_id": None,
    "mask_token_id": MASK_ID,
    "max_pixels": 15 * 64,
    "min_pixels": 5 * 64,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_projector_type": "qwen_merger",
    "mm_use_im_start_end": False,
    "mm_video_frames": ...,
    "model_type": "diffusionvl_qwenvl",
    "use_sliding_window": False,
    "video_token_id": None,
    "vision_end_token_id": ...,
    "vision_start_token_id": ...,
}


class DiffusionVL:
    """A checkpoint on disk: tensors of Qwen2.5-VL by LLaVA's names, and a row that its code makes and never uses."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, qwen = folder, Qwen(folder, "qwen2_5_vl")
        self.oracle = qwen.oracle
        with torch.no_grad():  # attention is sharp, and what is predicted at a mask depends on what surrounds it
            self.oracle.get_input_embeddings().weight[MASK_ID] *= 0.2
            for name, weight in self.oracle.named_parameters():
                if "language_model" in name and ("q_proj.weight" in name or "embed_tokens" in name):
                    weight *= 2
        tensors = {_renamed(name): tensor for name, tensor in self.oracle.state_dict().items()}
        tensors["model.image_newline"] = torch.zeros(32)
        config = {**read_json(folder / "config.json"), **KEYS, **changes}
        write_checkpoint(folder, {k: v for k, v in config.items() if v is not ...}, tensors)
        (folder / "video_preprocessor_config.json").unlink()
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tok = AutoTokenizer.from_pretrained(folder)
        tok.chat_template = CHATML
        tok.save_pretrained(folder)

    @torch.no_grad()
    def prompt(self, ids: list[int], image_id: int, images: list[Image.Image]) -> Tensor:
        """Embeddings ``[P, D]`` of a prompt with one placeholder an image, in whose place its visual tokens are."""
        embed, seen, rows = self.oracle.get_input_embeddings(), iter(images), []
        for token in ids:
            if token == image_id:
                limits = {name: KEYS[name] for name in ("min_pixels", "max_pixels")}  # before the processor's own
                made = Qwen2VLImageProcessorPil(**{**PROCESSOR, **limits})(next(seen), return_tensors="pt")
                grid = made["image_grid_thw"]
                rows.append(self.oracle.model.visual(made["pixel_values"], grid_thw=grid).pooler_output)
            else:
                rows.append(embed(torch.tensor([token])))
        return torch.cat(rows)

    @torch.no_grad()
    def logits(self, x_TD: Tensor, block: int) -> Tensor:
        """``[T, V]`` where each position sees to the end of its block, and comes one after the other on every axis."""
        length = len(x_TD)
        places = torch.arange(length).expand(3, 1, -1)
        mask = {"full_attention": block_mask(length, block)}
        made = self.oracle.model.language_model(inputs_embeds=x_TD[None], position_ids=places, attention_mask=mask)
        logits: Tensor = self.oracle.lm_head(made.last_hidden_state)[0]
        return logits


def _renamed(name: str) -> str:
    for theirs, ours in (
        ("model.visual.merger.", "model.mm_projector.merger."),
        ("model.visual.", "model.vision_tower.vision_tower."),
        ("model.language_model.", "model."),
    ):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
