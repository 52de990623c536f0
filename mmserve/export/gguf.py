"""Export of a loaded model's decoder as a GGUF file for llama.cpp: LLaDA, Dream, LLaMA, Mistral, Qwen2 and Qwen3.

For LLaDA-V and LLaVA checkpoints in LLaVA's own layout, only the decoder is written: the file supports text, not
images.

Tensors are fp32, or q8_0 if their rows consist of whole blocks. llama.cpp rotates adjacent pairs in LLaMA and LLaDA,
while checkpoints (and ``Decoder``) rotate halves, so rows of queries and keys are reordered for these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mmserve.errors import ConfigError
from mmserve.export.gguf_tokenizer import add_tokenizer
from mmserve.models.base import LoadedModel
from mmserve.models.decoder_config import DecoderConfig

#: Types of a file's matrices, by their names on the command line.
TYPES = ("f32", "q8_0")
_BLOCK = 32  # number of weights of a row that share a scale in q8_0


@dataclass(frozen=True)
class Form:
    """llama.cpp's form of a model: its architecture name, and whether adjacent pairs are rotated."""

    name: str
    pairs: bool
    diffusion: bool = False


#: Form by ``model_type``.
FORMS = {
    "Dream": Form("dream", pairs=False, diffusion=True),
    "llada": Form("llada", pairs=True, diffusion=True),
    "llama": Form("llama", pairs=True),
    "llava_llada": Form("llada", pairs=True, diffusion=True),
    "llava_llama": Form("llama", pairs=True),
    "mistral": Form("llama", pairs=True),
    "qwen2": Form("qwen2", pairs=False),
    "qwen3": Form("qwen3", pairs=False),
}
_OUTER = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attn_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(model: LoadedModel, path: Path, kind: str = "f32") -> None:
    """Write ``model`` to ``path`` with its tokenizer; ``kind``: the type of its matrices, one of ``TYPES``.

    Raises ``ConfigError`` with the reason for a model that llama.cpp does not support.
    """
    form = form_of(model)
    import gguf  # an optional dependency: not required by the checks above

    config = model.decoder.config
    writer = gguf.GGUFWriter(path, form.name)
    writer.add_name(model.spec.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.ALL_F32)
    _add_dimensions(writer, config)
    if form.diffusion:
        writer.add_causal_attention(False)
        writer.add_diffusion_shift_logits(bool(model.spec.logit_shift))
    add_tokenizer(writer, model)
    for name, tensor in model.decoder.state_dict().items():
        if name == "head.weight" and config.tie_embeddings:
            continue
        array = _array(name, tensor, config, pairs=form.pairs)
        if kind == "q8_0" and array.ndim == 2 and array.shape[1] % _BLOCK == 0:
            quantised = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def form_of(model: LoadedModel) -> Form:
    """llama.cpp's form of ``model``; raises ``ConfigError`` with the reason if it is not supported."""
    form, config = FORMS.get(model.spec.architecture), model.decoder.config
    if form is None:
        raise ConfigError(f"{model.spec.architecture!r} is not written as GGUF; written are {', '.join(FORMS)}")
    plain = DecoderConfig(
        **{field: getattr(config, field) for field in _DIMENSIONS},
        tie_embeddings=config.tie_embeddings,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
    )
    differ = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(plain, f.name)]
    if differ:
        raise ConfigError(f"{model.spec.name!r} is not written as GGUF: its {', '.join(differ)} is not the usual one")
    if config.qk_norm != (form.name == "qwen3") or (config.qkv_bias and form.name not in ("qwen2", "dream", "llama")):
        raise ConfigError(f"{model.spec.name!r} is not written as GGUF: llama.cpp's {form.name!r} has other layers")
    return form


_DIMENSIONS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("rope_theta", "rms_norm_eps", "max_positions"),
)


def gguf_name(parameter: str) -> str:
    """The name in a GGUF file of a parameter of ``Decoder``."""
    module, _, leaf = parameter.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{leaf}"
    _layers, number, inner = module.split(".")
    return f"blk.{number}.{_LAYER[inner]}.{leaf}"


def _add_dimensions(writer: Any, config: DecoderConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _array(name: str, tensor: Tensor, config: DecoderConfig, *, pairs: bool) -> np.ndarray:
    tensor = tensor.detach().float().cpu()
    if pairs and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
        halves = tensor.unflatten(0, (heads, 2, -1))  # [heads, half, frequency, ...]
        tensor = halves.transpose(1, 2).flatten(0, 2)
    array: np.ndarray = tensor.contiguous().numpy()
    return array
