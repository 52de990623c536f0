"""LaViDa against plain ways through its rules and transformers' decoders: tiles, prompts, logits, pruning, refusals."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreseen import check_foreseen
from lavida_checkpoints import SYSTEM, Lavida
from llada_checkpoints import edit, load
from PIL import Image
from test_pruned_prompts import encoder, pruned, served_logits, show
from torch import Tensor

from mmserve.core.request import Amount, ImagePart, Message, TextPart
from mmserve.errors import ConfigError
from mmserve.models.base import Attention
from mmserve.models.vision import LlavaVision
from mmserve.prune import pruners_for

KINDS = ("llada", "dream")
SIZES = ((31, 45), (90, 30), (20, 200), (64, 64), (45, 31), (29, 91))
FORMATS = {
    "llada": (
        f"<|startoftext|><|start_header_id|>system<|end_header_id|>\n\n{SYSTEM}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "dream": (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
}


def image(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def part(picture: Image.Image) -> ImagePart:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return ImagePart(out.getvalue())


@torch.no_grad()
def plain_logits(made: Lavida, prompt_PD: Tensor, new: int, mask_id: int, left: np.ndarray | None = None) -> Tensor:
    """transformers' logits of a prompt and its canvas; the prompt sees only itself, and nobody what is not ``left``."""
    size, embed = len(prompt_PD), made.oracle.get_input_embeddings()
    x = torch.cat([prompt_PD, embed(torch.full((new,), mask_id))])
    seen = torch.ones(len(x), len(x), dtype=torch.bool)
    seen[:size, size:] = False
    if left is not None:
        seen[:, np.setdiff1d(np.arange(size), left)] = False
        seen |= torch.eye(len(x), dtype=torch.bool)  # a row that sees nothing is no row; nobody sees it
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return made.oracle(inputs_embeds=x[None], attention_mask=mask[None, None]).logits[0]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_picture_becomes_the_tokens_of_llava_arch(tmp_path: Path, size: tuple[int, int]) -> None:
    made, model = Lavida(tmp_path, "llada"), load(tmp_path)
    assert isinstance(model.vision, LlavaVision)
    with torch.inference_mode():
        [seen] = model.vision.encode([model.vision.prepare(image(*size))], frozenset(), clip=False)
    expected = made.visual_tokens(image(*size))
    assert model.vision.pieces(model.vision.prepare(image(*size)), clip=False) == seen.pieces
    assert seen.tokens.shape == expected.shape and (seen.tokens - expected).abs().max() < 1e-5
    newlines = (expected == made.newline).all(1).nonzero().flatten()
    covered = torch.cat([grid.patches for grid in seen.grids])
    assert len(newlines) and sorted([*covered.tolist(), *newlines.tolist()]) == list(range(len(expected)))


