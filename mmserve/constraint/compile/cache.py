"""Outcomes of compiling, least recently used first out, within a number of bytes."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from math import inf

from mmserve.constraint.compile import wire
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.begun import FirstAnswers
from mmserve.constraint.findings import Refused
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
