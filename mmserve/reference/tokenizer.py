"""The bundled model's tokenizer: byte-level BPE holding every byte, digits one by one, with LLaDA's special tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmserve.models.chat import IMAGE, TOOLS_TEMPLATE, VIDEO
from mmserve.reference.items import TRAIN_SEEDS
from mmserve.reference.tasks import TASKS, sample

BOS, EOS, EOT, MASK = "<|startoftext|>", "<|endoftext|>", "<|eot_id|>", "<|mdm_mask|>"
HEADER, HEADER_END = "<|start_header_id|>", "<|end_header_id|>"
SPECIALS = (BOS, EOS, EOT, MASK, HEADER, HEADER_END, IMAGE, VIDEO)
VOCAB_SIZE = 640


def _corpus(lines: int) -> Iterator[str]:
    rng = random.Random(TRAIN_SEEDS[0])
    tasks = tuple(TASKS)
    for index in range(lines):
        _thing, question = sample(tasks[index % len(tasks)], rng)
        yield question.text
        yield question.answer
    yield from ("user", "assistant", "system") * lines


def train_tokenizer(*, lines: int = 3000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on generated questions and answers; the same call always gives the same tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_corpus(lines), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TOOLS_TEMPLATE
    return tokenizer


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Id of one special token."""
    found = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int):
        raise ValueError(f"the tokenizer has no token {token!r}")
    return found


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template into ``folder``."""
    tokenizer.save_pretrained(folder)