@pytest.mark.parametrize("changes", [{"image_aspect_ratio": "square"}, {"image_aspect_ratio": ...}])
def test_one_tile_a_picture(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = Lavida(tmp_path, "llada")
    edit(tmp_path / "config.json", **changes)
    model = load(tmp_path)
    assert model.vision is not None and model.vision.tokens_per_image == 10
    check_foreseen(model)
    with torch.inference_mode():
        [seen] = model.vision.encode([model.vision.prepare(image(31, 45))], frozenset(), clip=False)
    assert (seen.tokens - made.visual_tokens(image(31, 45), tiles=False)).abs().max() < 1e-5


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_prompt(tmp_path: Path, kind: str, images: int) -> None:
    made, model = Lavida(tmp_path, kind), load(tmp_path)
    request = show(*[part(image(*size)) for size in SIZES[:images]])
    [encoded] = encoder(model).encode([request])
    front, behind = FORMATS[kind]
    pieces: list[Tensor] = []
    for text, size in zip([front, *["\n"] * images], [*SIZES[:images], None], strict=True):
        last = f"what?{behind}" if size is None else ""
        ids = torch.tensor(model.tokenizer.encode(text + last, add_special_tokens=False))
        pieces.append(made.oracle.get_input_embeddings()(ids))
        if size is not None:
            pieces.append((made.visual_tokens if images == 1 else made.padded_tokens)(image(*size)))
    prompt = torch.cat(pieces)
    assert len(encoded.ids) == len(prompt)
    ours, rows = served_logits(model, request, encoded)
    theirs = plain_logits(made, prompt, request.sampling.max_new_tokens, model.spec.mask_id)[rows]
    assert (ours - theirs).abs().max() < 1e-4
    assert rows[0] == len(prompt) - model.spec.logit_shift
    assert (model.spec.attention, model.spec.logit_shift) == (Attention.PREFIX, int(kind == "dream"))
    assert model.spec.banned_ids[0] != model.spec.end_ids and model.spec.max_tokens == 4096


@pytest.mark.parametrize("kind", KINDS)
def test_pruning_is_full_attention_with_the_dropped_keys_masked(tmp_path: Path, kind: str) -> None:
    made, model = Lavida(tmp_path, kind), load(tmp_path)
    assert model.vision is not None
    request, encode = (
        show(part(image(31, 45)), TextPart("and"), part(image(90, 30))),
        encoder(model).encode,
    )
    [full] = encode([request])
    names = pruners_for(model.vision.evidence)[1:]
    assert set(names) == {"random", "resize", "tome", "column_attention"}
    for name in names:
        [left] = encode([pruned(request, name)])
        assert left.places is not None and len(left.ids) < len(full.ids), name
        assert full.features is not None and left.features is not None
        ids = torch.from_numpy(np.where(np.isin(np.arange(len(full.ids)), full.image_rows), 0, full.ids))
        prompt = made.oracle.get_input_embeddings()(ids).detach()
        prompt[torch.from_numpy(full.image_rows)] = full.features
        prompt[torch.from_numpy(left.places[left.image_rows])] = left.features  # averages, where some are
        ours, rows = served_logits(model, request, left)
        theirs = plain_logits(made, prompt, request.sampling.max_new_tokens, model.spec.mask_id, left.places)[rows]
        assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), name
        [whole] = encode([pruned(request, name, Amount("keep_ratio", 1))])
        assert np.array_equal(whole.ids, full.ids) and whole.places is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_message_of_the_chat_is_kept(tmp_path: Path, kind: str) -> None:
    Lavida(tmp_path, kind)
    model, request = load(tmp_path), show(part(image(31, 45)))
    own = replace(request, messages=(Message("system", (TextPart("be brief"),)), *request.messages))
    texts = [model.tokenizer.decode(np.delete(e.ids, e.image_rows)) for e in encoder(model).encode([request, own])]
    assert SYSTEM in texts[0] and SYSTEM not in texts[1] and "be brief" in texts[1]


def test_pictures_without_anything_left_between_the_margins(tmp_path: Path) -> None:
    """Cut tiles of a very long picture are all margin: the whole picture in one tile remains."""
    Lavida(tmp_path, "llada")
    model = load(tmp_path)
    [long, pruned_long] = encoder(model).encode([r := show(part(image(400, 4))), pruned(r, "column_attention")])
    assert len(long.image_rows) == 9 and len(pruned_long.image_rows) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_aspect_ratio": "highres"}, "image_aspect_ratio = 'highres' is not supported"),
        ({"mm_patch_merge_type": "flat"}, "mm_patch_merge_type = 'flat' is not supported"),
        ({"mm_projector_type": "pooler"}, "mm_projector_type = 'pooler' is not supported"),
        ({"mm_resampler_type": "qformer"}, "mm_resampler_type = 'qformer' is not supported"),
        ({"mm_video_frames": 8}, "mm_video_frames = 8 is not supported"),
        ({"image_grid_pinpoints": [[30, 40]]}, "image_grid_pinpoints must be .* multiples of 30"),
        ({"image_grid_pinpoints": ...}, "image_grid_pinpoints must be .* multiples of 30"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Lavida(tmp_path, "llada")
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
