"""MMaDA's understanding path (arXiv 2505.15809; Gen-Verse/MMaDA): LLaDA's decoder, with images as discrete codes.

Weights and configuration are LLaDA's, with embeddings of the codes after those of the text. The encoder of images to
codes is another checkpoint, ``showlab/magvitv2``, whose file is in the subfolder ``magvitv2``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel, ModelSpec
from mmserve.models.chat import IMAGE, adapt_chat_template, change_templates, load_tokenizer
from mmserve.models.checkpoint import Checkpoint, Target, Weights
from mmserve.models.decoder import Decoder
from mmserve.models.family import Sources, load_family, make_spec, mask_id_of, token_id
from mmserve.models.keys import Keys
from mmserve.models.llada import MASK
from mmserve.models.magvit import MagvitEncoder, load_magvit
from mmserve.models.picture import Picture, Prepared, Text, Tile, VisionEncoder, check_shape, joined
from mmserve.models.towers import download
from mmserve.prune.base import Evidence, GridView

#: The encoder's checkpoint on the hub, its subfolder in the model's folder, and its file name.
CODES, BESIDE, FILE = "showlab/magvitv2", "magvitv2", "pytorch_model.safetensors"
#: Ids of special tokens in the published models; their tokenizer has them as reserved tokens.
RESERVED = {"<|mmu|>": 126089, "<|soi|>": 126084, "<|eoi|>": 126085}
#: MMaDA's chat format (its app.py), if the tokenizer has none: LLaDA's with one line break after a header.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n{% endif %}"
)


class MmadaVision(VisionEncoder):
    """Images to the embeddings of their codes, between begin and end tokens.

    ``rows_VD``: the decoder's embeddings of the codes; ``side``: rows, and columns, of an image's codes; ``before`` and
    ``after``: ids before and after them.
    """

    def __init__(
        self,
        encoder: MagvitEncoder,
        rows_VD: Tensor,
        *,
        side: int,
        before: tuple[int, ...],
        after: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.encoder, self.side, self.before, self.after = encoder, side, before, after
        self.rows_VD: Tensor
        self.register_buffer("rows_VD", rows_VD)
        self.tokens_per_image = side * side

    @property
    def resolution(self) -> int:
        """Side of encoded images, in pixels."""
        return self.side * self.encoder.config.stride

    def settings(self) -> Mapping[str, Any]:
        return {
            "processor": {"class": "MMaDA", "resolution": self.resolution},
            "tower": asdict(self.encoder.config),
            "frame": (self.before, self.after),
        }

    def prepare(self, image: Image.Image) -> Prepared:
        """``pixels`` fp32 ``[1, 3, resolution, resolution]``: a centre crop, after resizing the shorter side.

        Values are 0 to 255, which every floating point type represents exactly.
        """
        check_shape(image)
        width, height = image.size
        short, side = min(width, height), self.resolution
        size = (int(side * width / short), int(side * height / short))
        left, top = (round((length - side) / 2) for length in size)
        cut = image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
        return {"pixels": torch.from_numpy(np.array(cut)).permute(2, 0, 1).float()[None]}

    def codes(self, pixels: Tensor) -> Tensor:
        """Codes (int64 ``[B, tokens_per_image]``) of prepared ``pixels``, which are scaled to -1 to 1 for the
        encoder."""
        return self.encoder.codes((pixels.float() / 255 - 0.5) / 0.5)

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        return (self.before, self.tokens_per_image, self.after)

    def encode(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        pixels = torch.cat([one["pixels"] for one in batch])
        patches, view = torch.arange(self.tokens_per_image), GridView(self.side, self.side, {})
        return [
            joined([self.before, Tile(self.rows_VD[codes], patches, view), self.after]) for codes in self.codes(pixels)
        ]


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load ``Gen-Verse/MMaDA-8B-*`` as published; raises ``ConfigError`` naming the key, tensor or file that is wrong.

    Answers are text: the codes of images are banned in them.
    """
    keys = Keys(checkpoint.config, checkpoint.folder / "config.json")
    keys.check({"w_clip_vit": (False, None), "num_new_special_tokens": (0, None)})
    tokenizer = load_tokenizer(checkpoint.folder)
    first = len(tokenizer)  # the first code's id
    codes = range(first, first + keys.integer("codebook_size", default=8192))
    _adapt_template(tokenizer, checkpoint)
    before, after = frame_ids(tokenizer)

    def spec(sources: Sources) -> ModelSpec:
        if codes.stop > sources.config.vocab_size:
            raise ConfigError(
                f"{keys.path}: {len(codes)} codes after {first} tokens of text need {codes.stop} embeddings; "
                f"there are {sources.config.vocab_size}"
            )
        return make_spec(sources, attention=Attention.FULL, mask_id=mask_id_of(sources, MASK), banned=set(codes))

    def vision(decoder: Decoder) -> MmadaVision:
        encoder = load_magvit(_codes_weights(checkpoint, target), target.device)
        if 2**encoder.config.bits != len(codes):
            raise ConfigError(f"{keys.path}: codebook_size = {len(codes)}, but {BESIDE} has {encoder.config.bits} bits")
        rows_VD = decoder.embed.weight.detach()[codes.start : codes.stop]
        return MmadaVision(encoder, rows_VD, side=_side(keys), before=before, after=after)

    return load_family(checkpoint, target, tokenizer, spec, vision)


def _side(keys: Keys) -> int:
    count = keys.integer("num_vq_tokens", default=1024)
    side = math.isqrt(count)
    if side * side != count:
        raise ConfigError(f"{keys.path}: num_vq_tokens = {count} is no square")
    return side


def frame_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the tokens before and after an image's codes; raises ``ConfigError`` if the tokenizer lacks one."""
    ids: dict[str, int] = {}
    for name, reserved in RESERVED.items():
        named = token_id(tokenizer, name)
        if named is None and reserved >= len(tokenizer):
            raise ConfigError(f"the tokenizer has no {name}, and no token {reserved} that MMaDA reserves for it")
        ids[name] = reserved if named is None else named
    return (ids["<|mmu|>"], ids["<|soi|>"]), (ids["<|eoi|>"],)


def _adapt_template(tokenizer: PreTrainedTokenizerFast, checkpoint: Checkpoint) -> None:
    """Adapts the template so that an image precedes the whole chat, whichever message has it; MMaDA supports one."""
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    change_templates(tokenizer, lambda template: _ONE_PICTURE_FIRST + template)
    adapt_chat_template(tokenizer, checkpoint.folder, images=True, videos=False, vicuna=False)


_ONE_PICTURE_FIRST = (
    "{% set seen = namespace(messages=[], images=0) %}{% for message in messages %}{% set text = namespace(value='') %}"
    "{% if message['content'] is string %}{% set text.value = message['content'] %}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{% set seen.images = seen.images + 1 %}"
    "{% elif part['type'] == 'text' %}{% set text.value = text.value + part['text'] %}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% set seen.messages = seen.messages + [{'role': message['role'], 'content': text.value}] %}{% endfor %}"
    "{% if seen.images > 1 %}{{ raise_exception('it takes one image a chat') }}{% endif %}"
    f"{{% if seen.images %}}{IMAGE}{{% endif %}}"
    "{% set messages = seen.messages %}"
)


def _codes_weights(checkpoint: Checkpoint, target: Target) -> Weights:
    folder = checkpoint.folder / BESIDE
    if not (folder / FILE).is_file():
        if not target.hub:
            raise ConfigError(f"{folder} has no {FILE}: put a copy of {CODES} there, which makes codes of pictures")
        folder = download(CODES)
    return Weights(folder, FILE)
