"""Whether a grammar can be decoded with: it is compiled, and walked at random from its beginning.

Runs in the child process; nothing here is safe to run in the server.
"""

from __future__ import annotations

import random
import time
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.compile.vocabulary import BYTES, trie_of
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import PARSER_LIMITS, STEP_SECONDS, WALK_SECONDS, WALK_TOKENS, WALKS


def prove(text: str, trie: Any, keyword: str, *, spoken: bool = False) -> None:
    """Compile ``text`` and walk it.

    Raises ``Refused`` for what llguidance rejects, what fails or is slow while it is decoded, and what no walk leads to
    an end of; the last not where a sentence is known (``spoken``). ``keyword`` names the constraint in the refusal.
    """
    matcher = LLMatcher(trie, text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    if matcher.is_error():
        raise Refused.at("", keyword, _reason(matcher.get_error()))
    chance = random.Random(0)  # the same grammar is always judged alike
    began, ended = time.process_time(), 0
    for _ in range(WALKS):
        if _walk(matcher.deep_copy(), chance, keyword):
            ended += 1
        if time.process_time() - began > WALK_SECONDS:
            break
    if not ended and not spoken:
        raise Refused.at("", keyword, "no answer was found: every way that was tried ends where nothing can follow")


def takes(text: str, sentence: str) -> bool:
    """Whether ``sentence`` is one of the grammar ``text``."""
    matcher = LLMatcher(_bytewise(), text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    tokens = list(sentence.encode())
    return not matcher.is_error() and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@cache
def _bytewise() -> Any:
    return trie_of(BYTES)


def _walk(matcher: Any, chance: random.Random, keyword: str) -> bool:
    """Follow random tokens; False for a dead end. Raises ``Refused`` where the parser fails or a step is slow."""
    for _ in range(WALK_TOKENS):
        began = time.process_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            if matcher.stop_reason() in ("NoExtension", "NoExtensionBias"):
                return False
            raise Refused.at("", keyword, _reason(matcher.get_error()))
        if time.process_time() - began > STEP_SECONDS:
            raise Refused.at("", keyword, f"needs more than {STEP_SECONDS} s for one token")
        token = _drawn(mask, chance)
        if token is None:
            return matcher.is_accepting() or matcher.is_stopped()
        if not matcher.consume_token(token):
            raise Refused.at("", keyword, _reason(matcher.get_error()))
        if matcher.is_stopped():
            break
    return True


def _drawn(mask: bytes, chance: random.Random) -> int | None:
    """One of the ids whose bits are set, first tried by chance; None where there is none."""
    if not any(mask):
        return None
    for _ in range(64):
        byte = chance.randrange(len(mask))
        if mask[byte]:
            break
    else:
        byte = chance.choice([index for index, bits in enumerate(mask) if bits])
    return byte * 8 + chance.choice([bit for bit in range(8) if mask[byte] >> bit & 1])


def _reason(error: str) -> str:
    """The first line of what llguidance says, without the grammar that it may quote."""
    first = (error.strip().splitlines() or ["cannot be compiled"])[0][:300]
    return "has no sentence" if first.startswith("NoExtension") else first
