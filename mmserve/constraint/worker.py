"""The child process in which constraints become grammars: whatever happens to it, the server goes on.

Run as ``python -m mmserve.constraint.worker SECONDS PATIENCE BYTES``; imports no torch. It reads a vocabulary, answers
``ready``, and then answers constraints, one after another, until its input ends. More than ``SECONDS`` of processor
time for one end it by SIGPROF, more than ``PATIENCE`` seconds by the clock by SIGALRM. It ends behind an answer that is
``last``: when it can no longer be trusted, or has taken more than ``BYTES`` beside the vocabulary.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
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
    seconds, patience, most = map(float, sys.argv[1:])
    _heed(signal.SIGPROF, signal.SIGALRM)
    source = sys.stdin.buffer
    from mmserve.constraint.vocabulary import trie_of

    trie = trie_of(wire.to_vocabulary(wire.read(source)))
    _send({"ready": True})
    begun = _taken()
    while (message := wire.read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, patience)  # should the server die meanwhile: nobody would kill this
        outcome, broken = _outcome(wire.to_spec(message), trie)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        last = broken or _taken() - begun > most
        _send(wire.from_outcome(outcome) | {"last": last})
        if last:
            os._exit(1)  # a panic may leave anything behind


def _outcome(spec: ConstraintSpec, trie: Any) -> tuple[Grammar | Refused, bool]:
    """The grammar of ``spec``, proved, or why there is none; and whether this process can no longer be trusted."""
    from mmserve.constraint.proving import prove

    kind = kind_of(spec)
    try:
        grammar = grammar_of(spec)
        if len(grammar.text) > REPLY_BYTES or len(json.dumps(grammar.text)) > REPLY_BYTES:
            why = f"becomes a grammar of more than {REPLY_BYTES} bytes; make it smaller, or say less of it twice"
            return Refused.at("", kind, why), False
        prove(grammar.text, trie, kind)
    except Refused as refusal:
        return refusal, False
    except MemoryError:
        return Refused.at("", kind, "needs too much memory to compile; make it smaller"), True
    except RecursionError:
        return Refused.at("", kind, "is nested too deep"), False
    except BaseException as error:  # noqa: BLE001 - a Rust panic is no Exception; whatever it is, it ends here
        return Refused.at("", kind, f"makes the grammar engine fail: {type(error).__name__}"), True
    return grammar, False


def _heed(*signals: signal.Signals) -> None:
    """Let ``signals`` end this process: whether they do is inherited from whatever started the server."""
    for each in signals:
        signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _taken() -> int:
    """Bytes of memory that this process has now; 0 where no system tells. What ``getrusage`` tells is the most it had,
    and counts what the server had when it started this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _send(message: Any) -> None:
    sys.stdout.buffer.write(wire.packed(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
