"""Grammars for requests: compiled and probed in child processes, kept in a cache, refused with reasons.

The cache drops the outcomes that were used least recently, above a number of bytes.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from math import inf

from mmserve.constraint.compile import wire
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.grammar import kind_of
from mmserve.constraint.compile.process import PROGRAM, Compiler
from mmserve.constraint.compile.vocabulary import TokenTable
from mmserve.constraint.compile.wire import FirstAnswers
from mmserve.constraint.findings import Refused, as_error
from mmserve.constraint.limits import CACHE_BYTES, CLOSES, COMPILE_SECONDS, LATE_SECONDS
from mmserve.core.constraint import ConstraintSpec

_OVERHEAD = 1_000  # bytes an entry costs beside its text


def key_of(spec: ConstraintSpec, fingerprint: str, cache: str = "") -> bytes:
    """The SHA-256 of a constraint, its mode and a vocabulary's fingerprint, on which its outcome depends, and of the
    tenants' part of the caches (``core.tenant.Tenant.cache``)."""
    return hashlib.sha256(json.dumps([wire.from_spec(spec), fingerprint, cache]).encode()).digest()


class Outcomes:
    """A cache of grammars and refusals by ``key_of``; may be called from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._entries: OrderedDict[bytes, tuple[Grammar | Refused, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Grammar | Refused | None:
        """What was put under ``key``, if it is still there."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: bytes, outcome: Grammar | Refused) -> None:
        """Keep ``outcome``; one larger than the whole cache is not kept."""
        size = _OVERHEAD + len(json.dumps(wire.from_outcome(outcome)))
        with self._lock:
            if key in self._entries or size > self._max_bytes:
                return
            self._entries[key] = outcome, size
            self._used += size
            while self._used > self._max_bytes:
                self._used -= self._entries.popitem(last=False)[1][1]

    @property
    def used(self) -> int:
        """Bytes taken, counted as the texts' sizes and a constant an entry."""
        return self._used


class Firsts:
    """The first answers of the ``most`` constraints asked for last, by ``key_of``; may be called from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[bytes, tuple[FirstAnswers, float]] = OrderedDict()  # and until when
        self._lock = threading.Lock()

    def get(self, key: bytes) -> FirstAnswers | None:
        """What was put under ``key`` last, if it is still there."""
        with self._lock:
            first, until = self._entries.get(key, (None, inf))
            if first is None or time.monotonic() > until:
                return None
            self._entries.move_to_end(key)
            return first

    def put(self, key: bytes, first: FirstAnswers, seconds: float = inf) -> None:
        """Keep ``first`` in the place of what was there, for so many seconds."""
        with self._lock:
            self._entries[key] = first, time.monotonic() + seconds
            self._entries.move_to_end(key)
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)


class Grammars:
    """Turns constraints into grammars for one vocabulary; may be called from any thread, and blocks it."""

    def __init__(
        self,
        vocabulary: TokenTable,
        *,
        seconds: float = COMPILE_SECONDS,
        cache_bytes: int = CACHE_BYTES,
        program: str = PROGRAM,
    ) -> None:
        self._fingerprint = vocabulary.fingerprint()
        self._outcomes = Outcomes(cache_bytes)
        self._firsts = Firsts(CLOSES)
        self._compiler = Compiler(vocabulary, seconds, program=program)
        self._compiler.warm()

    def grammar(self, spec: ConstraintSpec, cache: str = "") -> Grammar:
        """The grammar of ``spec``, which a matcher may run under ``limits.PARSER_LIMITS``.

        Takes microseconds when a tenant of ``cache`` asked for it before, else milliseconds, at worst ``seconds`` of
        processor time and a wait for those before it. Raises ``InvalidArgument`` with a violation for every reason
        why there is none, ``Unavailable`` where nothing can be compiled.
        """
        key = key_of(spec, self._fingerprint, cache)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome, lasting = self._compiler.compile(spec)
            if lasting:
                self._outcomes.put(key, outcome)
        return _granted(spec, outcome)

    def first(self, spec: ConstraintSpec, budget: int, cache: str = "") -> tuple[Grammar, FirstAnswers]:
        """The grammar of ``spec``, and the shortest answers found under it where there is room for ``budget`` tokens.

        Raises as ``grammar``; ``program`` must be one that looks for answers.
        """
        key = key_of(spec, self._fingerprint, cache)
        outcome, first = self._outcomes.get(key), self._firsts.get(key)
        if outcome is None or (isinstance(outcome, Grammar) and (first is None or not first.covers(budget))):
            begun = self._compiler.begin(spec, budget)
            outcome, first = begun.outcome, begun.first
            if begun.lasting or first is not None:
                self._outcomes.put(key, outcome)
            if first is not None:
                self._firsts.put(key, first, inf if begun.lasting else LATE_SECONDS)
        grammar = _granted(spec, outcome)
        assert first is not None  # every grammar that a child gives comes with one
        return grammar, first

    def close(self) -> None:
        """End the child processes."""
        self._compiler.close()


def _granted(spec: ConstraintSpec, outcome: Grammar | Refused) -> Grammar:
    if isinstance(outcome, Refused):
        raise as_error(kind_of(spec), outcome.findings)
    return outcome
