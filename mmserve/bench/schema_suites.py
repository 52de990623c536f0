"""Which schemas of public suites are admitted, and what their grammars accept: ``mmserve bench schemas --data DIR``.

A schema is compiled as a server compiles it, in a child process with its limits, over one token a byte. Each instance
of an admitted one is then given to the grammar, and random answers of the grammar are given to jsonschema-rs. No model
is asked.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema_rs
from llguidance import LLMatcher, LLParserLimits

from mmserve.bench import suites
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.canonical import Orders
from mmserve.constraint.compile.process import Compiler
from mmserve.constraint.compile.vocabulary import BYTES, trie_of
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import COMPILE_SECONDS, PARSER_LIMITS
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema
from mmserve.errors import ConfigError

#: Bytes after which a random answer is given up, and from which on it is brought to its end.
_LONGEST, _CLOSING = 600, 120
#: Bytes that are preferred in random answers, before and after that.
_USUAL, _LAST = b'ab01"{}[],:. ', b'"]}'
_EXAMPLES = 400  # names of each kind in the report
_EVERY = 5.0  # seconds between two lines of progress


@dataclass
class _Counts:
    """What one suite came to."""

    schemas: int = 0
    admitted: int = 0
    valid: int = 0  # instances of admitted schemas
    valid_rejected: int = 0
    valid_respelled: int = 0  # accepted with members in the order of the schema and numbers without exponents only
    invalid: int = 0
    invalid_accepted: int = 0
    answers: int = 0  # drawn from grammars
    answers_invalid: int = 0
    refusals: Counter[str] = field(default_factory=Counter)  # schemas by the first keyword that was refused
    unsound: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rejecting: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """A row for each suite found under ``--data``."""
    if arguments.data is None:
        raise ConfigError("give the folder of MaskBench's or JSON-Schema-Test-Suite's files as --data")
    cases = suites.read(arguments.data, arguments.sample, arguments.seed)
    counts: dict[str, _Counts] = {}
    compiler, trie, told = Compiler(BYTES, COMPILE_SECONDS), trie_of(BYTES), time.monotonic()
    try:
        for number, case in enumerate(cases):
            if time.monotonic() - told > _EVERY:
                told = time.monotonic()
                progress(f"{number} of {len(cases)} schemas")
            _count(case, counts.setdefault(case.suite, _Counts()), compiler, trie, arguments)
    finally:
        compiler.close()
    return {
        "rows": [_row(suite, found) for suite, found in counts.items()],
        "settings": {"mode": arguments.mode, "sample": arguments.sample, "seed": arguments.seed},
    }


def _count(case: suites.Case, counts: _Counts, compiler: Compiler, trie: Any, arguments: argparse.Namespace) -> None:
    counts.schemas += 1
    spec = ConstraintSpec(JsonSchema(json.dumps(case.schema)), ConstraintMode(arguments.mode))
    outcome, _lasting = compiler.compile(spec)
    if isinstance(outcome, Refused):
        first = outcome.findings[0]
        counts.refusals[first.keyword] += 1
        counts.refused.append(f"{case.name}: {first}"[:300])
        return
    counts.admitted += 1
    judge = _judge(case.schema)
    checked = judge if not outcome.exact and spec.mode is ConstraintMode.VALIDATE else None
    at, orders = _matcher(outcome, trie), Orders(case.schema)
    for instance, valid in case.tests:
        accepted = _accepts(at, json.dumps(instance, ensure_ascii=False))
        as_written = accepted
        accepted = accepted or _accepts(at, _spelled(instance, orders))
        accepted = accepted and (checked is None or checked.is_valid(instance))
        counts.valid += valid
        counts.invalid += not valid
        counts.valid_rejected += valid and not accepted
        counts.valid_respelled += valid and accepted and not as_written
        counts.invalid_accepted += accepted and not valid
        if accepted and not valid:
            counts.unsound.append(f"{case.name}: {json.dumps(instance)}"[:300])
        if valid and not accepted:
            counts.rejecting.append(f"{case.name}: {json.dumps(instance)}"[:300])
    for answer in _drawn(at, arguments.repeats, random.Random(f"{arguments.seed} {case.name}")):
        if judge is not None and checked is None:
            counts.answers += 1
            if not judge.is_valid(json.loads(answer, parse_float=Decimal)):
                counts.answers_invalid += 1
                counts.unsound.append(f"{case.name}: {answer.decode(errors='replace')}"[:300])


def _matcher(grammar: Grammar, trie: Any) -> Any:
    return LLMatcher(trie, grammar.text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))


def _accepts(at: Any, text: str) -> bool:
    at, tokens = at.deep_copy(), list(text.encode(errors="replace"))
    return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()


def _spelled(value: Any, orders: Orders) -> str:
    """``value`` as answers spell it: members in the order of the schema, numbers without exponents."""
    match value:
        case list():
            return f"[{','.join(_spelled(each, orders) for each in value)}]"
        case dict():
            names = orders.sorted(list(value))
            return f"{{{','.join(f'{_spelled(name, orders)}:{_spelled(value[name], orders)}' for name in names)}}}"
        case float():
            return f"{Decimal(repr(value)):f}"
    return json.dumps(value, ensure_ascii=False)


def _judge(schema: Any) -> Any | None:
    """A validator, None where jsonschema-rs takes no such schema."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


def _drawn(start: Any, number: int, chance: random.Random) -> list[bytes]:
    """Up to ``number`` random answers of a grammar; those that grow too long are left out."""
    answers = []
    for _ in range(number):
        at, said = start.deep_copy(), bytearray()
        while len(said) < _LONGEST:
            mask = at.compute_bitmask()
            if at.is_error():
                break
            allowed = [token for token in range(257) if mask[token >> 3] >> (token & 7) & 1]
            if BYTES.end in allowed and (len(allowed) == 1 or chance.random() < 0.3):
                answers.append(bytes(said))
                break
            allowed = [token for token in allowed if token != BYTES.end]
            usual = [token for token in allowed if token in (_LAST if len(said) > _CLOSING else _USUAL)]
            choice = usual if usual and chance.random() < 0.8 else allowed
            if not choice or not at.consume_token(token := chance.choice(choice)):
                break
            said.append(token)
    return answers


def _row(suite: str, counts: _Counts) -> dict[str, Any]:
    return {
        "task": suite,
        "schemas": counts.schemas,
        "admitted": counts.admitted,
        "admitted_share": round(counts.admitted / counts.schemas, 4),
        "invalid": counts.invalid,
        "invalid_accepted": counts.invalid_accepted,
        "valid": counts.valid,
        "valid_rejected": counts.valid_rejected,
        "valid_rejected_share": round(counts.valid_rejected / max(1, counts.valid), 4),
        "valid_respelled": counts.valid_respelled,
        "answers": counts.answers,
        "answers_invalid": counts.answers_invalid,
        "refusals": dict(counts.refusals.most_common()),
        "unsound": counts.unsound[:_EXAMPLES],
        "refused": counts.refused[:_EXAMPLES],
        "rejecting": counts.rejecting[:_EXAMPLES],
    }
