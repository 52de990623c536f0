"""dKV-Cache-Decode on a model with shifted logits, token for token against the rule of its authors' code for Dream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench
from helpers import ask, dkv
from llama_checkpoints import load
from qwen_checkpoints import MASK_ID, Qwen, qwen, save_dream
from test_masked_families import TEXTS, answer, endless, prompt_of
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb, repeat_kv

from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]


class CachedQwen:
    """Qwen2 layers over one sequence, full attention, with keys and values of some positions read from a cache."""

    def __init__(self, oracle: Qwen) -> None:
        self.oracle = oracle
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # (layer, position) → rotated K, V

    def run(self, row: torch.Tensor, read: set[int], keep: set[int]) -> torch.Tensor:
        """Logits ``[len(row), V]``, NaN for positions of ``read``; afterwards the cache holds those of ``keep``."""
        model, size = self.oracle.model, len(row)
        run = [p for p in range(size) if p not in read]
        at = torch.tensor(run)
        x = model.embed_tokens(row[at])[None]
        cos, sin = model.rotary_emb(x, at[None])
        kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for n, layer in enumerate(model.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(normed).view(1, len(run), -1, attention.head_dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            fresh = {p: (k[0, :, i], v[0, :, i]) for i, p in enumerate(run)}
            seen = [fresh[p] if p in fresh else self.cache[n, p] for p in range(size)]
            keys, values = (torch.stack([pair[i] for pair in seen], 1)[None] for i in (0, 1))
            keys, values = (repeat_kv(t, attention.num_key_value_groups) for t in (keys, values))
            weights = (q @ keys.transpose(2, 3) * attention.scaling).softmax(-1)
            x = x + attention.o_proj((weights @ values).transpose(1, 2).reshape(1, len(run), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            kept |= {(n, p): seen[p] for p in keep}
        self.cache = kept
        logits = torch.full((size, self.oracle.config.vocab_size), torch.nan)
        logits[at] = self.oracle.lm_head(model.norm(x))[0]
        return logits


@torch.no_grad()
def dream_dkv(oracle: Qwen, prompt: list[int], new: int, every: int) -> tuple[list[int], list[int]]:
    """``cache_type="decoded"``, ``shift_type="un_right"``, ``maskgit_plus`` with one token a step, in one block: the
    answer, and how many positions each step ran (horseee/dKV-Cache at 49a76fc, dream_generation_utils.py).

    A step saves the positions that were to be cached before it, and reads those that the step before saved, except
    every ``every`` steps, when it reads none. Before the first step those are the prompt's but for its last; after
    each, those that are known beside a known right neighbour; the last position goes with the pair that it ends.
    """
    row = torch.tensor(prompt + [MASK_ID] * new)
    model = CachedQwen(oracle)
    saved: set[int] = set()
    to_save = set(range(len(prompt) - 1))
    ran: list[int] = []
    for step in range(new):
        read = saved if step % every else set()
        logits = model.run(row, read, to_save)
        ran.append(len(row) - len(read))
        open_ = (row == MASK_ID).nonzero()[:, 0]
        predicting = logits[open_ - 1]
        assert not predicting.isnan().any(), "a masked position's left neighbour is always run"
        confidence, token = chosen(predicting)
        best = int(confidence.argmax())
        row[open_[best]] = token[best]
        known = (row != MASK_ID).tolist()
        saved, to_save = to_save, {p for p in range(len(row) - 1) if known[p] and known[p + 1]}
        if known[-2] and known[-1]:
            to_save.add(len(row) - 1)
    return row[len(prompt) :].tolist(), ran


def chosen(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row that is not the mask, and its probability among all tokens, the mask with them."""
    probabilities = logits.double().softmax(-1)
    probabilities[:, MASK_ID] = 0
    return probabilities.max(-1)


@pytest.fixture(scope="module")
def oracle() -> Qwen:
    return qwen("qwen2")


@pytest.fixture(scope="module")
def dream(oracle: Qwen, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return endless(load(save_dream(oracle, tmp_path_factory.mktemp("dream"))))


def test_a_cached_dream_gives_the_tokens_and_runs_the_positions_of_its_authors_code(
    bench: Make, dream: LoadedModel, oracle: Qwen
) -> None:
    b = bench(dream, stages="inline")
    exact: dict[str, list[int]] = {}
    differ: list[Any] = []
    for every in (1, 2, 5, 100):
        for text in TEXTS:
            expected, ran = dream_dkv(oracle, prompt_of(b, text), 18, every)
            [call] = b.submit(ask(f"{every} {text}", text, max_new_tokens=18, block=18, recompute=dkv(every)))
            assert answer(b, call) == expected, (every, text)
            assert call.finished().recomputed_tokens == sum(ran)
            differ.append(exact.setdefault(text, expected) != expected)
    assert any(differ), "a cache that changes nothing is never read"


def test_the_prompt_is_read_from_the_second_step_on(bench: Make, dream: LoadedModel) -> None:
    b = bench(dream, stages="inline")
    done = b.ask(ask("one", "what is left of it? " * 4, max_new_tokens=2, block=2, recompute=dkv(8)))
    prompt = done.usage.prompt_tokens
    assert done.recomputed_tokens == (prompt + 2) + 3  # the prompt's last row predicts the first of the answer
