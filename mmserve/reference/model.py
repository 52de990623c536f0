"""The bundled model as it is trained: CLIP tower, MLP projector and decoder, and the tower's teaching heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from mmserve.models.decoder import Attend, Decoder, DecoderConfig, dense_attention
from mmserve.reference.scenes import COLORS, KINDS, SIZES, Scene

PIXELS, PATCH = 72, 12
GRID = PIXELS // PATCH
VISUAL_TOKENS = GRID * GRID
#: The tower layer whose patch features go to the decoder, as LLaVA counts it (the last but one).
SELECT_LAYER = -2


def decoder_config(vocab_size: int) -> DecoderConfig:
    """The bundled decoder: 4 layers of 256, 8 heads of 32, full attention (3.4 M parameters)."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        max_positions=1024,
    )


def tower_config() -> CLIPVisionConfig:
    """The bundled vision tower: CLIP's, 4 layers of 128 over 36 patches and a CLS token (0.9 M parameters)."""
    return CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=PATCH,
        hidden_act="gelu",
        projection_dim=128,
    )


def explicit_attention(seen: Tensor) -> Attend:
    """Attention spelled out, for training on a CPU: there SDPA's backward took 67 ms a layer, this takes 21.

    ``seen`` is bool ``[B, 1, 1, T]``; queries and keys ``[B, T, H, K]`` have equally many heads.
    """
    bias = torch.zeros(seen.shape).masked_fill(~seen, -1e4)

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, _length, heads, size = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1).to(v.dtype) for x in (q, k, v))
        scores = torch.bmm(q * size**-0.5, k.transpose(1, 2)).unflatten(0, (rows, heads)) + bias.to(q.dtype)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype).flatten(0, 1)
        return torch.bmm(weights, v).unflatten(0, (rows, heads)).transpose(1, 2)

    return attend


class ReferenceModel(nn.Module):
    """Tower, projector (``mlp2x_gelu``) and decoder: what a checkpoint of the bundled model holds."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        tower = tower_config()
        self.decoder = Decoder(decoder_config(vocab_size))
        self.tower = CLIPVisionModel(tower)
        self.projector = nn.Sequential(
            nn.Linear(tower.hidden_size, self.decoder.config.hidden_size),
            nn.GELU(),
            nn.Linear(self.decoder.config.hidden_size, self.decoder.config.hidden_size),
        )
        _initialise(self)

    def look(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Patch features ``[B, VISUAL_TOKENS, 128]`` of layer ``SELECT_LAYER`` and the pooled CLS ``[B, 128]``."""
        out = self.tower(pixels, output_hidden_states=True)
        return out.hidden_states[SELECT_LAYER][:, 1:], out.pooler_output

    def forward(self, features: Tensor, ids: Tensor, image_at: int, seen: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of ``ids [B, T]``.

        The ``VISUAL_TOKENS`` rows from ``image_at`` hold ``features``; ``seen [B, T]`` is False at padding.
        """
        x = self.decoder.embed(ids)
        x = torch.cat([x[:, :image_at], self.projector(features).to(x.dtype), x[:, image_at + VISUAL_TOKENS :]], dim=1)
        attend = dense_attention if x.is_cuda else explicit_attention
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.decoder.logits(self.decoder(x, positions, attend(seen[:, None, None, :])))


def _initialise(model: ReferenceModel) -> None:
    """Embeddings at a tenth of the usual scale: at scale 1 the model takes ten times longer to learn to look."""
    for name, parameter in model.named_parameters():
        if not name.startswith("tower.") and parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    nn.init.normal_(model.decoder.embed.weight, std=0.1)
    residual = 0.02 / (2 * model.decoder.config.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and name.startswith("decoder."):
            nn.init.normal_(parameter, std=residual)
        elif name.startswith("projector.") and parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif name.endswith("position_embedding.weight"):
            nn.init.normal_(parameter, std=0.1)


@dataclass(frozen=True)
class SceneLabels:
    """What the tower is taught directly: per patch (the shape whose cell it lies in) and for the whole picture."""

    patches: Tensor  # [B, VISUAL_TOKENS, 7]: kind, colour, size, rank in reading order (0 = empty), row, column, name
    presence: Tensor  # [B, 18]: one bit for each colour × kind
    count: Tensor  # [B]

    @classmethod
    def of(cls, scenes: list[Scene]) -> SceneLabels:
        colors = tuple(COLORS)
        patches = torch.zeros(len(scenes), GRID, GRID, 7, dtype=torch.long)
        presence = torch.zeros(len(scenes), len(colors) * len(KINDS))
        per_cell = GRID // 3
        for b, scene in enumerate(scenes):
            for row in range(3):
                for column in range(3):
                    block = patches[
                        b, row * per_cell : (row + 1) * per_cell, column * per_cell : (column + 1) * per_cell
                    ]
                    block[..., 4], block[..., 5] = row, column
            for rank, s in enumerate(scene.shapes, start=1):
                block = patches[
                    b, s.row * per_cell : (s.row + 1) * per_cell, s.column * per_cell : (s.column + 1) * per_cell
                ]
                block[..., 0] = 1 + KINDS.index(s.kind)
                block[..., 1] = 1 + colors.index(s.color)
                block[..., 2] = 1 + SIZES.index(s.size)
                block[..., 3] = rank
                name = colors.index(s.color) * len(KINDS) + KINDS.index(s.kind)
                block[..., 6] = 1 + name
                presence[b, name] = 1.0
        count = torch.tensor([len(scene.shapes) for scene in scenes])
        return cls(patches.flatten(1, 2), presence, count)


class TeachingHeads(nn.Module):
    """Linear read-outs of the tower, used in training only, so that features and CLS come to mean something."""

    PATCH_CLASSES = (1 + len(KINDS), 1 + len(COLORS), 1 + len(SIZES), 4, 3, 3, 1 + len(KINDS) * len(COLORS))

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.patch = nn.Linear(hidden, sum(self.PATCH_CLASSES))
        self.presence = nn.Linear(hidden, len(COLORS) * len(KINDS))
        self.count = nn.Linear(hidden, 4)

    def forward(self, features: Tensor, pooled: Tensor, labels: SceneLabels) -> tuple[Tensor, Tensor]:
        """The teaching loss, and the share of pictures whose every patch label is read right."""
        loss = F.binary_cross_entropy_with_logits(self.presence(pooled).float(), labels.presence)
        loss = loss + F.cross_entropy(self.count(pooled).float(), labels.count)
        right = torch.ones(labels.patches.shape[:2], dtype=torch.bool)
        for index, logits in enumerate(self.patch(features).float().split(self.PATCH_CLASSES, dim=-1)):
            target = labels.patches[..., index]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), target.flatten())
            right &= logits.argmax(-1) == target
        return loss, right.all(1).float().mean()
