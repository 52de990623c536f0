"""Admission of the schemas of public suites, and correctness of their grammars: ``mmserve bench schemas --data DIR``.

A schema is compiled as in a server, in a child process with the same limits, with one token a byte. Then each instance
of an admitted schema is matched against the grammar, and random answers generated from the grammar are validated by
jsonschema-rs. No model is used.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from typing import Any

import jsonschema_rs
from llguidance import LLMatcher, LLParserLimits

from mmserve.bench import suites
from mmserve.bench.measures import Figures, Progress
from mmserve.bench.resumed import Kept
from mmserve.bench.suites import Counts, Found
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.document import Orders
from mmserve.constraint.compile.service import Compiler
from mmserve.constraint.compile.wire import BYTES
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import COMPILE_SECONDS, PARSER_LIMITS
from mmserve.constraint.search.vocabulary import Vocabulary
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema, SchemaOption
from mmserve.errors import ConfigError

#: Bytes after which a random answer is abandoned, and from which on it is steered towards its end.
_LONGEST, _CLOSING = 600, 120
#: Bytes preferred in random answers, before and after that.
_USUAL, _LAST = b'ab01"{}[],:. ', b'"]}'
_CHARS = 300  # kept of a rejection reason, an instance or an answer
_EVERY = 5.0  # seconds between two lines of progress


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each suite found in ``--data``, with its schemas in random order.

    Schemas found in ``--resume`` are not compiled again; raises ``ConfigError`` if the settings differed.
    """
    if arguments.data is None:
        raise ConfigError("give the folder of MaskBench's or JSON-Schema-Test-Suite's files as --data")
    cases = suites.read(arguments.data, arguments.sample, arguments.seed)
    if unknown := set(arguments.schema_option) - set(SchemaOption):
        raise ConfigError(f"--schema-option must be one of {', '.join(SchemaOption)}, not {min(unknown)!r}")
    settings = {"mode": arguments.mode, "seed": arguments.seed, "repeats": arguments.repeats}
    settings["schema_options"] = sorted(arguments.schema_option)
    kept = Kept(arguments.resume, "schemas", settings, ("suite", "name"))
    counts: dict[str, Counts] = {}
    compiler, trie, shown = Compiler(BYTES, COMPILE_SECONDS), Vocabulary.of(BYTES).trie, time.monotonic()
    try:
        for number, case in enumerate(cases):
            if time.monotonic() - shown > _EVERY:
                shown = time.monotonic()
                progress(f"{number} of {len(cases)} schemas; {'; '.join(map(str, counts.values()))}")
            found = kept.row({"suite": case.suite, "name": case.name})
            if found is None:
                found = kept.add(asdict(_found(case, compiler, trie, arguments)))
            counts.setdefault(case.suite, Counts(case.suite)).add(Found(**found))
    finally:
        compiler.close()
    return {"rows": [found.row() for found in counts.values()], "settings": settings | {"sample": arguments.sample}}


def _found(case: suites.Case, compiler: Compiler, trie: Any, arguments: argparse.Namespace) -> Found:
    schema, tests = case.read()
    options = tuple(map(SchemaOption, arguments.schema_option))
    spec = ConstraintSpec(JsonSchema(json.dumps(schema), options), ConstraintMode(arguments.mode))
    found = Found(case.suite, case.name)
    outcome = compiler.compile(spec).outcome
    if isinstance(outcome, Refused):
        found.keyword, found.refusal = outcome.findings[0].keyword, str(outcome.findings[0])[:_CHARS]
        return found
    judge = _judge(schema)
    checked = judge if not outcome.exact and spec.mode is ConstraintMode.VALIDATE else None
    at, orders = _matcher(outcome, trie), Orders(schema)
    for instance, valid in tests:
        accepted = _accepts(at, json.dumps(instance, ensure_ascii=False))
        as_written = accepted
        accepted = accepted or _accepts(at, _spelled(instance, orders))
        accepted = accepted and (checked is None or checked.is_valid(instance))
        found.valid += valid
        found.invalid += not valid
        found.valid_respelled += valid and accepted and not as_written
        if accepted and not valid:
            found.invalid_accepted.append(json.dumps(instance)[:_CHARS])
        if valid and not accepted:
            found.valid_rejected.append(json.dumps(instance)[:_CHARS])
    for answer in _drawn(at, arguments.repeats, random.Random(f"{arguments.seed} {case.name}")):
        if judge is not None and checked is None:
            try:
                value = json.loads(answer, parse_float=Decimal)
            except InvalidOperation:  # the exponent is out of range for decimals
                continue
            found.answers += 1
            if not judge.is_valid(value):
                found.answers_invalid.append(answer.decode(errors="replace")[:_CHARS])
    return found


def _matcher(grammar: Grammar, trie: Any) -> Any:
    return LLMatcher(trie, grammar.text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))


def _accepts(at: Any, text: str) -> bool:
    at, tokens = at.deep_copy(), list(text.encode(errors="replace"))
    return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()


def _spelled(value: Any, orders: Orders) -> str:
    """``value`` as the grammar spells it: members in the order of the schema, numbers without exponents."""
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
    """A validator; None if jsonschema-rs rejects the schema."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


def _drawn(start: Any, number: int, chance: random.Random) -> list[bytes]:
    """Up to ``number`` random answers of a grammar; those that become too long are left out."""
    answers = []
    for _ in range(number):
        at, text = start.deep_copy(), bytearray()
        while len(text) < _LONGEST:
            mask = at.compute_bitmask()
            if at.is_error():
                break
            allowed = [token for token in range(257) if mask[token >> 3] >> (token & 7) & 1]
            if BYTES.ends[0] in allowed and (len(allowed) == 1 or chance.random() < 0.3):
                answers.append(bytes(text))
                break
            allowed = [token for token in allowed if token != BYTES.ends[0]]
            usual = [token for token in allowed if token in (_LAST if len(text) > _CLOSING else _USUAL)]
            choice = usual if usual and chance.random() < 0.8 else allowed
            if not choice or not at.consume_token(token := chance.choice(choice)):
                break
            text.append(token)
    return answers
