"""Requests that reuse images' K/V, and what is told of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from helpers import ask, picture

from mmserve.core.events import Finished
from mmserve.core.request import ImagePart, Message, Part, Policy, Request, TextPart
from mmserve.kv.reuse import REUSES

ONE, TWO, THREE = (ImagePart(picture(i)) for i in range(3))
LAST = Policy(name="last")
#: Prompts whose images stand at different places, one of them where it stands alone.
PARTS: tuple[tuple[Part, ...], ...] = (
    (ONE, TextPart("what?")),
    (TextPart("look here: "), ONE, TextPart("and "), TWO, TextPart("what?")),
    (TWO, ONE, ONE, TextPart("which of the three?")),
    (TextPart("a long line of text stands in front of it, so that its first page is full. "), THREE, TWO),
)


def say(name: str, parts: tuple[Part, ...], by: Policy | None, **options: Any) -> Request:
    asked = ask(name, **{"recompute": LAST, "max_new_tokens": 4, **options})
    streaming = dataclasses.replace(asked.streaming, tokens=True)
    messages = (Message("user", parts),)
    return dataclasses.replace(asked, messages=messages, image_reuse=by, streaming=streaming)


def rule(name: str, recompute: float) -> Policy:
    return Policy(name=name, options={"recompute": recompute})


def requests(*recompute: Policy) -> list[Request]:
    """Every prompt under every rule, drawn and greedy, the ``recompute`` policies by turns."""
    rules = [rule("blend", 0.0), *(rule(name, 0.3) for name in REUSES)]
    policies = recompute or (LAST,)
    made = []
    for i, parts in enumerate(PARTS):
        for j, by in enumerate(rules):
            name, policy = f"{by.name} {by.options['recompute']} {i}", policies[(i + j) % len(policies)]
            made.append(say(name, parts, by, seed=i, temperature=0.7 * (i % 2), recompute=policy))
    return made


def told(done: Finished) -> tuple[object, ...]:
    """All that a client is told but for what was cached; log-probabilities to the last bit."""
    usage = dataclasses.replace(done.usage, cached_tokens=0)
    run = done.recomputed_tokens + done.usage.cached_tokens
    return done.text, done.reason, usage, done.forwards, run, done.tokens
