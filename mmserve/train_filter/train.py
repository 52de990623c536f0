"""Training of a model's filter on its own answers, and evaluation on held-out prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from mmserve.config import EngineConfig, resolve
from mmserve.core.request import Request
from mmserve.decode.commit import Commit
from mmserve.decode.commit.learned import Learned
from mmserve.decode.commit.threshold import Threshold
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.commit_filter import CommitFilter
from mmserve.observe.machine import describe
from mmserve.train_filter.fit import fit, score
from mmserve.train_filter.record import Decoded, Recorder, Trajectory

#: One of this many prompts is held out.
HELD_OUT = 6
#: Seconds between lines of progress.
PATIENCE = 5.0


def train(
    model: LoadedModel, requests: list[Request], *, seed: int, steps: int, progress: Callable[[str], None]
) -> tuple[CommitFilter, dict[str, Any]]:
    """A filter for ``model`` from its answers to ``requests``, and the metadata of its training."""
    if len(requests) < HELD_OUT:
        raise ConfigError(f"{len(requests)} prompts are too few: at least {HELD_OUT}")
    recorder = Recorder(model, resolve(EngineConfig(max_tokens=model.spec.max_tokens, max_running=1, stages="inline")))
    ran = list(_recorded(recorder, requests, progress))
    kept = range(HELD_OUT - 1, len(ran), HELD_OUT)
    examples = [example for i, trajectory in enumerate(ran) if i not in kept for example in trajectory.examples]
    commit_filter = fit(examples, seed=seed, steps=steps, progress=progress)
    policy = Learned(commit_filter=commit_filter)
    judged = score(commit_filter, [example for i in kept for example in ran[i].examples], policy.threshold)
    baseline = [ran[i].baseline for i in kept]
    figures = {"low_confidence": _figures(baseline, baseline)}
    policies: dict[str, Commit] = {"learned": policy, "threshold": Threshold()}
    for name, commit in policies.items():
        progress(f"{len(kept)} prompts kept aside, decoded by {name}")
        figures[name] = _figures([recorder.decode(requests[i], commit) for i in kept], baseline)
    record = {
        "model": model.spec.name,
        "prompts": len(requests),
        "seed": seed,
        "steps": steps,
        "held_out": {"prompts": len(kept), "threshold": policy.threshold, **vars(judged), "decoding": figures},
        "machine": describe(),
    }
    return commit_filter, record


def _recorded(recorder: Recorder, requests: list[Request], progress: Callable[[str], None]) -> Iterator[Trajectory]:
    begun = shown = time.monotonic()
    for number, request in enumerate(requests, start=1):
        yield recorder.trajectory(request)
        now = time.monotonic()
        if now - shown > PATIENCE or number == len(requests):
            left = (now - begun) / number * (len(requests) - number)
            progress(f"{number} of {len(requests)} prompts decoded, about {left:.0f} s left of this")
            shown = now


def _figures(decoded: list[Decoded], baseline: list[Decoded]) -> dict[str, float]:
    forwards = sum(d.forwards for d in decoded)
    same = sum(d.answer == b.answer for d, b in zip(decoded, baseline, strict=True))
    return {
        "same_as_baseline": round(same / len(decoded), 4),
        "forwards": round(forwards / len(decoded), 2),
        "tokens_per_forward": round(sum(d.tokens for d in decoded) / forwards, 2),
    }
