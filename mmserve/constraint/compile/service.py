"""Compiles grammars for requests in a pool of child processes, with LRU caches."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from math import inf
from typing import Any

from mmserve.constraint.compile import wire
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.grammar import kind_of
from mmserve.constraint.compile.wire import Child, CompileReply, FirstAnswers, ReplyTooLong, TokenTable
from mmserve.constraint.findings import Refused, as_error
from mmserve.constraint.limits import (
    ANSWER_SECONDS,
    CACHE_BYTES,
    CHILDREN,
    COMPILE_SECONDS,
    LATE_SECONDS,
    QUICK_SECONDS,
    REPLY_BYTES,
)
from mmserve.core.child_process import ChildExited
from mmserve.core.constraint import CallsOrJson, ConstraintMode, ConstraintSpec, JsonSchema
from mmserve.errors import Unavailable

logger = logging.getLogger("mmserve.constraint")


#: Children that are tried for one constraint if they are killed from outside.
_ATTEMPTS = 3
#: Attempts to compile one widenable schema if compiling it ends the child.
_WIDER = 3


class Compiler:
    """Child processes for one vocabulary, each with one constraint at a time; thread-safe.

    A constraint that needs more than ``seconds`` of CPU time, or that ends its child, is refused; the child is replaced
    in the background. If a child is killed from outside, the next one is tried. A child that sends nothing for
    ``patience`` seconds of wall time is killed as well, without refusing its constraint.
    """

    def __init__(self, vocabulary: TokenTable, seconds: float, patience: float = ANSWER_SECONDS) -> None:
        self._vocabulary = vocabulary
        self._slow = threading.BoundedSemaphore(max(1, CHILDREN - 1))  # slow constraints leave one child for others
        self._seconds, self._patience = seconds, patience
        self._changed = threading.Condition()  # guards the fields below; held briefly
        self._idle: list[Child] = []  # ready and free; the last one is used next
        self._all: set[Child] = set()  # all children, including those starting or in use
        self._wanted = 0  # target number of children
        self._starting = False
        self._failed = 0  # number of failed starts
        self._closed = False

    def compile(self, spec: ConstraintSpec, budget: int | None = None) -> CompileReply:
        """The grammar of ``spec`` or the refusal; with ``budget``, also the first answers of at most ``budget`` tokens.

        Slow constraints are compiled after fast ones. Raises ``Unavailable`` if no child can be started, if each is
        killed from outside, if one makes no progress, or after ``close``.
        """
        widens = isinstance(spec.kind, JsonSchema | CallsOrJson) and spec.mode is not ConstraintMode.STRICT
        seconds = 0.0
        for failed in range(_WIDER if widens else 1):
            question = wire.from_spec(spec) | {"budget": budget, "failed": failed}
            reply = self._asked(spec, question | {"quick": QUICK_SECONDS, "known": None})
            if isinstance(reply, dict) and "slow" in reply:
                seconds += reply["seconds"]
                with self._slow:
                    reply = self._asked(spec, question | {"quick": None, "known": reply["known"]})
            if isinstance(reply, dict) and not (reply["last"] and "refused" in reply):
                break
        if isinstance(reply, CompileReply):
            return reply
        return wire.to_reply(reply | {"seconds": seconds + reply["seconds"]})

    def _asked(self, spec: ConstraintSpec, message: dict[str, Any]) -> dict[str, Any] | CompileReply:
        """A child's reply to ``message`` about ``spec``, or the refusal if it ends the child."""
        for _ in range(_ATTEMPTS):
            child = self._taken()
            keep = False
            try:
                reply: dict[str, Any] = child.ask(message, self._patience)
                keep = not reply["last"]  # otherwise it exits by itself, maybe after the next constraint arrives
                return reply
            except TimeoutError as error:
                why = f"the process that compiles grammars sent nothing for {self._patience:g} s"
                raise Unavailable(f"{why}: it was halted, or gets hardly any processor; try again later") from error
            except (ChildExited, ReplyTooLong) as error:
                self._refuse_if_closed()
                ended = error
            finally:
                self._give_back(child, keep=keep)
            why = self._why(child, ended)
            if why:
                return CompileReply(Refused.at("", kind_of(spec), f"{why}; make it smaller or simpler"), lasting=False)
        raise Unavailable(
            f"a process that compiles a grammar was killed {_ATTEMPTS} times (most likely for lack of memory); "
            "try again later"
        )

    def warm(self) -> None:
        """Start a child in the background: it takes a second, and longer with a large vocabulary."""
        with self._changed:
            self._fill(1)

    def close(self) -> None:
        """Stop the children and their work; later calls raise ``Unavailable``. May be called twice."""
        with self._changed:
            self._closed = True
            for child in self._all:
                child.kill()
            self._changed.notify_all()
            # callers with a child get ``ChildExited``
            self._changed.wait_for(lambda: len(self._all) == len(self._idle))
            for child in self._idle:
                child.end()
            self._all.clear()
            self._idle.clear()

    def _taken(self) -> Child:
        """An idle child for exclusive use; waits for one. Raises ``Unavailable``."""
        with self._changed:
            failed = self._failed
            while True:
                self._refuse_if_closed()
                child = self._idle.pop() if self._idle else None
                if child is not None and not child.alive:
                    child.end()
                    self._all.discard(child)
                    continue
                if self._failed == failed:
                    self._fill(CHILDREN)
                if child is not None:
                    return child
                if not self._all and not self._starting:
                    raise Unavailable("the process that compiles grammars does not start; try again later")
                self._changed.wait()

    def _give_back(self, child: Child, *, keep: bool) -> None:
        """Return ``child`` to the pool or, if not ``keep``, stop it and start a replacement."""
        if not keep:
            child.end()
        with self._changed:
            if keep:
                self._idle.append(child)
            else:
                self._all.discard(child)
                self._fill(CHILDREN)
            self._changed.notify_all()

    def _fill(self, wanted: int) -> None:
        """Start children in the background until there are ``wanted``. Called with the lock held."""
        self._wanted = max(self._wanted, wanted)
        if self._starting or self._closed or len(self._all) >= self._wanted:
            return
        self._starting = True
        try:
            threading.Thread(target=self._start, name="grammar-compiler", daemon=True).start()
        except Exception as error:  # noqa: BLE001 - no thread can be started: waiting callers must be woken
            self._ended(error)

    def _start(self) -> None:
        """Start missing children one after another: each uses a core until it has started."""
        while True:
            child = None
            try:
                with self._changed:
                    if self._closed or len(self._all) >= self._wanted:
                        self._ended()
                        return
                    child = Child(self._seconds, self._patience)
                    self._all.add(child)
                child.read(self._vocabulary)
            except Exception as error:  # noqa: BLE001 - whatever it is: waiting callers must be woken
                if child is not None:
                    child.end()
                self._ended(error, child)
                return
            with self._changed:
                self._idle.insert(0, child)
                self._changed.notify_all()

    def _ended(self, error: Exception | None = None, child: Child | None = None) -> None:
        """Record that a start finished, with ``error`` if it failed."""
        with self._changed:
            self._starting = False
            if child is not None:
                self._all.discard(child)
            if error is not None and not self._closed:
                self._failed += 1
                logger.warning("a process that compiles grammars does not start", exc_info=error)
            self._changed.notify_all()

    def _why(self, child: Child, ended: ChildExited | ReplyTooLong) -> str:
        """The reason why the constraint ended ``child``; empty if it was killed from outside."""
        if isinstance(ended, ReplyTooLong):
            return f"becomes an answer of more than {REPLY_BYTES} bytes"
        if child.exceeded_cpu_limit:
            return f"takes more than {self._seconds:g} s of processor time to compile"
        return "" if child.killed else "needs too much memory or stack to compile"

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is stopping")


