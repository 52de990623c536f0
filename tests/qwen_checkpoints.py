"""Tiny random Qwen2 and Qwen3 models of transformers, and a tokenizer in the files that Qwen's family comes with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import blank, tokenizer
from llama_checkpoints import HIDDEN, ROWS
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mmserve.decode.forward import Pass, forward
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import write_checkpoint, write_json
from mmserve.reference.tokenizer import EOS

Qwen = Qwen2ForCausalLM | Qwen3ForCausalLM
IM_START, IM_END, MASK_TOKEN = "<|im_start|>", "<|im_end|>", "<|mask|>"
#: ChatML as Qwen2.5 has it: it takes a message's content as plain text.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: What a model predicts depends on the mask token too: it is the last row but one of the embeddings.
MASK_ID = ROWS - 2
KINDS = ("qwen2", "qwen3")
#: Of Fast-dLLM v2; the last token of its tokenizer.
FAST_MASK_TOKEN = "|<MASK>|"


def qwen(kind: str, heads: int = 4, kv_heads: int = 2, **options: Any) -> Qwen:
    """A random model whose tokens depend on what surrounds them: the initialisation is wide; biases are not zero."""
    torch.manual_seed(heads * 10 + kv_heads)
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": ROWS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "initializer_range": 0.3,
        "eos_token_id": tokenizer().convert_tokens_to_ids(EOS),
        "attn_implementation": "eager",
        **({"head_dim": 12} if kind == "qwen3" else {}),
        **options,
    }
    config, model = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    made = model(config(**values)).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return made


def ids(length: int = 19, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, ROWS, (rows, length), generator=torch.Generator().manual_seed(3))


def save_tokenizer_as_vocabulary(folder: Path) -> dict[str, int]:
    """Write ``vocab.json``, ``merges.txt`` and ``tokenizer_config.json`` as Dream has them; ids of the added tokens."""
    model = json.loads(tokenizer().backend_tokenizer.to_str())["model"]
    first = len(tokenizer())
    added = {token: first + i for i, token in enumerate((IM_START, IM_END, MASK_TOKEN))}
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text("\n".join(("#version: 0.2", *pairs, "")))
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {"content": t, "special": True, **flags} for t, i in added.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": None,
        "chat_template": CHATML,
        "eos_token": EOS,
        "mask_token": MASK_TOKEN,
        "pad_token": EOS,
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", config)
    return added


def save_dream(oracle: Qwen, folder: Path) -> Path:
    """A checkpoint with the keys of ``Dream-org/Dream-v0-Instruct-7B``'s ``config.json``, and Qwen2.5's tensors."""
    c = oracle.config
    config = {
        "architectures": ["DreamModel"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
        "bos_token_id": c.eos_token_id,
        "eos_token_id": c.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "mask_token_id": MASK_ID,
        "max_position_embeddings": 131_072,
        "max_window_layers": 28,
        "model_type": "Dream",
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "pad_token_id": c.eos_token_id,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": c.vocab_size,
    }
    write_checkpoint(folder, config, dict(oracle.state_dict()), shard_bytes=60_000)
    tokenizer().save_pretrained(folder)
    return folder


def save_sdar(oracle: Qwen, folder: Path, **changes: Any) -> Path:
    """A checkpoint with the keys of ``JetLM/SDAR-1.7B-Chat``'s ``config.json``, and Qwen3's tensors."""
    c = oracle.config
    config = {
        "architectures": ["SDARForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig", "AutoModel": "modeling_sdar.SDARForCausalLM"},
        "eos_token_id": c.eos_token_id,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "mask_token_id": MASK_ID,
        "max_position_embeddings": 32_768,
        "max_window_layers": 28,
        "model_type": "sdar",
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": c.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": c.vocab_size,
        **changes,
    }
    tensors = dict(oracle.state_dict())
    if c.tie_word_embeddings:
        del tensors["lm_head.weight"]
    write_checkpoint(folder, config, tensors, shard_bytes=60_000)
    tokenizer().save_pretrained(folder)
    return folder


def save_fast_dllm(oracle: Qwen, folder: Path, **changes: Any) -> Path:
    """A checkpoint with the keys of ``Efficient-Large-Model/Fast_dLLM_v2_7B``'s ``config.json``, and Qwen2.5's tensors.

    No key names its mask: the tokenizer has it, after the others.
    """
    c = oracle.config
    config = {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
            "AutoModel": "modeling.Fast_dLLM_QwenModel",
            "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
        },
        "bd_size": 32,
        "bos_token_id": c.eos_token_id,
        "conplemenrary_mask": True,
        "eos_token_id": c.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "max_position_embeddings": 32_768,
        "max_window_layers": 28,
        "model_type": "Fast_dLLM_Qwen",
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "pad_token_id": c.eos_token_id,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": c.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": c.vocab_size,
        **changes,
    }
    tensors = dict(oracle.state_dict())
    if c.tie_word_embeddings:
        del tensors["lm_head.weight"]
    write_checkpoint(folder, config, tensors, shard_bytes=60_000)
    tok = copy.deepcopy(tokenizer())
    tok.add_special_tokens({"additional_special_tokens": [FAST_MASK_TOKEN]})
    tok.chat_template = CHATML
    tok.save_pretrained(folder)
    return folder


def block_mask(length: int, block: int) -> torch.Tensor:
    """What transformers adds to the scores, fp32 ``[1, 1, length, length]``: a position sees to its block's end."""
    blocks = torch.arange(length) // block
    seen = blocks[:, None] >= blocks[None, :]
    return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def store_logits(model: LoadedModel, rows: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """Logits ``[B, T, V]`` through the paged store, in one pass or in several that end at ``cuts``."""
    count, length = rows.shape
    pages, size = -(-length // 5), 5
    config = model.decoder.config
    store = KVStore(config, pages=count * pages, page_size=size, dtype=model.dtype, device=model.device)
    for tensor in (*store.keys, *store.values):
        tensor.fill_(torch.nan)
    out: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for start, end in zip((0, *cuts), (*cuts, length), strict=True):
        here = np.arange(start, end)
        batch = [
            Pass(
                canvas=blank(1, length - 1, 4),
                pages=np.arange(r, count * pages, count),
                embeddings=model.decoder.embed(rows[r]),
                rows=here,
                targets=here,
                wanted=here,
                visible=end,
            )
            for r in range(count)
        ]
        for logits, pieces in zip(forward(model, store, batch, 8), out, strict=True):
            pieces += logits.slices()
    return torch.stack([torch.cat(pieces) for pieces in out])
