"""Tiny random DiffusionGemma checkpoints as transformers writes them, and requests to such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Bench, Call
from helpers import ask, tokenizer
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4ImageProcessorPil,
)
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

from mmserve.config import ModelConfig
from mmserve.core.request import Policy, Request
from mmserve.decode.sampler import step_generator
from mmserve.models.base import CanvasModel
from mmserve.models.registry import load_model

LENGTH, STEPS = 8, 6
BEGIN_IMAGE, END_IMAGE = 300, 301
BLOCK = Policy(name="block")


def entropy(**options: float) -> Policy:
    return Policy(name="entropy_bound", options=options)


def gemma(name: str, text: str, **given: Any) -> Request:
    return ask(name, text, recompute=BLOCK, commit=given.pop("commit", entropy()), **given)


def save_gemma(path: Path, spread: float, *, images: bool = False) -> Path:
    """A tiny random checkpoint as transformers writes it, sliding window and experts included.

    ``images``: it says how they are prepared, and the tokens of one see each other.
    """
    text = DiffusionGemmaTextConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=24,
        num_global_key_value_heads=1,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=len(tokenizer()) - 1,
        bos_token_id=2,
        use_bidirectional_attention="vision" if images else None,
    )
    vision = Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    config = DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=LENGTH,
        boi_token_id=BEGIN_IMAGE,
        eoi_token_id=END_IMAGE,
        image_token_id=tokenizer().convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(3)
    network = DiffusionGemmaForBlockDiffusion(config)
    for weight in network.parameters():  # small weights would predict the same everywhere
        if weight.dim() >= 2:
            weight.data *= spread
    network.generation_config.max_denoising_steps = STEPS
    network.save_pretrained(path)
    tokenizer().save_pretrained(path)
    if images:
        Gemma4ImageProcessorPil(max_soft_tokens=70).save_pretrained(path)
    return path


def load_gemma(folder: Path, *, same_bits: bool = False) -> CanvasModel:
    """The served model of a checkpoint.

    ``same_bits``: with transformers' own experts, so that alone it says to the last bit what transformers says: over
    many steps a model that babbles makes another answer of one bit.
    """
    model = load_model(ModelConfig(path=str(folder), device="cpu"))
    assert isinstance(model, CanvasModel)
    if same_bits:
        model.network.network.set_experts_implementation("grouped_mm")  # type: ignore[attr-defined]
    return model


def transformers_own(folder: Path) -> Any:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def prompt_of(bench: Bench, text: str) -> list[int]:
    [encoded] = bench.engine.stages.encoder.encode([gemma("x", text)])
    return encoded.ids.tolist()


def row_of(bench: Bench, call: Call) -> list[int]:
    prompt = call.finished().usage.prompt_tokens
    return bench.canvases[call.request.id][0][prompt:].tolist()


def watched(bench: Bench) -> Bench:
    """Keeps each request's row as it was after its latest step; what is final must stay."""
    commit = bench.engine.stages.decoder.commit

    def kept(d: Any) -> Any:
        outcome = commit(d)
        tokens, at = d.canvas.tokens.copy(), d.canvas.committed_at.copy()
        before = bench.canvases.get(d.request.id)
        if before is not None:
            final = before[1] < 1 << 30
            assert np.array_equal(tokens[final], before[0][final]) and np.array_equal(at[final], before[1][final])
        bench.canvases[d.request.id] = tokens, at
        return outcome

    bench.engine.stages.decoder.commit = kept
    return bench


def expected(oracle: Any, prompt: list[int], new: int, seed: int, monkeypatch: Any, **given: Any) -> tuple[list, int]:
    """What transformers' ``generate`` gives where each step's random numbers are the server's; its passes too."""
    passes, place = 0, len(prompt)
    begin, step = oracle._prepare_denoiser_inputs, oracle._denoising_step

    def seeded(number: int) -> None:
        torch.set_rng_state(step_generator(seed, number, torch.device("cpu")).get_state())

    def begun(**kwargs: Any) -> Any:
        nonlocal place
        seeded(-place)
        place += LENGTH
        return begin(**kwargs)

    def stepped(**kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        seeded(passes)
        return step(**kwargs)

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)  # imports a compiler for nothing
    monkeypatch.setattr(oracle, "_prepare_denoiser_inputs", begun)
    monkeypatch.setattr(oracle, "_denoising_step", stepped)
    state = torch.get_rng_state()
    row = oracle.generate(torch.tensor([prompt]), max_new_tokens=new, **given).sequences[0, len(prompt) :]
    torch.set_rng_state(state)
    monkeypatch.undo()
    return row.tolist(), passes
