"""Measurement of pairs of policies against plain decoding: every prompt with every pair in turn, one at a time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from mmserve.client import Client, Options, Result
from mmserve.core.info import ModelInfo
from mmserve.core.request import Policy
from mmserve.core.tuning import Measured, Pair
from mmserve.tune.prompts import Prompt
from mmserve.wire.policies import named


def _policy(name: str, base: Policy | None = None, **options: float) -> Policy:
    return Policy(name=name, options=options, base=base)


_SCHEDULE = _policy("low_confidence")
_SURE = _policy("threshold", confidence=0.9)
#: Commit policies for several tokens a step, the most conservative first.
_PARALLEL = (
    *(_policy("threshold", confidence=confidence) for confidence in (0.95, 0.9, 0.8, 0.7)),
    _policy("factor", factor=1.0),
    _policy("confident", confidence=0.95),
    _policy("entropy_bound", bound=0.1),
    _policy("learned", threshold=0.96),
    _policy("early_commit", base=_SURE),
)
_MASKED = (
    *(Pair(_policy(cache), _SCHEDULE) for cache in ("prefix", "dual", "dkv_decode")),
    *(Pair(_policy(cache), _SURE) for cache in ("none", "prefix", "dkv_decode", "free_cache")),
    *(Pair(_policy("dual"), commit) for commit in _PARALLEL),
)
_BLOCKS = tuple(Pair(_policy("block"), commit) for commit in _PARALLEL)
_RENOISING = tuple(Pair(_policy("block"), _policy("entropy_bound", bound=bound)) for bound in (0.05, 0.2, 0.4))
_CAUSAL = (
    *(Pair(_policy("last"), _policy("ngram", length=length)) for length in (4, 8)),
    *(Pair(_policy("last"), _policy("draft_model", length=length)) for length in (2, 4)),
)


def pairs_for(model: ModelInfo) -> list[Pair]:
    """Plain decoding, and then every pair whose policies are supported by ``model``."""
    plain = model.policies.plain
    known = {*model.recompute_policies, *model.commit_policies}
    if not model.diffusion:
        candidates = _CAUSAL
    elif "low_confidence" not in known:
        candidates = _RENOISING
    else:
        candidates = _BLOCKS if plain.recompute.name == "block" else _MASKED
    return [plain, *(pair for pair in candidates if _names(pair) <= known)]


def _names(pair: Pair) -> set[str]:
    base = {pair.commit.base.name} if pair.commit.base is not None else set()
    return {pair.recompute.name, pair.commit.name, *base}


@dataclass(frozen=True)
class Answer:
    """The result of a prompt with one pair; ``seconds`` is the median of the rounds."""

    text: str
    tokens: tuple[int, ...]
    forwards: int
    seconds: float


def measure(
    client: Client,
    model: str,
    prompts: Sequence[Prompt],
    pairs: Sequence[Pair],
    rounds: int,
    report: Callable[[str], None],
) -> list[Measured]:
    """The measurements of each of ``pairs``, the first of which is plain decoding, on ``prompts``.

    Decoding is greedy, so answers are the same in every round; times (seconds, measured by the server) are not.
    """
    _ask(client, model, prompts[0], pairs[0])  # warm-up
    answers: dict[int, list[Answer]] = {number: [] for number in range(len(pairs))}
    for index, prompt in enumerate(prompts):
        report(f"{index} of {len(prompts)} prompts, {len(pairs)} pairs each")
        results = [[_ask(client, model, prompt, pair) for pair in pairs] for _ in range(rounds)]
        for number in range(len(pairs)):
            answers[number].append(_answer([each[number] for each in results]))
    return [figures(pair, prompts, answers[number], answers[0]) for number, pair in enumerate(pairs)]


def figures(pair: Pair, prompts: Sequence[Prompt], answers: Sequence[Answer], plain: Sequence[Answer]) -> Measured:
    """The measurements of ``pair`` from its ``answers`` to ``prompts``, relative to those of plain decoding."""
    right = [prompt.right(a.text) for prompt, a in zip(prompts, answers, strict=True) if prompt.right is not None]
    agreements = [agreement(a.tokens, p.tokens) for a, p in zip(answers, plain, strict=True)]
    groups = [[i for i, prompt in enumerate(prompts) if (prompt.schema is not None) is kind] for kind in (False, True)]
    return Measured(
        pair=pair,
        quality=round(min(_quality(prompts, answers, plain, group) for group in groups if group), 4),
        accuracy=round(statistics.mean(right), 4) if right else None,
        agreement=round(statistics.mean(agreements), 4),
        same=round(statistics.mean(a.text == p.text for a, p in zip(answers, plain, strict=True)), 4),
        time_ratio=round(sum(a.seconds for a in answers) / sum(p.seconds for p in plain), 4),
        forwards=round(statistics.mean(a.forwards for a in answers), 2),
    )


def agreement(tokens: Sequence[int], plain: Sequence[int]) -> float:
    """Share of tokens in the matching blocks of two answers (``difflib``), relative to the longer one."""
    longest = max(len(tokens), len(plain))
    blocks = SequenceMatcher(None, tokens, plain, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / longest if longest else 1.0


def _quality(prompts: Sequence[Prompt], answers: Sequence[Answer], plain: Sequence[Answer], group: list[int]) -> float:
    """The score of a ``group`` of prompts relative to that of plain decoding; if the latter is 0, the agreement."""
    scored = [(_score(prompts[i], answers[i], plain[i]), _score(prompts[i], plain[i], plain[i])) for i in group]
    whole = sum(of_plain for _mine, of_plain in scored)
    if not whole:
        return statistics.mean(agreement(answers[i].tokens, plain[i].tokens) for i in group)
    return sum(mine for mine, _of_plain in scored) / whole


def _score(prompt: Prompt, answer: Answer, plain: Answer) -> float:
    return agreement(answer.tokens, plain.tokens) if prompt.right is None else float(prompt.right(answer.text))


def _ask(client: Client, model: str, prompt: Prompt, pair: Pair) -> Result:
    options: Options = {
        "model": model,
        "max_new_tokens": prompt.max_new_tokens,
        "videos": prompt.videos,
        "recompute": named(pair.recompute),
        "commit": named(pair.commit),
        "tokens": True,
    }
    return client.generate(prompt.text, prompt.images, schema=prompt.schema, **options)


def _answer(results: Sequence[Result]) -> Answer:
    first = results[0]
    seconds = statistics.median(result.times.total for result in results) / 1000
    return Answer(first.text, tuple(token.id for token in first.tokens), first.forwards, seconds)
