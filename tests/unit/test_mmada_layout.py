"""MMaDA's understanding path against plain ways through its rules: codes, prompts, logits, pruning, refusals."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreseen import check_foreseen
from llada_checkpoints import edit, load, open_logits
from mmada_checkpoints import BITS, Mmada, plain_codes, plain_pixels, text_tokenizer
from PIL import Image
from test_pruned_prompts import encoder, masked_logits, pruned, served_logits, show
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mmserve.core.request import Amount, ImagePart, Message, TextPart
from mmserve.errors import ConfigError, InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.models.mmada import MmadaVision, frame_ids
from mmserve.prune import pruners_for

ASKED = "<|startoftext|><|start_header_id|>user<|end_header_id|>\nwhat?<|eot_id|>"
ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n"


def image(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def part(picture: Image.Image) -> ImagePart:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return ImagePart(out.getvalue())


def vision(model: LoadedModel) -> MmadaVision:
    assert isinstance(model.vision, MmadaVision)
    return model.vision


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes(tmp_path: Path, dtype: str) -> None:
    made, model = Mmada(tmp_path), load(tmp_path, dtype=dtype)
    seen: set[int] = set()
    for size in ((16, 16), (31, 45), (45, 31), (7, 9), (200, 20)):
        pixels = vision(model).prepare(image(*size))["pixels"]
        with torch.inference_mode():
            [codes] = vision(model).codes(pixels.to(model.dtype))
        assert torch.equal(codes, plain_codes(made.codes, plain_pixels(image(*size)))), size
        seen |= set(codes.tolist())
    assert len(seen) > 2**BITS // 4, "not one code for everything"


@pytest.mark.parametrize("images", [0, 1])
def test_a_prompt_is_the_one_of_inference_mmu(tmp_path: Path, images: int) -> None:
    made, model = Mmada(tmp_path), load(tmp_path)
    request = show(*[part(image(31, 45))] * images)
    [encoded] = encoder(model).encode([request])
    check_foreseen(model)
    text = text_tokenizer().encode(ASKED + ANSWER, add_special_tokens=False)
    expected = (made.picture_ids(image(31, 45)) if images else []) + text
    assert len(encoded.ids) == len(expected)
    ids = torch.tensor([expected])
    embeddings = made.oracle.model.embed_tokens(ids)[0]
    if encoded.features is not None:
        assert torch.equal(encoded.features, embeddings[encoded.image_rows])
    assert np.array_equal(np.delete(encoded.ids, encoded.image_rows), np.delete(expected, encoded.image_rows))

    ours, rows = served_logits(model, request, encoded)
    new = torch.full((1, request.sampling.max_new_tokens), model.spec.mask_id)
    theirs = open_logits(made.oracle, made.oracle.model.embed_tokens(torch.cat([ids, new], 1)))[0]
    assert (ours - theirs[rows]).abs().max() < 1e-4


def test_a_picture_stands_in_front_of_the_whole_chat(tmp_path: Path) -> None:
    Mmada(tmp_path)
    model = load(tmp_path)
    first = show(part(image(31, 45)))
    later = (Message("assistant", (TextPart("that"),)), Message("user", (part(image(31, 45)), TextPart("and?"))))
    [alone] = encoder(model).encode([replace(first, messages=(Message("user", (TextPart("what?"),)), *later))])
    [front] = encoder(model).encode([replace(first, messages=(*first.messages, later[0], _blind(later[1])))])
    assert np.array_equal(alone.ids, front.ids) and alone.image_rows.tolist() == list(range(2, 18))
    with pytest.raises(InvalidArgument, match="one image a chat"):
        encoder(model).encode([show(part(image(31, 45)), part(image(45, 31)))])


def _blind(message: Message) -> Message:
    return Message(message.role, message.parts[1:])


def test_a_template_of_its_own_is_kept(tmp_path: Path) -> None:
    Mmada(tmp_path)
    own = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(own)
    [encoded] = encoder(model := load(tmp_path)).encode([show(part(image(31, 45)))])
    assert model.tokenizer.decode(encoded.ids[19:]) == "[user]what?"


def test_pruning_is_full_attention_with_the_dropped_keys_masked(tmp_path: Path) -> None:
    made, model = Mmada(tmp_path), load(tmp_path)
    request, encode = show(part(image(31, 45))), encoder(model).encode
    [full] = encode([request])
    names = pruners_for(vision(model).evidence)
    assert names == ("none", "random", "resize"), "there is no attention over a picture to judge by"
    for name in names[1:]:
        [left], [all_of_it] = encode([pruned(request, name)]), encode([pruned(request, name, Amount("keep_ratio", 1))])
        assert len(left.ids) == len(full.ids) - 8 and np.array_equal(all_of_it.ids, full.ids)
        ours, rows = served_logits(model, request, left)
        theirs = masked_logits(model, made.oracle, full, left, request.sampling.max_new_tokens)[rows]
        assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), name


def test_answers_are_text(tmp_path: Path) -> None:
    made = Mmada(tmp_path)
    spec = load(tmp_path).spec
    assert spec.architecture == "mmada" and spec.mask_id == 3
    assert set(spec.banned_ids) == {3, *range(made.first, made.first + 2**BITS)}
    assert spec.image_id == made.first, "a placeholder behind the text, where pictures have their first code"


def test_tokens_that_frame_pictures_are_those_that_mmada_reserves(tmp_path: Path) -> None:
    """The published tokenizer is LLaDA's: 126,349 tokens, none of them named ``<|soi|>``."""
    Mmada(tmp_path)
    text = text_tokenizer()
    spelled = text.backend_tokenizer.to_str()
    for name in ("mmu", "soi", "eoi"):
        spelled = spelled.replace(f"<|{name}|>", f"<|other_{name}|>")
    (tmp_path / "tokenizer.json").write_text(spelled)
    edit(tmp_path / "tokenizer_config.json", additional_special_tokens=..., extra_special_tokens=...)
    with pytest.raises(ConfigError, match=r"no <\|mmu\|>, and no token 126089"):
        load(tmp_path)
    words = {f"word{i}": i for i in range(126_349)}
    published = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="word0")))
    assert frame_ids(published) == ((126089, 126084), (126085,)), "as in its prompting_utils.py"


