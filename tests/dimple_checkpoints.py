"""A tiny random checkpoint in Dimple's layout, and transformers' parts that it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from qwen_vl_checkpoints import PROCESSOR, Qwen
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmserve.models.checkpoint import read_json, write_checkpoint, write_json

MASK_ID, SECTIONS = 638, [2, 3, 3]
#: What Qwen2.5-VL's configuration has and Dimple's has not, and the other way round.
KEYS: dict[str, Any] = {
    "architectures": ["DimpleModel"],
    "auto_map": {"AutoConfig": "configuration_dimple.DimpleConfig", "AutoModel": "modeling_dimple.DimpleModel"},
    "full_attn_mask": True,
    "mask_token_id": MASK_ID,
    "mm_video_frames": ...,
    "model_type": "dimple",
    "mrope_section": SECTIONS,
    "rope_scaling": None,
    "rope_theta": 50_000.0,
    "use_sliding_window": False,
}


class Dimple:
    """A checkpoint on disk. Text and tower are Qwen2.5-VL's; what stands between them is Dimple's own."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, qwen = folder, Qwen(folder, "qwen2_5_vl")
        self.oracle, self.special = qwen.oracle, qwen.oracle.config
        torch.manual_seed(41)
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        parts = {"linear_1": self.first, "linear_2": self.second}
        tensors = {
            name.removeprefix("model.").replace("language_model.", "model."): tensor
            for name, tensor in self.oracle.state_dict().items()
        }
        for part, layer in parts.items():
            tensors |= {f"img_projector.{part}.{name}": tensor for name, tensor in layer.state_dict().items()}
        config = {**read_json(folder / "config.json"), **KEYS, **changes}
        write_checkpoint(folder, {k: v for k, v in config.items() if v is not ...}, tensors)
        named = {"auto_map": {"AutoProcessor": "processing_dimple.DimpleProcessor"}}
        processor = {"image_processor_type": "DimpleImageProcessor", "processor_class": "DimpleProcessor", **named}
        write_json(folder / "preprocessor_config.json", {**PROCESSOR, **processor})

    @torch.no_grad()
    def see(self, images: list[Image.Image]) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Each picture's visual tokens ``[n, D]``, and their rows and columns."""
        found, grids = [], []
        for image in images:
            made = Qwen2VLImageProcessorPil(**PROCESSOR)(image, return_tensors="pt")
            grid = made["image_grid_thw"]
            features = self.oracle.model.visual(made["pixel_values"], grid_thw=grid).pooler_output
            found.append(self.second(F.silu(self.first(features))))
            grids.append((int(grid[0, 1]) // 2, int(grid[0, 2]) // 2))
        return found, grids

    def prompt(self, ids: list[int], images: list[Image.Image]) -> tuple[Tensor, Tensor]:
        """Embeddings ``[P, D]`` and positions ``[3, P]`` of a prompt with one placeholder an image.

        As Dimple's ``get_rope_index``: a picture's tokens stand at its time, their row and their column behind what
        was before it, and what follows begins behind the highest of them all.
        """
        embed = self.oracle.get_input_embeddings()
        tokens, grids = self.see(images)
        rows: list[Tensor] = []
        places: list[tuple[int, int, int]] = []
        start, seen = 0, iter(zip(tokens, grids, strict=True))
        for token in ids:
            if token == self.special.image_token_id:
                own, (high, wide) = next(seen)
                rows += list(own)
                places += [(start, start + y, start + x) for y in range(high) for x in range(wide)]
                start += max(high, wide)
            else:
                rows.append(embed(torch.tensor(token)).detach())
                places.append((start, start, start))
                start += 1
        return torch.stack(rows), torch.tensor(places).T

    @torch.no_grad()
    def logits(self, x_TD: Tensor, places_3T: Tensor, seen_TT: Tensor | None = None) -> Tensor:
        """``[T, V]`` where every position sees every other, or what ``seen_TT`` says."""
        seen = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool) if seen_TT is None else seen_TT
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        made = self.oracle.model.language_model(
            inputs_embeds=x_TD[None], position_ids=places_3T[:, None], attention_mask={"full_attention": mask}
        )
        logits: Tensor = self.oracle.lm_head(made.last_hidden_state)[0]
        return logits

    def canvas(self, prompt_PD: Tensor, places_3P: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """A prompt with the answer's tokens behind it, which stand one behind the other."""
        x = torch.cat([prompt_PD, self.oracle.get_input_embeddings()(tokens).detach()])
        behind = places_3P.max() + 1 + torch.arange(len(tokens))
        return x, torch.cat([places_3P, behind.expand(3, -1)], dim=1)
