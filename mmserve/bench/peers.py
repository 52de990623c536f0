"""Next-token decoding compared with other engines: ``mmserve bench peers``.

The same prompts with greedy decoding and equal answer lengths, in this project's engine (including admission,
scheduling, stages and events), transformers' ``generate`` and, if an interpreter that has it is given, vLLM. The
engines take turns at each batch size, so that noise affects all equally. Without ``--model`` a random LLaMA of 15 M
parameters is created (32,000 tokens, 288 wide, 6 layers, tied embeddings). For a diffusion model, forward passes are
compared with llama.cpp's, if ``xllamacpp`` and ``gguf`` are installed (``passes.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mmserve.bench import vllm_peer
from mmserve.bench.generation import generation_rows
from mmserve.bench.in_process import ask_all
from mmserve.bench.measures import Figures, Progress, in_turns, quartiles, times_others
from mmserve.bench.passes import missing, pass_rows
from mmserve.bench.settings import measured_config
from mmserve.config import EngineConfig, MediaConfig, resolve
from mmserve.core.events import Finished
from mmserve.core.request import Diffusion, Message, Policy, Request, Sampling, Streaming, TextPart
from mmserve.engine.engine import Engine
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.names import shipped_folder
from mmserve.models.registry import load_model, model_folder
from mmserve.settle import settle

NEW_TOKENS = 48
BATCHES = (1, 4, 16)


class Peer(Protocol):
    """An engine to compare."""

    def tokens(self, count: int) -> list[list[int]]:
        """The token ids of the answers to the first ``count`` prompts, as one batch."""
        ...

    def answer(self, count: int) -> tuple[float, Sequence[object]]:
        """Seconds for the first ``count`` prompts as one batch, and each answer in the engine's native form.

        That is text or token ids, without log-probabilities, which take time.
        """
        ...


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each batch size and engine: milliseconds a token (median and quartiles over the rounds)."""
    threads = arguments.threads
    torch.set_num_threads(threads)
    settings = measured_config(arguments)
    with ExitStack() as stack:
        path = settings.models[0].path
        if not arguments.model:
            path = str(random_llama(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        model = load_model(replace(settings.models[0], path=path))
        if not isinstance(model, LoadedModel):
            raise ConfigError(f"{model.spec.name!r} has a network of its own: bench peers takes none")
        absent = {} if not (why := missing(model)) else {"llama.cpp": why}
        passes = [] if absent else list(pass_rows(model, arguments.repeats, progress))
        if not model.spec.causal:
            if absent:
                raise ConfigError(f"{model.spec.name!r} is no next-token model, and llama.cpp: {why}")
            answers: list[Figures] = []
            if model_folder(path) == shipped_folder("bundled"):  # trained on the sums that are asked
                config = resolve(replace(settings.engine, torch_threads=threads))
                answers = list(generation_rows(model, config, arguments.limit, threads, progress))
            return {
                "rows": passes + answers,
                "settings": {"model": model.spec.name, "parameters": model.parameters},
            }
        config = resolve(replace(settings.engine, torch_threads=threads))
        ours = stack.enter_context(_ours(model, config, max(BATCHES)))
        folder = model_folder(path)
        engines: dict[str, Peer] = {
            "mmserve": ours,
            "transformers": Transformers(folder, model.dtype, ours.prompts, model.spec.banned_ids),
        }
        versions = {"transformers": version("transformers")}
        if arguments.vllm_python is not None:
            vllm = stack.enter_context(_vllm(arguments.vllm_python, folder, model.dtype, ours.prompts, threads))
            engines["vllm"], versions["vllm"] = vllm, vllm.version
        else:
            absent["vllm"] = "name an interpreter that has it: --vllm-python"
        rows = [row for size in BATCHES for row in _measured(engines, size, arguments.repeats, progress)]
        rows += passes
    return {
        "rows": rows,
        "settings": {
            "model": model.spec.name,
            "parameters": model.parameters,
            "dtype": str(model.dtype).removeprefix("torch."),
            "new_tokens": NEW_TOKENS,
            "prompt_tokens": [len(ids) for ids in ours.prompts],
            "torch_threads": threads,
            "stages": config.stages,
            "repeats": arguments.repeats,
            "versions": versions,
            "missing": absent,
        },
    }


def _measured(engines: dict[str, Peer], size: int, repeats: int, progress: Progress) -> Iterator[Any]:
    """The rows of one batch size; ``times_X`` is the median over rounds of the ratio of the engine's time to X's."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    tokens = {name: engine.tokens(size) for name, engine in engines.items()}
    answers = {name: engine.answer(size)[1] for name, engine in engines.items()}  # warm-up
    for repeat, name in in_turns(engines, repeats):
        progress(f"batch {size}: round {repeat + 1} of {repeats}, {name}")
        seconds, again = engines[name].answer(size)
        times[name].append(1000 * seconds / (size * NEW_TOKENS))
        if again != answers[name]:
            raise RuntimeError(f"{name} gave other answers to the same prompts")
    for name in engines:
        low, middle, high = quartiles(times[name])
        yield {
            "measured": f"{name} at {size}",
            "engine": name,
            "batch": size,
            "ms_per_token": round(middle, 3),
            "ms_per_token_quartiles": [round(low, 3), round(high, 3)],
            "same_tokens": round(_agreement(tokens["mmserve"], tokens[name]), 4),
            **times_others(name, times),
        }


def _agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of equal answers, compared token by token."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


class Ours:
    """This project's engine, called as its gRPC service calls it."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine, self._asked = engine, 0
        requests = [self._request(index) for index in range(count)]
        self.prompts: list[list[int]] = [encoded.ids.tolist() for encoded in engine.stages.encoder.encode(requests)]

    def _request(self, index: int, *, tokens: bool = False) -> Request:
        self._asked += 1
        words = " ".join(f"{word} {index}" for word in ("circle", "square", "red", "left of", "green"))
        return Request(
            id=f"{index}-{self._asked}",
            model=self._engine.info.name,
            messages=(Message("user", (TextPart(words),)),),
            sampling=Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS),
            diffusion=Diffusion(recompute=Policy(name="last")),
            streaming=Streaming(tokens=tokens),
        )

    def tokens(self, count: int) -> list[list[int]]:
        _seconds, ended = self._ask([self._request(index, tokens=True) for index in range(count)])
        return [[token.id for token in event.tokens] for event in ended]

    def answer(self, count: int) -> tuple[float, list[str]]:
        seconds, ended = self._ask([self._request(index) for index in range(count)])
        return seconds, [event.text for event in ended]

    def _ask(self, requests: list[Request]) -> tuple[float, list[Finished]]:
        begun = time.perf_counter()
        answers = ask_all(self._engine, requests)
        seconds = time.perf_counter() - begun
        return seconds, [answer.whole() for answer in answers]


@contextmanager
def _ours(model: LoadedModel, config: EngineConfig, count: int) -> Iterator[Ours]:
    engine = Engine(model, config, MediaConfig())
    engine.start()
    settle()
    try:
        yield Ours(engine, count)
    finally:
        engine.stop()


class Transformers:
    """transformers' own greedy ``generate`` on the same ids, padded on the left if prompts differ in length."""

    def __init__(self, folder: Path, dtype: torch.dtype, prompts: list[list[int]], banned: Sequence[int]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._prompts, self._banned = prompts, list(banned) or None

    def tokens(self, count: int) -> list[list[int]]:
        return self.answer(count)[1]

    @torch.inference_mode()
    def answer(self, count: int) -> tuple[float, list[list[int]]]:
        prompts = self._prompts[:count]
        longest = max(map(len, prompts))
        begun = time.perf_counter()
        made = self._model.generate(
            input_ids=torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            suppress_tokens=self._banned,
        )
        seconds = time.perf_counter() - begun
        return seconds, made[:, longest:].tolist()


class Vllm:
    """vLLM in a separate process (``vllm_peer.py``), which measures its own time."""

    def __init__(self, process: subprocess.Popen[str], prompts: list[list[int]]) -> None:
        self._process, self._prompts = process, prompts
        self.version = str(self._line()["ready"])

    def tokens(self, count: int) -> list[list[int]]:
        return self.answer(count)[1]

    def answer(self, count: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        asked = {"prompts": self._prompts[:count], "new_tokens": NEW_TOKENS}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._line()
        return float(answer["seconds"]), answer["tokens"]

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("vLLM ended; run `PYTHON mmserve/bench/vllm_peer.py MODEL float32 1024` to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _vllm(python: Path, folder: Path, dtype: torch.dtype, prompts: list[list[int]], threads: int) -> Iterator[Vllm]:
    script = Path(vllm_peer.__file__).read_text(encoding="utf-8")  # run as a file, its folder would be importable
    name, most = str(dtype).removeprefix("torch."), max(map(len, prompts)) + NEW_TOKENS
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [str(python), "-c", script, str(folder), name, str(most)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        yield Vllm(process, prompts)
    finally:
        process.terminate()
        process.wait()


def random_llama(folder: Path) -> Path:
    """Create a checkpoint of 15 M random parameters in transformers' layout, with the bundled model's tokenizer."""
    tokenizer = shipped_folder("bundled-causal")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=288,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.1,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder
