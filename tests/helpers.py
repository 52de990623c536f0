"""A tiny model with random weights, made in memory, and small builders that the tests share."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel, PreTrainedTokenizerFast

import mmserve
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.request import Diffusion, ImagePart, Message, Policy, Request, Sampling, Streaming, TextPart
from mmserve.decode.commit import Candidates
from mmserve.decode.decoder_pruning import DecoderPruning
from mmserve.encode.encoder import Encoder
from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.commit_filter import CommitFilter
from mmserve.models.decoder import Decoder
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.projectors import mlp_projector
from mmserve.models.vision import LlavaVision
from mmserve.reference.tokenizer import EOS, EOT, IMAGE, MASK

HIDDEN = 64


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The bundled model's tokenizer; to train it again takes seconds, and gives the same one
    (``unit/test_reference_data.py``)."""
    return PreTrainedTokenizerFast.from_pretrained(Path(mmserve.__file__).parent / "assets" / "bundled")


@contextlib.contextmanager
def one_tokenizer() -> Iterator[None]:
    """Training runs and exports take ``tokenizer()``, which every call of ``train_tokenizer`` would give."""
    name = "mmserve.reference.{}.train_tokenizer"
    with patch(name.format("train"), tokenizer), patch(name.format("export"), tokenizer):
        yield


def tiny_model(*, vision: bool, seed: int = 0) -> LoadedModel:
    """Two layers, hidden 64, four query heads over two key/value heads, random weights.

    The residual branches are scaled up, so that what a position predicts depends on what surrounds it: with the
    usual small initialisation every masked position would predict the same token.
    """
    tok = tokenizer()
    eos, eot, mask, image = tok.convert_tokens_to_ids([EOS, EOT, MASK, IMAGE])
    config = DecoderConfig(
        vocab_size=len(tok),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 2:
            spread = 1.0 if "embed" in name else 3.0 / weight.shape[1] ** 0.5
            weight.data = torch.randn(weight.shape, generator=generator) * spread
    return LoadedModel(
        spec=ModelSpec(
            name="tiny",
            architecture="test",
            attention=Attention.FULL,
            mask_id=mask,
            end_ids=frozenset({eos, eot}),
            banned_ids=(mask, image),
            image_id=image,
            max_tokens=512,
            default_block_length=8,
        ),
        decoder=decoder.eval().requires_grad_(False),
        tokenizer=tok,
        vision=_tower(generator) if vision else None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _tower(generator: torch.Generator) -> LlavaVision:
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    vision = LlavaVision(
        CLIPVisionModel(config),
        mlp_projector("mlp2x_gelu", 32, HIDDEN),
        processor,
        select_layer=-2,
        has_cls=True,
        later=torch.nn.ModuleList(),
    )
    for name, weight in vision.named_parameters():
        if weight.dim() >= 2:
            fan_in = weight[0].numel()
            weight.data = torch.randn(weight.shape, generator=generator) * 2.0 / fan_in**0.5
        else:
            weight.data.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return vision.eval().requires_grad_(False)


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """A PNG of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def ask(
    name: str,
    text: str = "what is left of the circle?",
    *,
    images: tuple[bytes, ...] = (),
    steps: int = 0,
    block: int = 0,
    recompute: Policy | None = None,
    commit: Policy | None = None,
    snapshots: bool = False,
    deadline: float | None = None,
    **sampling: object,
) -> Request:
    """A request with one user message; keywords not named here are fields of ``Sampling``."""
    parts = (*(ImagePart(data) for data in images), TextPart(text))
    return Request(
        id=name,
        model="tiny",
        messages=(Message("user", parts),),
        sampling=Sampling(**{"max_new_tokens": 16, **sampling}),
        diffusion=Diffusion(
            steps=steps,
            block_length=block,
            recompute=recompute or Policy(name="none"),
            commit=commit or Policy(name="low_confidence"),
        ),
        streaming=Streaming(snapshots=snapshots),
        deadline=deadline,
    )


def dkv(refresh: int = 8) -> Policy:
    """The ``dkv_decode`` recompute policy."""
    return Policy(name="dkv_decode", options={"refresh": refresh})


def threshold(confidence: float = 0.9) -> Policy:
    """The ``threshold`` commit policy."""
    return Policy(name="threshold", options={"confidence": confidence})


def blank(prompt: int, new: int, block: int, *, mask_id: int = 3) -> Canvas:
    """A canvas with nothing committed; the prompt is 100, 101, …"""
    return Canvas.create(np.arange(100, 100 + prompt), new_tokens=new, block_length=block, mask_id=mask_id)


def proposal(
    canvas: Canvas,
    confidence: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    *,
    gap: np.ndarray | None = None,
    entropy: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> Candidates:
    """Candidates for the masked positions of the canvas's current block, or for ``positions``."""
    positions = canvas.block_masked() if positions is None else positions
    count = len(positions)
    return Candidates(
        positions,
        np.arange(count, dtype=np.int64) if tokens is None else tokens,
        np.linspace(0.1, 0.9, count, dtype=np.float32) if confidence is None else confidence.astype(np.float32),
        np.ones(count, np.float32) if gap is None else gap.astype(np.float32),
        np.ones(count, np.float32) if entropy is None else entropy.astype(np.float32),
    )


def sure_above(confidence: float) -> CommitFilter:
    """A filter made by hand: it trusts what is more confident than that (or a hair more), and sees no neighbour."""
    weight = np.zeros((1, 4), np.float32)
    weight[0, 0] = 1
    odds = np.log(confidence / (1 - confidence)) / 8
    return CommitFilter(
        weight, np.array([-odds], np.float32), np.array([1e4], np.float32), np.array(-5, dtype=np.float32)
    )


def looked(encoder: Encoder, *requests: Request) -> list[Encoded]:
    """The prompts of requests once the decoder has looked at those whose pruners ask for that."""
    prompts = encoder.encode(list(requests))
    assert isinstance(encoder.model, LoadedModel)
    pruning, most = DecoderPruning(encoder.model), encoder.max_tokens
    return [pruning.pruned(r, p, most) if p.grids else p for r, p in zip(requests, prompts, strict=True)]