@pytest.mark.parametrize("squares", [(1000, 10), (10, 1000)])
def test_pictures_too_long(tmp_path: Path, squares: tuple[int, int]) -> None:
    Mmada(tmp_path)
    with pytest.raises(InvalidArgument, match=r"parts\[0\]\.image: is .* this model takes sides up to 64:1"):
        encoder(load(tmp_path)).encode([show(part(image(*squares)))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_clip_vit": True}, "w_clip_vit = True is not supported"),
        ({"num_new_special_tokens": 10}, "num_new_special_tokens = 10 is not supported"),
        ({"num_vq_tokens": 15}, "num_vq_tokens = 15 is no square"),
        ({"codebook_size": 16}, "codebook_size = 16, but magvitv2 has 5 bits"),
        ({"codebook_size": 64}, "64 codes after .* tokens of text need .* embeddings; there are"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Mmada(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_codes_that_cannot_be_made(tmp_path: Path) -> None:
    made = Mmada(tmp_path)
    made.write_codes(made.codes | {"encoder.down.1.attn.0.q.weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match="attention between the levels"):
        load(tmp_path)
    made.write_codes({name: t for name, t in made.codes.items() if "mid.attn_1.k" not in name})
    with pytest.raises(ConfigError, match=r"no tensor encoder\.mid\.attn_1\.k\.weight"):
        load(tmp_path)
    (tmp_path / "magvitv2" / "pytorch_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"put a copy of showlab/magvitv2 there"):
        load(tmp_path)