_OVERHEAD, _TOKEN = 1_000, 36  # bytes of an entry besides its text, and of each token of its answers


def key_of(spec: ConstraintSpec, fingerprint: str, cache: str = "") -> bytes:
    """The cache key of a constraint: SHA-256 of the constraint, its mode, the vocabulary's fingerprint, and the
    tenants' cache partition (``core.tenant.Tenant.cache``)."""
    return hashlib.sha256(json.dumps([wire.from_spec(spec), fingerprint, cache]).encode()).digest()


class Replies:
    """An LRU cache of replies by ``key_of``; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used = 0  # bytes: sizes of texts and answers' tokens, and a constant for each entry
        self._entries: OrderedDict[bytes, tuple[CompileReply, int, float]] = OrderedDict()  # with size and expiry
        self._lock = threading.Lock()

    def get(self, key: bytes) -> CompileReply | None:
        """The reply of ``key``; None if it is not cached."""
        with self._lock:
            reply, _size, until = self._entries.get(key, (None, 0, inf))
            if reply is None or time.monotonic() > until:
                return None
            self._entries.move_to_end(key)
            return reply

    def put(self, key: bytes, reply: CompileReply) -> None:
        """Cache ``reply``, replacing an earlier one; one larger than the whole cache is not cached.

        A reply that is not reproducible is cached for ``LATE_SECONDS``.
        """
        first = reply.first or FirstAnswers()
        tokens = sum(len(way.tokens) for way in (first.near, first.patient) if way is not None)
        size = _OVERHEAD + len(json.dumps(wire.from_outcome(reply.outcome))) + _TOKEN * tokens
        if size > self._max_bytes:
            return
        with self._lock:
            self.used += size - self._entries.pop(key, (None, 0, inf))[1]
            self._entries[key] = reply, size, inf if reply.lasting else time.monotonic() + LATE_SECONDS
            while self.used > self._max_bytes:
                self.used -= self._entries.popitem(last=False)[1][1]


class Grammars:
    """Compiles constraints to grammars for one vocabulary; thread-safe and blocking."""

    def __init__(self, vocabulary: TokenTable, *, seconds: float = COMPILE_SECONDS) -> None:
        self._fingerprint = vocabulary.fingerprint()
        self._replies = Replies(CACHE_BYTES)
        self._compiler = Compiler(vocabulary, seconds)
        self._compiler.warm()

    def first(self, spec: ConstraintSpec, budget: int, cache: str = "") -> tuple[Grammar, FirstAnswers, float]:
        """The grammar of ``spec``, for matchers with ``limits.PARSER_LIMITS``; the shortest answers found within
        ``budget`` tokens; and the CPU seconds that this took, also if it was done for an earlier request.

        Takes microseconds if a tenant of ``cache`` has used it before, else milliseconds; at worst some seconds of CPU
        time and a wait for earlier constraints. Raises ``InvalidArgument`` with a violation for each reason why there
        is no grammar, ``Unavailable`` if nothing can be compiled.
        """
        key = key_of(spec, self._fingerprint, cache)
        reply = self._replies.get(key)
        if reply is None or (reply.first is not None and not reply.first.covers(budget)):
            reply = self._compiler.compile(spec, budget)
            if reply.lasting or reply.first is not None:
                self._replies.put(key, reply)
        if isinstance(reply.outcome, Refused):
            raise as_error(kind_of(spec), reply.outcome.findings)
        assert reply.first is not None  # every grammar of a child comes with first answers
        return reply.outcome, reply.first, reply.seconds

    def close(self) -> None:
        """Stop the child processes."""
        self._compiler.close()
