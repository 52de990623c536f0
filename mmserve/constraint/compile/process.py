"""The server's end of the child processes that compile: two, so that a slow constraint does not delay another."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from mmserve.constraint.compile import wire
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.grammar import kind_of
from mmserve.constraint.compile.vocabulary import TokenTable
from mmserve.constraint.compile.wire import CompileReply
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import ANSWER_SECONDS, CHILDREN, IDLE_BYTES, QUICK_SECONDS, REPLY_BYTES, START_SECONDS
from mmserve.core.child_process import ChildExited, ChildProcess
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema
from mmserve.errors import Unavailable

#: A program that compiles and searches nothing.
PROGRAM = "mmserve.constraint.compile.worker"


class ReplyTooLong(Exception):
    """An answer of more bytes than any is let grow to."""


class Child(ChildProcess):
    """``program``, a module that runs ``compile.worker.serve``, in a process of its own.

    A question may take it ``seconds`` of processor time. Should its owner be gone, it ends after twice ``patience``
    seconds by the clock at the latest.
    """

    def __init__(self, seconds: float, patience: float, program: str = PROGRAM) -> None:
        super().__init__(program, str(seconds), str(2 * patience), str(IDLE_BYTES))

    def read(self, vocabulary: TokenTable) -> None:
        """Have it read ``vocabulary``, as the first thing. Raises ``TimeoutError`` or ``ChildExited``."""
        self.ask(wire.from_vocabulary(vocabulary), START_SECONDS)

    def ask(self, message: Any, seconds: float) -> Any:
        """The answer to ``message``; the child is of no more use where there is none.

        Raises ``TimeoutError`` after ``seconds`` by the clock, ``ChildExited`` where the child ends,
        ``ReplyTooLong`` for a reply above the limit.
        """
        deadline = time.monotonic() + seconds

        def check() -> None:
            if time.monotonic() >= deadline:
                raise TimeoutError

        self._write(wire.packed(message), check)
        size = int.from_bytes(self._read(wire.HEADER, check), "big")
        if size > 2 * REPLY_BYTES:
            raise ReplyTooLong
        return wire.unpacked(self._read(size, check))


logger = logging.getLogger("mmserve.constraint")

#: How many are asked for one constraint, where the one before was killed.
_ASKED = 3
#: Questions about one schema that may be widened, where compiling it ends the child that is asked.
_WIDER = 3


class Compiler:
    """Child processes over one vocabulary, each with one constraint at a time; may be called from any thread.

    A constraint that needs more than ``seconds`` of processor time, or that ends its child, is refused; another child
    takes its place, and the one that ended is replaced in the background. What is asked of a child that was killed from
    outside is asked of the next. A child that says nothing for ``patience`` seconds by the clock is ended, too: that is
    no constraint's fault.
    """

    def __init__(
        self, vocabulary: TokenTable, seconds: float, patience: float = ANSWER_SECONDS, program: str = PROGRAM
    ) -> None:
        self._vocabulary, self._program = vocabulary, program
        self._slow = threading.BoundedSemaphore(
            max(1, CHILDREN - 1)
        )  # of those that take long: a child is left to others
        self._seconds, self._patience = seconds, patience
        self._changed = threading.Condition()  # over the fields below; nobody holds it long
        self._idle: list[Child] = []  # have read the vocabulary, and nobody asks them; the last one is asked next
        self._all: set[Child] = set()  # those, and those that start or are asked
        self._wanted = 0  # so many of them there should be
        self._starting = False
        self._failed = 0  # starts
        self._closed = False

    def compile(self, spec: ConstraintSpec) -> tuple[Grammar | Refused, bool]:
        """The grammar of ``spec`` or why there is none, and whether the same would come of it again. Raises as
        ``begin``."""
        begun = self.begin(spec, None)
        return begun.outcome, begun.lasting

    def begin(self, spec: ConstraintSpec, budget: int | None) -> CompileReply:
        """The same, and the first answer of at most ``budget`` tokens, if one is asked for.

        What takes longer than most goes on after those that do not. Raises ``Unavailable`` where no child can be
        started, where each is killed from outside or one stands still, or after ``close``.
        """
        widens = isinstance(spec.kind, JsonSchema) and spec.mode is not ConstraintMode.STRICT
        for failed in range(_WIDER if widens else 1):
            question = wire.from_spec(spec) | {"budget": budget, "failed": failed}
            reply = self._asked(spec, question | {"quick": QUICK_SECONDS, "grammar": None})
            if isinstance(reply, dict) and "slow" in reply:
                with self._slow:
                    reply = self._asked(spec, question | {"quick": None, "grammar": reply["grammar"]})
            if isinstance(reply, dict) and not (reply["last"] and "refused" in reply):
                break
        return reply if isinstance(reply, CompileReply) else wire.to_begun(reply)

    def _asked(self, spec: ConstraintSpec, message: dict[str, Any]) -> dict[str, Any] | CompileReply:
        """What a child answers to ``message`` about ``spec``, or why none does."""
        for _ in range(_ASKED):
            child = self._taken()
            keep = False
            try:
                reply: dict[str, Any] = child.ask(message, self._patience)
                keep = not reply["last"]  # else it ends by itself, but maybe not before the next constraint
                return reply
            except TimeoutError as error:
                why = f"the process that compiles grammars said nothing for {self._patience:g} s"
                raise Unavailable(f"{why}: it was halted, or gets hardly any processor; try again later") from error
            except (ChildExited, ReplyTooLong) as error:
                self._refuse_if_closed()
                ended = error
            finally:
                (self._put_back if keep else self._drop)(child)
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
        """End the children, and what they are at; nothing is compiled any more. May be called twice."""
        with self._changed:
            self._closed = True
            for child in self._all:
                child.kill()
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._all) == len(self._idle))  # whoever has one hears of its end
            for child in self._idle:
                child.end()
            self._all.clear()
            self._idle.clear()

    @property
    def pid(self) -> int | None:
        """The process id of the child that is asked next; None where none is idle."""
        idle = self._idle[-1:]
        return idle[0].pid if idle else None

    @property
    def standby(self) -> int | None:
        """The process id of the child that is asked after that one; None where it is not idle."""
        idle = self._idle[-2:-1]
        return idle[0].pid if idle else None

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

    def _put_back(self, child: Child) -> None:
        with self._changed:
            self._idle.append(child)
            self._changed.notify_all()

    def _drop(self, child: Child) -> None:
        """End a child that was asked, and have another one in its place."""
        child.end()
        with self._changed:
            self._all.discard(child)
            self._fill(CHILDREN)
            self._changed.notify_all()

    def _fill(self, wanted: int) -> None:
        """Have children started until there are ``wanted``, in the background. Under the lock."""
        self._wanted = max(self._wanted, wanted)
        if self._starting or self._closed or len(self._all) >= self._wanted:
            return
        self._starting = True
        try:
            threading.Thread(target=self._start, name="grammar-compiler", daemon=True).start()
        except Exception as error:  # noqa: BLE001 - no thread is to be had: whoever waits must hear of it
            self._ended(error)

    def _start(self) -> None:
        """Start what is missing, one after another: each child takes a core until it has started."""
        while (child := self._begun()) is not None:
            try:
                child.read(self._vocabulary)
            except Exception as error:  # noqa: BLE001 - whatever it is: whoever waits for this child must hear of it
                child.end()
                self._ended(error, child)
                return
            with self._changed:
                self._idle.insert(0, child)
                self._changed.notify_all()

    def _begun(self) -> Child | None:
        """A child that starts; None where none is missing, or no process can be made: then none is starting."""
        with self._changed:
            if self._closed or len(self._all) >= self._wanted:
                self._ended()
                return None
            try:
                child = Child(self._seconds, self._patience, self._program)
            except Exception as error:  # noqa: BLE001 - as above
                self._ended(error)
                return None
            self._all.add(child)
            return child

    def _ended(self, error: Exception | None = None, child: Child | None = None) -> None:
        """Nothing is starting any more, for ``error`` if there was one."""
        with self._changed:
            self._starting = False
            if child is not None:
                self._all.discard(child)
            if error is not None and not self._closed:
                self._failed += 1
                logger.warning("a process that compiles grammars does not start", exc_info=error)
            self._changed.notify_all()

    def _why(self, child: Child, ended: ChildExited | ReplyTooLong) -> str:
        """What of the constraint ended ``child``, which has ended; nothing where it was killed from outside."""
        if isinstance(ended, ReplyTooLong):
            return f"becomes an answer of more than {REPLY_BYTES} bytes"
        if child.overtime:
            return f"takes more than {self._seconds:g} s of processor time to compile"
        return "" if child.killed else "needs too much memory or stack to compile"

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is stopping")
