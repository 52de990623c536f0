"""The forward pass compared with llama.cpp's, on the same weights: a row without cached K/V, logits of all positions.

This engine in fp32, int8 and int4, llama.cpp in fp32 (attention and K/V, too) and q8_0, in turns, so that noise affects
all equally.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmserve.bench.in_process import torch_threads
from mmserve.bench.llama_cpp import LlamaCpp, library
from mmserve.bench.measures import Figures, Progress, in_turns, times_others
from mmserve.errors import ConfigError
from mmserve.export.gguf import TYPES, form_of, write_gguf
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import dense_attention
from mmserve.models.packed import pack
from mmserve.models.quantized import MADE, quantize, why_not

POSITIONS, THREADS = (64, 256, 1024), (1, 2)
#: Maximum difference between the logits of the fp32 passes.
MOST_APART = 5e-3


def missing(model: LoadedModel) -> str:
    """Why ``model`` cannot be run in llama.cpp here; "" = it can."""
    for package in ("gguf", "xllamacpp"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install {package}"
    if library() is None:
        return "xllamacpp holds no library"
    if model.spec.causal:
        return "next-token models run there with a K/V cache, which is not measured here"
    try:
        form_of(model)
    except ConfigError as error:
        return str(error)
    return ""


def pass_rows(
    model: LoadedModel,
    repeats: int,
    progress: Progress,
    *,
    positions: tuple[int, ...] = POSITIONS,
    threads: tuple[int, ...] = THREADS,
) -> Iterator[dict[str, Any]]:
    """A row for each number of threads and positions, and each engine: passes a second (medians over the rounds), the
    minimum CPU time of a pass, which is least affected by other load, and the maximum difference of the logits of the
    two fp32 passes. ``model`` must be in fp32 and not packed."""
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}.gguf" for kind in TYPES}
        for kind, path in files.items():
            write_gguf(model, path, kind)
        decoders = _decoders(model)
        for count in threads:
            with torch_threads(count):
                for length in (each for each in positions if each <= model.spec.max_tokens):
                    progress(f"passes of {length} positions on {count} threads")
                    yield from _measured(model, decoders, files, length, count, repeats)


def _decoders(model: LoadedModel) -> Figures:
    made = {"f32": copy.deepcopy(model.decoder)}
    pack(made["f32"])
    for kind in MADE:
        if not why_not(torch.device("cpu"), kind):
            made[kind] = copy.deepcopy(model.decoder)
            quantize(made[kind], kind)
    return made


def _measured(
    model: LoadedModel, decoders: dict[str, Any], files: dict[str, Path], length: int, threads: int, repeats: int
) -> Iterator[dict[str, Any]]:
    ids = torch.randint(0, model.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None] if model.spec.causal else None

    def ours(decoder: Any) -> np.ndarray:
        with torch.inference_mode():
            states = decoder(decoder.embed(ids), torch.arange(length)[None], dense_attention(seen))
            logits: np.ndarray = decoder.logits(states)[0].float().numpy()
        return logits

    with ExitStack() as stack:
        theirs = {
            kind: stack.enter_context(closing(LlamaCpp(path, length, causal=model.spec.causal, threads=threads)))
            for kind, path in files.items()
        }
        row = ids[0].tolist()
        apart = float(np.abs(ours(decoders["f32"]) - theirs["f32"].logits(row)).max())
        passes: dict[str, Callable[[], object]] = {
            **{f"mmserve {kind}": partial(ours, d) for kind, d in decoders.items()},
            **{f"llama.cpp {kind}": partial(e.run, row) for kind, e in theirs.items()},
        }
        seconds: dict[str, list[float]] = {name: [] for name in passes}
        least = dict.fromkeys(passes, float("inf"))
        for repeat, name in in_turns(passes, repeats + 1):
            begun, spent = time.perf_counter(), time.process_time()
            passes[name]()
            if repeat:  # the first round is a warm-up
                seconds[name].append(time.perf_counter() - begun)
                least[name] = min(least[name], time.process_time() - spent)
    for name, taken in seconds.items():
        yield {
            "measured": f"{name}, {length} positions, {threads} threads",
            "engine": name,
            "positions": length,
            "threads": threads,
            "passes_per_second": round(1 / statistics.median(taken), 2),
            "processor_ms": round(1000 * least[name], 2),
            "logits_apart": apart,
            "near": apart <= MOST_APART,
            **times_others(name, seconds),
        }
