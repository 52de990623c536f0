"""The server's end of the child processes: one that compiles, and one that stands by for when that has to be killed."""

from __future__ import annotations

import contextlib
import threading

from mmserve.constraint import wire
from mmserve.constraint.child import Child, Overdue
from mmserve.constraint.findings import Refused
from mmserve.constraint.grammar import Grammar, kind_of
from mmserve.constraint.vocabulary import Vocabulary
from mmserve.core.constraint import ConstraintSpec
from mmserve.errors import Unavailable

#: How many are asked for one constraint, where the one before was killed.
_CHILDREN = 3


class Compiler:
    """Child processes over one vocabulary, one constraint at a time; may be called from any thread.

    A constraint that needs more than ``seconds``, or that ends the child, is refused; the child that stands by takes
    its place, and another is started in the background. One whose child was killed from outside is asked of the next.
    """

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._asking = threading.Lock()  # held for as long as a constraint takes
        self._spare = threading.Lock()  # held for as long as a start takes
        self._lock = threading.Lock()  # of the fields below; nobody waits for it long
        self._child: Child | None = None
        self._standby: Child | None = None  # has read the vocabulary
        self._all: set[Child] = set()
        self._closed = False

    def compile(self, spec: ConstraintSpec) -> tuple[Grammar | Refused, bool]:
        """The grammar of ``spec`` or why there is none, and whether the same would come of it again.

        Raises ``Unavailable`` where no child can be started or each is killed from outside, or after ``close``.
        """
        with self._asking:
            for _ in range(_CHILDREN):
                child = self._ready()
                try:
                    reply = child.ask(wire.from_spec(spec), self._seconds)
                except TimeoutError:
                    self._drop(child)
                    return Refused.at("", kind_of(spec), f"takes more than {self._seconds:g} s to compile"), False
                except Overdue:
                    self._drop(child)
                    self._refuse_if_closed()
                    if not child.killed:
                        return Refused.at("", kind_of(spec), "needs too much memory or stack to compile"), False
                else:
                    if reply["last"]:  # it ends by itself, but maybe not before the next constraint
                        self._drop(child)
                    return wire.to_outcome(reply), True
            raise Unavailable(
                "something kills the processes that compile grammars (for want of memory, most likely); try again later"
            )

    def warm(self) -> None:
        """Start what is missing now, in the background: a start takes a second, and longer with a large vocabulary."""
        threading.Thread(target=self._fill, name="grammar-compiler", daemon=True).start()

    def close(self) -> None:
        """End the children, and what one of them is at; nothing is compiled any more. May be called twice."""
        with self._lock:
            self._closed = True
            for child in self._all:
                child.kill()
        with self._asking, self._spare, self._lock:  # whoever waited for a child has heard of its end
            for child in self._all:
                child.end()
            self._all.clear()
            self._child = self._standby = None

    @property
    def pid(self) -> int | None:
        """The process id of the child that is asked next, once there is one."""
        child = self._child or self._standby
        return None if child is None else child.pid

    @property
    def standby(self) -> int | None:
        """The process id of the child behind that one, once there is one."""
        child = self._standby
        return None if child is None or self._child is None else child.pid

    def _ready(self) -> Child:
        """The child to ask; waits for a start where none stands by."""
        with self._lock:
            child = self._child
        if child is not None and child.alive:
            return child
        if child is not None:
            self._drop(child)
        child = self._taken()
        while child is None:
            self._prepare()
            child = self._taken()
        self.warm()
        return child

    def _taken(self) -> Child | None:
        """The child that stood by, which is asked from now on; None if there was none."""
        self._refuse_if_closed()
        with self._lock:
            child, self._standby = self._standby, None
            if child is not None and child.alive:
                self._child = child
                return child
        if child is not None:
            self._drop(child)
        return None

    def _fill(self) -> None:
        with contextlib.suppress(Unavailable):  # whoever asks next is told
            self._prepare()

    def _prepare(self) -> None:
        """Start a child to stand by, unless one does. Raises ``Unavailable``."""
        with self._spare:
            if self._standby is not None:
                return
            with self._lock:
                if self._closed:
                    raise Unavailable("the server is stopping")
                child = Child(self._seconds)
                self._all.add(child)
            try:
                child.read(self._vocabulary)
            except (TimeoutError, Overdue) as error:
                self._drop(child)
                self._refuse_if_closed()
                raise Unavailable("the process that compiles grammars does not start") from error
            with self._lock:
                self._standby = child

    def _drop(self, child: Child) -> None:
        with self._lock:
            self._all.discard(child)
            if self._child is child:
                self._child = None
        child.end()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is stopping")
