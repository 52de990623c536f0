"""The section ``prefix`` of ``mmserve bench serve``: time to first token of a prompt of 2,000 tokens whose K/V are
computed, or cached in the page pool, in host memory or on disk.

Over real sockets and in one process, in turn on three servers of the same model that differ in their page pools. To
measure host memory and disk, other prompts first evict the pages from the pool. Every answer must have the same tokens
as with computed K/V.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress, at_most, stated
from mmserve.bench.serve_models import next_token
from mmserve.bench.settings import measured_config
from mmserve.client import Client, Delta, Finished
from mmserve.config import KVCacheConfig, ModelConfig

PROMPT_TOKENS = 2_000
_MOST, _PATIENCE = 2_560, 600.0
_WORDS = "the red circle is left of the blue square and "
#: Number of prompts whose pages fit into the pool at once, if they are to be evicted.
_FILLERS = 2
#: Goals: time to first token from each tier relative to a computed prompt.
_GOALS = {"pages": 0.5, "host": 0.5, "disk": 0.5}


@dataclass(frozen=True)
class _Asked:
    seconds: float  # until the first token
    tokens: tuple[int, ...]
    cached: int
    prompt: int


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each source of the K/V; times are medians over the rounds."""
    found: dict[str, list[_Asked]] = {"computed": [], "pages": [], "host": [], "disk": []}
    with tempfile.TemporaryDirectory(prefix="mmserve-prefix-") as folder, ExitStack() as stack:
        path, disk = next_token(Path(folder) / "model"), str(Path(folder) / "pages")
        large, small = 4 * _MOST, _MOST
        clients = {
            name: stack.enter_context(Client(stack.enter_context(_server(path, pool, kv)).address, timeout=_PATIENCE))
            for name, pool, kv in (
                ("pages", large, KVCacheConfig()),
                ("host", small, KVCacheConfig(host_bytes=1 << 30)),
                ("disk", small, KVCacheConfig(disk_folder=disk)),
            )
        }
        for number in range(arguments.repeats + 1):
            progress(f"round {number} of {arguments.repeats}" if number else "warming up")
            prompt = f"round {number}: " + _WORDS * (PROMPT_TOKENS // 10)
            computed = {name: _ask(client, prompt) for name, client in clients.items()}
            again: dict[str, _Asked] = {}
            for name, client in clients.items():
                for filler in range(_FILLERS if name != "pages" else 0):
                    _ask(client, f"filler {filler} of {prompt}")
                again[name] = _ask(client, prompt)
                _check(name, computed[name], again[name])
            if number:
                found["computed"].append(computed["pages"])
                for name, one in again.items():
                    found[name].append(one)
    return _report(found, arguments.repeats)


def _server(path: Path, positions: int, kv: KVCacheConfig) -> BackgroundServer:
    config = measured_config(argparse.Namespace(config=None, model=None, companion=None, set=[]))
    pages = positions // config.engine.page_size
    engine = replace(config.engine, max_tokens=_MOST, pages=pages, prefix_cache=True)
    return BackgroundServer(replace(config, engine=engine, kv_cache=kv, models=(ModelConfig(path=str(path)),)))


def _ask(client: Client, prompt: str) -> _Asked:
    begun, first, done = time.perf_counter(), 0.0, None
    for event in client.stream(prompt, max_new_tokens=4, tokens=True):
        if isinstance(event, Delta) and not first:
            first = time.perf_counter() - begun
        if isinstance(event, Finished):
            done = event
    assert done is not None, "a stream ends with its answer"
    ids = tuple(token.id for token in done.tokens)
    return _Asked(first or time.perf_counter() - begun, ids, done.usage.cached_tokens, done.usage.prompt_tokens)


def _check(name: str, computed: _Asked, again: _Asked) -> None:
    """Raise ``RuntimeError`` if the answer differs, or was not computed from cached K/V."""
    if again.tokens != computed.tokens:
        raise RuntimeError(f"{name}: {again.tokens} instead of {computed.tokens}")
    if again.cached < 0.95 * again.prompt:
        raise RuntimeError(f"{name}: {again.cached} of {again.prompt} tokens were kept")


def _report(found: dict[str, list[_Asked]], repeats: int) -> Figures:
    median = {name: statistics.median(one.seconds for one in each) for name, each in found.items()}
    rows = [
        {
            "measured": f"first token, K/V {'computed' if name == 'computed' else f'from {name}'}",
            "ms": round(1000 * seconds, 1),
            "ratio": round(seconds / median["computed"], 3),
            "prompt_tokens": found[name][0].prompt,
            "cached_tokens": found[name][0].cached,
        }
        for name, seconds in median.items()
    ]
    measures = [stated("time to first token, computed", 1000 * median["computed"], "ms")]
    measures += [
        at_most(f"time to first token from {name} over computed", median[name] / median["computed"], "ratio", goal)
        for name, goal in _GOALS.items()
    ]
    return {"rows": rows, "measures": measures, "settings": {"rounds": repeats, "prompt_tokens": PROMPT_TOKENS}}
