"""The child process that compiles constraints to grammars and searches their first answers; imports no torch.

Run as ``python -m mmserve.constraint.search.worker SECONDS PATIENCE BYTES``. It reads a vocabulary, replies ``ready``,
and then handles constraints, one after another, until its input ends. No failure affects the server: a grammar that
takes more than ``SECONDS`` of CPU time ends the process by SIGPROF, one that takes more than ``PATIENCE`` seconds of
wall time by SIGALRM. A search is ended by an exception after ``limits.SEARCH_SECONDS``, and a question after its
``quick`` seconds: the reply is then ``slow``. The process exits after a reply with ``last``: if its state may be
corrupt, or if it has allocated more than ``BYTES`` besides the vocabulary. The parser's limits bound each call of
native code, the timers all calls together.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from types import FrameType
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from mmserve.constraint.compile import wire
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.grammar import grammars_of, kind_of
from mmserve.constraint.compile.wire import FirstAnswers, TokenTable
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import (
    CHILD_BYTES,
    FAR_TOKENS,
    KILL_SECONDS,
    LARGE_BYTES,
    PARSER_LIMITS,
    REPLY_BYTES,
    SEARCH_SECONDS,
    STEP_SECONDS,
    WALK_SECONDS,
    WALK_TOKENS,
    WALKS,
)
from mmserve.constraint.search import matcher
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import find_first
from mmserve.core.constraint import ConstraintSpec
from mmserve.core.timers import accept_timers, limited
from mmserve.memory import limit_address_space, resident, trim

#: Niceness of this process: the server's other work has priority.
_NICE = 5
#: Seconds until a timer that interrupted native code tries again.
_AGAIN = 0.005


class Searching:
    """State that depends only on the vocabulary."""

    def __init__(self, vocabulary: TokenTable) -> None:
        self._tokens = Vocabulary.of(vocabulary)
        self._lexicon = Lexicon.of(self._tokens.token_bytes)
        self.trie = self._tokens.trie
        self.longest = max(map(len, self._tokens.token_bytes), default=1)  # maximum bytes of a token

    def first(self, grammar: Grammar, budget: int, least: int, report: Callable[[FirstAnswers], None]) -> None:
        """Search the first answers under ``grammar``; ``report`` is called with each better result.

        Results are deterministic for a grammar and budget.
        """
        compiled = matcher.Grammar(grammar.text, self._tokens, LLParserLimits(**PARSER_LIMITS))
        report(find_first(compiled, self._lexicon, budget, least, report, grammar.sketch))


class _Late(BaseException):
    """A timer of this process expired; not an ``Exception``, so that no handler catches it."""


class _Known(BaseException):
    """The reply is known before a grammar is compiled; not an ``Exception``, so that no handler catches it."""

    def __init__(self, reply: dict[str, Any]) -> None:
        super().__init__()
        self.reply = reply


def serve() -> None:
    """Handle messages from standard input until it ends."""
    limit_address_space(CHILD_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    seconds, patience, most = map(float, sys.argv[1:])
    accept_timers()
    signal.signal(signal.SIGVTALRM, _interrupt)
    source = sys.stdin.buffer
    searching = Searching(wire.to_vocabulary(wire.read(source)))
    _send({"ready": True})
    begun = resident()
    while (message := wire.read(source)) is not None:
        used = time.process_time()
        with limited(seconds, patience):  # ``patience``: in case the server is gone
            reply, broken = _answer(message, searching)
        if message["budget"] is not None:
            trim()  # a search creates and frees many parsers
        last = broken or ("slow" not in reply and resident() - begun > most)
        _send(reply | {"last": last, "seconds": time.process_time() - used})
        if last:
            os._exit(1)  # a panic may leave corrupt state


def _answer(message: Any, searching: Searching) -> tuple[dict[str, Any], bool]:
    """The reply to ``message``, and whether this process may be corrupt and must exit."""
    quick, budget, found = message["quick"], message["budget"], FirstAnswers()

    def report(first: FirstAnswers) -> None:
        nonlocal found
        found = first

    def least(grammar: Grammar) -> int:
        return -(-grammar.shortest // searching.longest)

    def rewritten(grammar: Grammar, index: int) -> None:
        """Reply early with what is known before the grammar is compiled."""
        if budget is not None and least(grammar) > max(budget, FAR_TOKENS):
            first = FirstAnswers(least=least(grammar), late=True)
            raise _Known(wire.from_outcome(grammar) | {"first": asdict(first)})
        if quick is not None and len(grammar.text) > LARGE_BYTES:
            raise _Known({"slow": True, "known": wire.from_outcome(grammar) | {"index": index}})

    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, quick or 0)
        try:
            spec, failed = wire.to_spec(message), message["failed"]
            outcome, broken = _outcome(spec, searching.trie, rewritten, message["known"], failed)
            reply = wire.from_outcome(outcome)
            if budget is None or isinstance(outcome, Refused):
                return reply, broken
            signal.setitimer(signal.ITIMER_PROF, SEARCH_SECONDS + KILL_SECONDS)
            if quick is None:
                signal.setitimer(signal.ITIMER_VIRTUAL, SEARCH_SECONDS)
            searching.first(outcome, budget, least(outcome), report)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Known as known:
        return known.reply, False
    except _Late:
        if quick is not None:
            return {"slow": True, "known": None}, False
        found = replace(found, asked=True, late=True)
    except BaseException as error:  # noqa: BLE001 - as below
        return wire.from_outcome(_failed(kind_of(wire.to_spec(message)), error)), True
    return reply | {"first": asdict(found)}, False


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise in the running code, unless native code has called it: the exception would pass through native frames."""
    while frame is not None:
        if frame.f_code.co_name == "__call__":  # called by llguidance, to tokenise
            signal.setitimer(signal.ITIMER_VIRTUAL, _AGAIN)
            return
        frame = frame.f_back
    raise _Late


