"""Grammars for requests: compiled and probed in a pool of child processes, and kept in LRU caches."""

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


#: Children tried for one constraint, where the one before was killed.
_ASKED = 3
#: Questions about one schema that may be widened, where compiling it ends the child that is asked.
_WIDER = 3


class Compiler:
    """Child processes over one vocabulary, each with one constraint at a time; may be called from any thread.

    A constraint that needs more than ``seconds`` of processor time, or that ends its child, is refused; the child is
    replaced in the background. A question to a child that was killed from outside goes to the next one. A child that
    sends nothing for ``patience`` seconds of wall time is ended as well, without a refusal of its constraint.
    """

    def __init__(self, vocabulary: TokenTable, seconds: float, patience: float = ANSWER_SECONDS) -> None:
        self._vocabulary = vocabulary
        self._slow = threading.BoundedSemaphore(max(1, CHILDREN - 1))  # slow constraints leave one child to others
        self._seconds, self._patience = seconds, patience
        self._changed = threading.Condition()  # guards the fields below; never held long
        self._idle: list[Child] = []  # have read the vocabulary and are free; the last one is used next
        self._all: set[Child] = set()  # those, and those that start or are asked
        self._wanted = 0  # how many there should be
        self._starting = False
        self._failed = 0  # starts
        self._closed = False

    def compile(self, spec: ConstraintSpec, budget: int | None = None) -> CompileReply:
        """The grammar of ``spec`` or the refusal; with ``budget``, the first answers of at most so many tokens.

        Slow constraints are compiled after fast ones. Raises ``Unavailable`` where no child can be
        started, where each is killed from outside or one makes no progress, or after ``close``.
        """
        widens = isinstance(spec.kind, JsonSchema | CallsOrJson) and spec.mode is not ConstraintMode.STRICT
        for failed in range(_WIDER if widens else 1):
            question = wire.from_spec(spec) | {"budget": budget, "failed": failed}
            reply = self._asked(spec, question | {"quick": QUICK_SECONDS, "known": None})
            if isinstance(reply, dict) and "slow" in reply:
                with self._slow:
                    reply = self._asked(spec, question | {"quick": None, "known": reply["known"]})
            if isinstance(reply, dict) and not (reply["last"] and "refused" in reply):
                break
        return reply if isinstance(reply, CompileReply) else wire.to_reply(reply)

    def _asked(self, spec: ConstraintSpec, message: dict[str, Any]) -> dict[str, Any] | CompileReply:
        """A child's reply to ``message`` about ``spec``, or the refusal where it ends the child."""
        for _ in range(_ASKED):
            child = self._taken()
            keep = False
            try:
                reply: dict[str, Any] = child.ask(message, self._patience)
                keep = not reply["last"]  # else it ends by itself, but maybe not before the next constraint
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
            "something kills the processes that compile grammars (for want of memory, most likely); try again later"
        )

    def warm(self) -> None:
        """Start a child now, in the background: it takes a second, and longer with a large vocabulary."""
        with self._changed:
            self._fill(1)

    def close(self) -> None:
        """End the children and their work; nothing is compiled afterwards. May be called twice."""
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
        """An idle child, for the caller alone; waits for one. Raises ``Unavailable``."""
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
        """Let others ask ``child``, or end it and start another one in its place."""
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
        """Start what is missing, one after another: each child takes a core until it has started."""
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
        """Record that no child is starting, because of ``error`` if there was one."""
        with self._changed:
            self._starting = False
            if child is not None:
                self._all.discard(child)
            if error is not None and not self._closed:
                self._failed += 1
                logger.warning("a process that compiles grammars does not start", exc_info=error)
            self._changed.notify_all()

    def _why(self, child: Child, ended: ChildExited | ReplyTooLong) -> str:
        """Why the constraint ended ``child``, which has ended; empty where it was killed from outside."""
        if isinstance(ended, ReplyTooLong):
            return f"becomes an answer of more than {REPLY_BYTES} bytes"
        if child.overtime:
            return f"takes more than {self._seconds:g} s of processor time to compile"
        return "" if child.killed else "needs too much memory or stack to compile"

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is stopping")


_OVERHEAD, _TOKEN = 1_000, 36  # bytes that an entry costs beside its text, and that each token of its answers does


def key_of(spec: ConstraintSpec, fingerprint: str, cache: str = "") -> bytes:
    """The SHA-256 of a constraint, its mode and a vocabulary's fingerprint, on which its outcome depends, and of the
    tenants' part of the caches (``core.tenant.Tenant.cache``)."""
    return hashlib.sha256(json.dumps([wire.from_spec(spec), fingerprint, cache]).encode()).digest()


class Replies:
    """An LRU cache of replies by ``key_of``; may be called from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used = 0  # bytes, counted as the texts' sizes, the answers' tokens and a constant an entry
        self._entries: OrderedDict[bytes, tuple[CompileReply, int, float]] = OrderedDict()  # with size and end
        self._lock = threading.Lock()

    def get(self, key: bytes) -> CompileReply | None:
        """The reply of ``key``; None where it is not cached."""
        with self._lock:
            reply, _size, until = self._entries.get(key, (None, 0, inf))
            if reply is None or time.monotonic() > until:
                return None
            self._entries.move_to_end(key)
            return reply

    def put(self, key: bytes, reply: CompileReply) -> None:
        """Cache ``reply``, in place of an earlier one; one larger than the whole cache is not cached.

        One that is not reproducible is cached for ``LATE_SECONDS``.
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
    """Turns constraints into grammars for one vocabulary; may be called from any thread, and blocks it."""

    def __init__(self, vocabulary: TokenTable, *, seconds: float = COMPILE_SECONDS) -> None:
        self._fingerprint = vocabulary.fingerprint()
        self._replies = Replies(CACHE_BYTES)
        self._compiler = Compiler(vocabulary, seconds)
        self._compiler.warm()

    def first(self, spec: ConstraintSpec, budget: int, cache: str = "") -> tuple[Grammar, FirstAnswers]:
        """The grammar of ``spec``, which a matcher may run under ``limits.PARSER_LIMITS``, and the shortest answers
        found under it where there is room for ``budget`` tokens.

        Takes microseconds when a tenant of ``cache`` asked for it before, else milliseconds, at worst some seconds of
        processor time and a wait for those before it. Raises ``InvalidArgument`` with a violation for every reason
        why there is no grammar, ``Unavailable`` where nothing can be compiled.
        """
        key = key_of(spec, self._fingerprint, cache)
        reply = self._replies.get(key)
        if reply is None or (reply.first is not None and not reply.first.covers(budget)):
            reply = self._compiler.compile(spec, budget)
            if reply.lasting or reply.first is not None:
                self._replies.put(key, reply)
        if isinstance(reply.outcome, Refused):
            raise as_error(kind_of(spec), reply.outcome.findings)
        assert reply.first is not None  # every grammar that a child gives comes with one
        return reply.outcome, reply.first

    def close(self) -> None:
        """End the child processes."""
        self._compiler.close()
