"""Conversion of a byte-level BPE tokenizer to the fields of a GGUF file."""

from __future__ import annotations

import json
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel

#: llama.cpp's name by a part of the pre-tokenizer's pattern, the most specific first.
_PATTERNS = (
    ("\\p{N}{1,3}", "llama-bpe"),
    ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|", "qwen2"),
)
_GPT2 = "gpt-2"  # the default pattern of byte-level pre-tokenizers
_SMOLLM, _DIGITS = "smollm", {"type": "Digits", "individual_digits": True}  # the same after splitting off each digit


def add_tokenizer(writer: Any, model: LoadedModel) -> None:
    """Add the tokenizer of ``model`` to a ``gguf.GGUFWriter``; raises ``ConfigError`` for unsupported kinds."""
    import gguf

    tokenizer: Any = model.tokenizer
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = pre_tokenizer(data)
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    by_id = {number: token for token, number in vocabulary.items()}
    tokens, types = [], []
    for number in range(model.decoder.config.vocab_size):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        if number not in by_id:
            types.append(gguf.TokenType.UNUSED)
        elif number in added:
            types.append(gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
    merges = [each if isinstance(each, str) else " ".join(each) for each in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    spec = model.spec
    writer.add_eos_token_id(spec.padding_id if spec.padding_id is not None else min(spec.end_ids))
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if not spec.causal:
        writer.add_mask_token_id(spec.mask_id)
    writer.add_add_bos_token(False)  # included in chat templates
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer(data: dict[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer of a ``tokenizer.json``; raises ``ConfigError`` if it is not supported."""
    steps = data.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    level = next((step for step in steps if step.get("type") == "ByteLevel"), None)
    if data["model"].get("type") != "BPE" or level is None or data["model"].get("byte_fallback"):
        raise ConfigError("only byte-level BPE tokenizers are written to GGUF files")
    others = [step for step in steps if step.get("type") not in ("Split", "ByteLevel")]
    if not patterns and level.get("use_regex", True) and not level.get("add_prefix_space"):
        if not others:
            return _GPT2
        if others == [_DIGITS]:
            return _SMOLLM
    for piece, name in _PATTERNS:
        if len(patterns) == 1 and not others and piece in patterns[0]:
            return name
    raise ConfigError(f"llama.cpp has no name for the tokenizer's pre-tokenizer {steps!r}")
