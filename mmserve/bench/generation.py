"""Whole answers of a diffusion model compared with llama.cpp's generation loop, on the same weights.

That loop (``examples/diffusion`` in llama.cpp) runs the prompt and the whole canvas in each step and commits the most
confident tokens; it is reimplemented here with ``LlamaCpp``'s passes, with one token a step and blocks, as in LLaDA's
own code. The other side is this engine with the model's default policies. Both answer the bundled models' sums, in
turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from mmserve.bench.in_process import ask_all, torch_threads
from mmserve.bench.llama_cpp import LlamaCpp
from mmserve.bench.measures import Figures, Progress, rotated, times_others
from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.request import Diffusion, Message, Request, Sampling, TextPart
from mmserve.engine.engine import Engine
from mmserve.export.gguf import TYPES, write_gguf
from mmserve.models.base import LoadedModel
from mmserve.reference.evaluate import canvas, item
from mmserve.reference.tasks import correct
from mmserve.settle import settle

#: The task, and tokens of a block in LLaDA's loop.
TASK, BLOCK = "arithmetic", 32


def generation_rows(
    model: LoadedModel, config: EngineConfig, limit: int, threads: int, progress: Progress
) -> Iterator[Figures]:
    """A row for each engine: seconds an answer (median), share of correct answers, and the ratio of its time to the
    other engine's (median over answers). ``model`` must be in fp32; the engine packs it afterwards."""
    questions = [item(TASK, index, 0)[1] for index in range(limit)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, torch_threads(threads):
        files = {kind: Path(folder) / f"{kind}.gguf" for kind in TYPES}
        for kind, path in files.items():
            write_gguf(model, path, kind)
        engine = Engine(model, config, MediaConfig())
        engine.start()
        stack.callback(engine.stop)
        settle()
        asked = [_request(engine, index, question.text) for index, question in enumerate(questions)]
        prompts = [encoded.ids.tolist() for encoded in engine.stages.encoder.encode(asked)]
        positions = max(map(len, prompts)) + canvas(TASK)
        theirs = {
            kind: stack.enter_context(closing(LlamaCpp(path, positions, causal=False, threads=threads)))
            for kind, path in files.items()
        }

        def ours(index: int) -> str:
            [answer] = ask_all(engine, [_request(engine, time.monotonic_ns(), questions[index].text)])
            return answer.whole().text

        runs: dict[str, Callable[[int], str]] = {"mmserve": ours}
        for kind, its in theirs.items():
            runs[f"llama.cpp {kind}"] = partial(_theirs, its, model, prompts)
        for run in runs.values():  # warm-up
            run(0)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        right = dict.fromkeys(runs, 0)
        for index, question in enumerate(questions):
            if index % 10 == 0:
                progress(f"whole answers: {index} of {limit}")
            for name in rotated(runs, index):
                begun = time.perf_counter()
                text = runs[name](index)
                seconds[name].append(time.perf_counter() - begun)
                right[name] += correct(question, text)
    for name, taken in seconds.items():
        yield {
            "measured": f"{name}: {limit} sums, {canvas(TASK)} tokens each, {threads} threads",
            "engine": name,
            "seconds": round(statistics.median(taken), 4),
            "right": round(right[name] / limit, 4),
            **times_others(name, seconds),
        }


def _theirs(engine: LlamaCpp, model: LoadedModel, prompts: list[list[int]], index: int) -> str:
    return generated(engine, model, prompts[index])


def generated(engine: LlamaCpp, model: LoadedModel, prompt: list[int]) -> str:
    """The answer to ``prompt`` (token ids): each step commits the most confident masked position of the first open
    block."""
    spec, size = model.spec, canvas(TASK)
    assert spec.mask_id is not None
    ids = np.array([*prompt, *[spec.mask_id] * size])
    for start in range(len(prompt), len(ids), BLOCK):
        for _ in range(start, min(start + BLOCK, len(ids))):
            places = start + np.flatnonzero(ids[start : start + BLOCK] == spec.mask_id)
            logits = engine.logits(ids.tolist())[places]
            logits[:, list(spec.banned_ids)] = -np.inf
            best = logits.argmax(-1)
            total = np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)  # 1 / probability of the top-1 token
            chosen = int(total.argmin())
            ids[places[chosen]] = best[chosen]
    answer = ids[len(prompt) :].tolist()
    ends = [at for at, token in enumerate(answer) if token in spec.end_ids]
    return str(model.tokenizer.decode(answer[: ends[0]] if ends else answer, skip_special_tokens=True))


def _request(engine: Engine, number: int, text: str) -> Request:
    assert engine.info.tuning is not None
    policies = engine.info.tuning.default
    return Request(
        id=f"sum-{number}",
        model=engine.info.name,
        messages=(Message("user", (TextPart(text),)),),
        sampling=Sampling(temperature=0.0, max_new_tokens=canvas(TASK)),
        diffusion=Diffusion(recompute=policies.recompute, commit=policies.commit),
    )