def _outcome(
    spec: ConstraintSpec,
    trie: Any,
    rewritten: Callable[[Grammar, int], None] = lambda grammar, index: None,
    known: Any = None,
    failed: int = 0,
) -> tuple[Grammar | Refused, bool]:
    """The first grammar of ``spec`` that passes the probe, or the refusal; and whether this process may be corrupt.

    Args:
        rewritten: called with each grammar and its index before it is compiled.
        known: the grammar returned for an earlier question, as sent by ``wire``.
        failed: number of processes ended by earlier questions about ``spec``.
    """
    kind = kind_of(spec)
    refused: Refused | None = None
    try:
        for index, grammar in _grammars(spec, known, failed):
            try:
                if len(grammar.text) > REPLY_BYTES or len(json.dumps(grammar.text)) > REPLY_BYTES:
                    why = f"becomes a grammar of more than {REPLY_BYTES} bytes; make it smaller, or repeat less of it"
                    raise Refused.at("", kind, why)
                rewritten(grammar, index)
                probe(grammar.text, trie, kind, has_sentence=grammar.sketch is not None and kind in ("lark", "gbnf"))
            except Refused as refusal:
                refused = refused or refusal
            else:
                return grammar, False
    except Refused as refusal:
        return refusal, False
    except RecursionError:
        return Refused.at("", kind, "is nested too deep"), False
    except (_Late, _Known):
        raise
    except BaseException as error:  # noqa: BLE001 - a Rust panic is no Exception; whatever it is, it ends here
        return _failed(kind, error), True
    assert refused is not None  # there is at least one grammar
    return refused, False


def _grammars(spec: ConstraintSpec, known: Any, failed: int) -> Iterator[tuple[int, Grammar]]:
    """The grammars of ``spec`` with their indices, from the ``known`` one on."""
    if known is None:
        yield from enumerate(grammars_of(spec, failed))
        return
    grammar = wire.to_outcome(known)
    assert isinstance(grammar, Grammar)
    yield known["index"], grammar
    yield from islice(enumerate(grammars_of(spec, failed)), known["index"] + 1, None)


def _failed(kind: str, error: BaseException) -> Refused:
    if isinstance(error, MemoryError):
        return Refused.at("", kind, "needs too much memory to compile; make it smaller")
    return Refused.at("", kind, f"makes the grammar engine fail: {type(error).__name__}")


def _send(message: Any) -> None:
    sys.stdout.buffer.write(wire.packed(message))
    sys.stdout.buffer.flush()


def probe(text: str, trie: Any, keyword: str, *, has_sentence: bool = False) -> None:
    """Compile ``text`` and walk randomly through it.

    Raises ``Refused`` if llguidance rejects it, if it fails or is slow while decoding, or if no walk reaches an end
    although it is not known to have a sentence (``has_sentence``). ``keyword``: the constraint's kind, for the
    refusal.
    """
    matcher = LLMatcher(trie, text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    if matcher.is_error():
        raise Refused.at("", keyword, _reason(matcher.get_error()))
    chance = random.Random(0)  # deterministic for a grammar
    began, ended = time.process_time(), 0
    for _ in range(WALKS):
        if _walk(matcher.deep_copy(), chance, keyword):
            ended += 1
        if time.process_time() - began > WALK_SECONDS:
            break
    if not ended and not has_sentence:
        raise Refused.at("", keyword, "no answer was found: every way that was tried ends where nothing can follow")


def _walk(matcher: Any, chance: random.Random, keyword: str) -> bool:
    """Follow random tokens. Returns False at a dead end. Raises ``Refused`` if the parser fails or a step is slow."""
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
    """A random id whose bit is set; None if there is none."""
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
    """The first line of llguidance's message, without the grammar that it may include."""
    first = (error.strip().splitlines() or ["cannot be compiled"])[0][:300]
    if first.startswith("patternProperty regexes"):
        return (
            "schemas that apply to the same object have patterns that match the same names; make these patterns simpler"
        )
    return "has no sentence" if first.startswith("NoExtension") else first


if __name__ == "__main__":
    serve()
