"""The child process in which constraints become grammars: whatever happens to it, the server goes on.

Run as ``python -m mmserve.constraint.worker SECONDS``; imports no torch. It reads a vocabulary, answers ``ready``, and
then answers constraints, one after another, until its input ends. More than ``SECONDS`` for one ends it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

from mmserve.constraint import wire
from mmserve.constraint.findings import Refused
from mmserve.constraint.grammar import Grammar, grammar_of, kind_of
from mmserve.constraint.limits import CHILD_BYTES, REPLY_BYTES
from mmserve.core.constraint import ConstraintSpec


def main() -> None:
    """Serve standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = float(sys.argv[1])
    source = sys.stdin.buffer
    from mmserve.constraint.vocabulary import trie_of

    trie = trie_of(wire.to_vocabulary(wire.read(source)))
    _send({"ready": True})
    while (message := wire.read(source)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)  # should the server die meanwhile: nobody would kill this
        outcome, broken = _outcome(wire.to_spec(message), trie)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(wire.from_outcome(outcome) | {"last": broken})
        if broken:
            os._exit(1)  # a panic may leave anything behind


def _outcome(spec: ConstraintSpec, trie: Any) -> tuple[Grammar | Refused, bool]:
    """The grammar of ``spec``, proved, or why there is none; and whether this process can no longer be trusted."""
    from mmserve.constraint.proving import prove

    kind = kind_of(spec)
    try:
        grammar = grammar_of(spec)
        prove(grammar.text, trie, kind)
    except Refused as refusal:
        return refusal, False
    except MemoryError:
        return Refused.at("", kind, "needs too much memory"), True
    except RecursionError:
        return Refused.at("", kind, "is nested too deep"), False
    except BaseException as error:  # noqa: BLE001 - a Rust panic is no Exception; whatever it is, it ends here
        return Refused.at("", kind, f"makes the grammar engine fail: {type(error).__name__}"), True
    if len(grammar.text) > REPLY_BYTES:
        return Refused.at("", kind, f"becomes a grammar of more than {REPLY_BYTES} bytes"), False
    return grammar, False


def _send(message: Any) -> None:
    sys.stdout.buffer.write(wire.packed(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
