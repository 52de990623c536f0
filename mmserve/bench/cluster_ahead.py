"""K/V sent to decode during the prefill of their prompt, compared with K/V sent after it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from mmserve.bench.cluster_fleets import config, fleet, request
from mmserve.bench.in_process import Answer, ask_all
from mmserve.bench.measures import Figures, at_least, stated
from mmserve.bench.serve_models import deep
from mmserve.core.events import Event
from mmserve.core.progress import Progress, Reached, StageEntered
from mmserve.core.request import Message, Request, Stage, TextPart

#: Layers of the model, and tokens of its prompts.
_LAYERS, _PROMPTS = 24, (500, 2_000, 4_000)
_REPEATS, _WARM = 5, 1
#: Values of the `[cluster]` setting: off, and the default.
_AFTER, _AHEAD = "after the prompt", "ahead"
_WAYS = {_AFTER: 0, _AHEAD: 1024}


class _Traced(Answer):
    """Times of one traced request, on this host's clock (ns)."""

    def __init__(self) -> None:
        super().__init__()
        self.prefilling = self.left = self.ready = 0

    def sink(self, event: Event | Progress) -> None:
        """Record an event."""
        match event:
            case StageEntered(Stage.PREFILLING, at):
                self.prefilling = self.prefilling or at
            case Reached("draft", at):  # its prompt has been prefilled
                self.left = self.left or at
            case StageEntered(Stage.READY, at):  # a step has run on the decode worker
                self.ready = self.ready or at
        super().sink(event)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Figures:
    """Times from the end, and from the start, of prefill until the first step on the decode worker, in turns."""
    rows, measures = [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = str(deep(Path(folder) / "deep", _LAYERS))
        engine = replace(config(path).engine, max_tokens=_PROMPTS[-1] + 1000, max_running=4)
        fleets = {
            name: stack.enter_context(fleet(path, "ep d", engine=engine, ahead_kb=size))[1]
            for name, size in _WAYS.items()
        }
        for tokens in _PROMPTS:
            answers: dict[str, list[_Traced]] = {name: [] for name in _WAYS}
            for turn in range(_WARM + _REPEATS * arguments.repeats):
                for name, coordinator in fleets.items():
                    answers[name] += ask_all(coordinator, [_prompt(f"{tokens}.{turn}", tokens, turn)], _Traced)
            same = [[a.text for a in found] for found in answers.values()]
            after = {name: median(a.ready - a.left for a in found[_WARM:]) / 1e6 for name, found in answers.items()}
            whole = {name: median(a.ready - a.prefilling for a in f[_WARM:]) / 1e6 for name, f in answers.items()}
            rows.append({"tokens": tokens, "after_prefill_ms": after, "with_prefill_ms": whole})
            parts = ", ".join(f"{name} {after[name]:.1f} (with prefill {whole[name]:.0f})" for name in _WAYS)
            progress(f"{tokens} tokens, from the end of prefill until a step has run elsewhere, ms: {parts}")
            for name in _WAYS:
                measures += [
                    stated(f"{tokens} tokens, K/V {name}, prefill to a step elsewhere, p50", after[name], "ms"),
                    stated(f"{tokens} tokens, K/V {name}, prefill included, p50", whole[name], "ms"),
                ]
            sooner = after[_AFTER] / after[_AHEAD]
            measures.append(at_least(f"{tokens} tokens, sooner with K/V ahead", sooner, "x", 1.0))
            measures.append(at_least(f"{tokens} tokens, same answers", float(same[0] == same[1]), "share", 1.0))
    return {"rows": rows, "measures": measures, "settings": {"layers": _LAYERS, "repeats": arguments.repeats}}


def _prompt(name: str, tokens: int, seed: int) -> Request:
    """A prompt of about ``tokens`` tokens that shares no prefix with others."""
    words = " ".join(f"{(seed * 7919 + i * 104729) % 9973}" for i in range(tokens // 4))
    asked = request(name, 0, 4, "last", seed)
    return replace(asked, messages=(Message("user", (TextPart(words),)),), trace={"traceparent": "none"})
