"""The bundled models as they are trained: CLIP tower, MLP projector and decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from mmserve.models.decoder import Attend, Decoder, dense_attention
from mmserve.models.decoder_config import DecoderConfig

PIXELS, PATCH = 72, 8
GRID = PIXELS // PATCH
VISUAL_TOKENS = GRID * GRID
#: A video's frames are pooled over squares of this side, as LLaVA-NeXT-Video does: one token a cell of the scene.
POOL = 3
FRAME_TOKENS = (GRID // POOL) ** 2
#: Frames taken from a clip, evenly, and the text in front of each.
FRAMES = 8
FRAME_TIME = "{seconds}s:"
#: The tower layer whose patch features go to the decoder, as LLaVA counts it (the last but one).
SELECT_LAYER = -2
#: The decoder layer with the auxiliary loss on its visual tokens: half-way.
AUXILIARY_LAYER = 2


def decoder_config(vocab_size: int) -> DecoderConfig:
    """The bundled decoders: 6 layers of 256, 8 heads of 32 (5.1 M parameters)."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_layers=6,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        max_positions=1024,
    )


def tower_config() -> CLIPVisionConfig:
    """The bundled vision tower: CLIP's, 4 layers of 128 over 81 patches and a CLS token (0.9 M parameters)."""
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


def mixed_precision(device: torch.device) -> torch.autocast:
    """Products in bfloat16, except on a CPU without instructions for them, where oneDNN emulates it: float32 there.

    That took 4.6 times as long as float32 on a Xeon with AVX-512 only, which oneDNN itself reports as supported.
    """
    fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def explicit_attention(mask: Tensor, on_scores: Callable[[int, Tensor], None] | None = None) -> Attend:
    """Attention spelled out, for training on a CPU: there SDPA's backward took 67 ms a layer, this takes 21.

    ``mask`` is bool ``[B, 1, T or 1, T]``, True = attended to; queries and keys are ``[B, T, H, K]``.
    ``on_scores`` is given each layer's number and the scores ``[B, H, T, T]`` of its heads.
    """
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -1e4)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, _length, heads, size = q.shape
        turned = (rotate(q, cos, sin), rotate(k, cos, sin), v)
        q, k, v = (x.transpose(1, 2).flatten(0, 1).to(v.dtype) for x in turned)
        scores = torch.bmm(q * size**-0.5, k.transpose(1, 2)).unflatten(0, (rows, heads)) + bias.to(q.dtype)
        if on_scores is not None:
            on_scores(layer, scores)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype).flatten(0, 1)
        return torch.bmm(weights, v).unflatten(0, (rows, heads)).transpose(1, 2)

    return attend


class ReferenceModel(nn.Module):
    """Tower, projector (``mlp2x_gelu``) and decoder: what a checkpoint holds. ``causal`` makes it autoregressive."""

    def __init__(self, vocab_size: int, *, causal: bool) -> None:
        super().__init__()
        tower = tower_config()
        self.causal = causal
        self.decoder = Decoder(decoder_config(vocab_size))
        self.tower = CLIPVisionModel(tower)
        self.tower.set_attn_implementation("eager")  # on a CPU the backward of SDPA is slower, as above
        self.projector = nn.Sequential(
            nn.Linear(tower.hidden_size, self.decoder.config.hidden_size),
            nn.GELU(),
            nn.Linear(self.decoder.config.hidden_size, self.decoder.config.hidden_size),
        )
        _initialise(self)

    def image_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Patch features ``[M, VISUAL_TOKENS, 128]`` of layer ``SELECT_LAYER`` and the pooled CLS ``[M, 128]``."""
        out = self.tower(pixels, output_hidden_states=True)
        return out.hidden_states[SELECT_LAYER][:, 1:], out.pooler_output

    def visual(self, features: Tensor, *, pooled: bool) -> Tensor:
        """Visual tokens ``[M, VISUAL_TOKENS or FRAME_TOKENS, 256]``; frames of videos are averaged over squares."""
        tokens = self.projector(features)
        if not pooled:
            return tokens
        grid = tokens.unflatten(1, (GRID, GRID)).permute(0, 3, 1, 2)
        return F.avg_pool2d(grid.float(), POOL).flatten(2).transpose(1, 2).to(tokens.dtype)

    def forward(
        self,
        visual: Tensor | None,
        ids: Tensor,
        visual_at: Tensor,
        positions: Tensor,
        mask: Tensor,
        on_scores: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[B, T, V]`` of ``ids [B, T]`` at integer ``positions [B, T]``, and the hidden states ``[B, T, D]``
        after ``AUXILIARY_LAYER``.

        The places where ``visual_at`` is True hold the tokens of ``visual``, in order; ``mask`` is the attention mask,
        bool ``[B, 1, T or 1, T]``; ``on_scores`` is that of ``explicit_attention``.
        """
        x = self.decoder.embed(ids)
        if visual is not None:
            x = x.masked_scatter(visual_at[..., None], visual.flatten(0, 1).to(x.dtype))
        attend = dense_attention(mask) if x.is_cuda and on_scores is None else explicit_attention(mask, on_scores)
        cos, sin = self.decoder.rotary(positions)
        hidden = []
        for index, layer in enumerate(self.decoder.layers):
            x = layer(x, cos, sin, index, attend)
            hidden.append(x)
        return self.decoder.logits(self.decoder.norm(x)), hidden[AUXILIARY_LAYER]


def _initialise(model: ReferenceModel) -> None:
    """Embeddings at a tenth of the usual scale: at scale 1 the model needs ten times as many steps to use pictures."""
    residual = 0.02 / (2 * model.decoder.config.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.") and parameter.dim() == 2:
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=residual if is_residual else 0.02)
        elif name.startswith("projector.") and parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif name.endswith("position_embedding.weight"):
            nn.init.normal_(parameter, std=0.1)
    nn.init.normal_(model.decoder.embed.weight, std=0.1)
