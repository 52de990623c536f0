"""A tiny random checkpoint in MMaDA's layout, MAGVIT-v2's tensors beside it, and plain ways through both.

What makes codes is written out from the rules of Gen-Verse/MMaDA's ``modeling_magvitv2.py`` over a dictionary of
tensors, apart from the module under test.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llada_checkpoints import own_config, own_name, tokenizer
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmserve.models.checkpoint import write_checkpoint
from mmserve.reference.tokenizer import BOS, EOS, MASK

BITS, TOKENS, LEVELS = 5, 16, ((32, 1), (64, 2), (64, 1))
SIDE = 16  # pixels of a picture: 4 x 4 codes of 4 x 4 pixels


@cache
def text_tokenizer() -> PreTrainedTokenizerFast:
    """As published: no placeholder of images; the tokens that frame them are among those of the text."""
    spelled = tokenizer().backend_tokenizer.to_str().replace("<image>", "<|mmu|>").replace("<video>", "<|soi|>")
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(spelled), bos_token=BOS, eos_token=EOS, pad_token=EOS, mask_token=MASK
    )
    made.add_special_tokens({"additional_special_tokens": ["<|eoi|>"]})
    return made


def llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(21)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def magvit_tensors() -> dict[str, Tensor]:
    """The encoder's tensors by their published names, and some of those that nobody reads."""
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}

    def convolution(name: str, out: int, width: int, kernel: int) -> None:
        shape = (out, width, kernel, kernel)
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * 1.5 / (width * kernel**2) ** 0.5
        tensors[f"{name}.bias"] = torch.randn(out, generator=generator) * 0.1

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = 0.5 + torch.rand(width, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(width, generator=generator) * 0.1

    def residual(name: str, width: int, out: int) -> None:
        norm(f"{name}.norm1", width)
        convolution(f"{name}.conv1", out, width, 3)
        norm(f"{name}.norm2", out)
        convolution(f"{name}.conv2", out, out, 3)
        if width != out:
            convolution(f"{name}.nin_shortcut", out, width, 1)

    width = LEVELS[0][0]
    convolution("encoder.conv_in", width, 3, 3)
    for level, (out, blocks) in enumerate(LEVELS):
        for block in range(blocks):
            residual(f"encoder.down.{level}.block.{block}", width, out)
            width = out
        if level < len(LEVELS) - 1:
            convolution(f"encoder.down.{level}.downsample.conv", width, width, 3)
    residual("encoder.mid.block_1", width, width)
    norm("encoder.mid.attn_1.norm", width)
    for name in ("q", "k", "v", "proj_out"):
        convolution(f"encoder.mid.attn_1.{name}", width, width, 1)
    residual("encoder.mid.block_2", width, width)
    norm("encoder.norm_out", width)
    convolution("encoder.conv_out", BITS, width, 3)
    convolution("encoder.quant_conv", BITS, BITS, 1)
    convolution("decoder.post_quant_conv", BITS, BITS, 1)
    tensors["quantize.power_vals"] = 2 ** torch.arange(BITS - 1, -1, -1)
    return tensors


def plain_codes(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Codes of one picture, ``x [3, side, side]`` in -1 to 1."""

    def convolution(name: str, x: Tensor, **options: Any) -> Tensor:
        return F.conv2d(x, tensors[f"encoder.{name}.weight"], tensors[f"encoder.{name}.bias"], **options)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, 32, tensors[f"encoder.{name}.weight"], tensors[f"encoder.{name}.bias"], 1e-6)

    def swish(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    def residual(name: str, x: Tensor) -> Tensor:
        h = convolution(f"{name}.conv1", swish(norm(f"{name}.norm1", x)), padding=1)
        h = convolution(f"{name}.conv2", swish(norm(f"{name}.norm2", h)), padding=1)
        short = f"encoder.{name}.nin_shortcut.weight" in tensors
        return (convolution(f"{name}.nin_shortcut", x) if short else x) + h

    x = convolution("conv_in", x[None], padding=1)
    for level, (_width, blocks) in enumerate(LEVELS):
        for block in range(blocks):
            x = residual(f"down.{level}.block.{block}", x)
        if level < len(LEVELS) - 1:
            x = convolution(f"down.{level}.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
    x = residual("mid.block_1", x)
    h = norm("mid.attn_1.norm", x)
    q, k, v = (convolution(f"mid.attn_1.{name}", h).flatten(2)[0] for name in "qkv")  # [C, cells]
    seen = v @ (q.T @ k / len(q) ** 0.5).softmax(-1).T
    x = x + convolution("mid.attn_1.proj_out", seen.view(x.shape))
    x = residual("mid.block_2", x)
    latents = convolution("quant_conv", convolution("conv_out", swish(norm("norm_out", x)), padding=1))[0]
    return sum((latents[bit] > 0).long() * 2 ** (BITS - 1 - bit) for bit in range(BITS)).flatten()  # type: ignore[union-attr,return-value]


def plain_pixels(image: Image.Image) -> Tensor:
    """``image_transform`` of MMaDA's training/utils.py: the shorter side resized, the middle cut, -1 to 1."""
    width, height = image.size
    size = (SIDE, int(SIDE * height / width)) if width <= height else (int(SIDE * width / height), SIDE)
    pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
    top, left = round((size[1] - SIDE) / 2.0), round((size[0] - SIDE) / 2.0)
    cut = torch.from_numpy(pixels[top : top + SIDE, left : left + SIDE]).permute(2, 0, 1) / 255
    return (cut - 0.5) / 0.5


class Mmada:
    """A checkpoint of MMaDA on disk, and the parts that it was written from."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self.first = len(text_tokenizer())  # the first code's id
        self.oracle = llama(self.first + 2**BITS + 7)
        self.codes = magvit_tensors()
        tensors = {own_name(name): t for name, t in self.oracle.state_dict().items()}
        write_checkpoint(folder, self.config(**changes), tensors)
        text_tokenizer().save_pretrained(folder)
        (folder / "magvitv2").mkdir()
        self.write_codes(self.codes)

    def write_codes(self, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self.folder / "magvitv2" / "pytorch_model.safetensors")

    def config(self, **changes: Any) -> dict[str, Any]:
        """``config.json`` with the keys that MMaDA-8B-Base's has beside LLaDA's."""
        vocabulary = self.oracle.config.vocab_size
        own = {
            "architectures": ["MMadaModelLM"],
            "codebook_size": 2**BITS,
            "llm_vocab_size": self.first + 3,
            "model_type": "mmada",
            "new_vocab_size": vocabulary,
            "num_new_special_tokens": 0,
            "num_vq_tokens": TOKENS,
            "tie_word_embeddings": False,
            "w_clip_vit": False,
        }
        return own_config(self.oracle, **own | changes)

    def picture_ids(self, image: Image.Image) -> list[int]:
        """What a picture is in a prompt."""
        front, start, end = text_tokenizer().convert_tokens_to_ids(["<|mmu|>", "<|soi|>", "<|eoi|>"])
        codes = plain_codes(self.codes, plain_pixels(image)) + self.first
        return [front, start, *codes.tolist(), end]
