"""What tests of constraints share: grammars over one token a byte, and what they accept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema_rs
from llguidance import LLMatcher, LLParserLimits
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import mmserve
from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.grammar import grammar_of, grammars_of
from mmserve.constraint.compile.service import Grammars
from mmserve.constraint.compile.wire import BYTES, TokenTable
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search.vocabulary import Vocabulary
from mmserve.core.constraint import ConstraintKind, ConstraintMode, ConstraintSpec, JsonSchema

STRICT = ConstraintMode.STRICT


@cache
def byte_trie() -> Any:
    return Vocabulary.of(BYTES).trie


@cache
def bundled_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(mmserve.__file__).parent / "assets" / "bundled")


def bundled_vocabulary() -> TokenTable:
    """The bundled tokenizer's tokens as bytes; special ones have none."""
    tokenizer = bundled_tokenizer()
    back = {char: byte for byte, char in bytes_to_unicode().items()}
    special = set(tokenizer.all_special_ids)
    tokens = []
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        known = index not in special and all(char in back for char in token)
        tokens.append(bytes(back[char] for char in token) if known else b"")
    return TokenTable(tuple(tokens), (tokenizer.eos_token_id,))


def schema_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def grammar(kind: ConstraintKind, mode: ConstraintMode = STRICT) -> Grammar:
    return grammar_of(ConstraintSpec(kind, mode))


def granted(grammars: Grammars, spec: ConstraintSpec) -> Grammar:
    """The grammar of ``spec`` by a child process."""
    return grammars.first(spec, 4096)[0]


def matcher(kind: ConstraintKind, mode: ConstraintMode = STRICT) -> LLMatcher:
    """A matcher at the beginning of the first grammar of ``kind`` that compiles; ``Refused`` where none does."""
    first: Refused | None = None
    for each in grammars_of(ConstraintSpec(kind, mode)):
        made = LLMatcher(byte_trie(), each.text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        if not made.is_error():
            return made
        first = first or Refused.at("", "compile", made.get_error())
    assert first is not None
    raise first


def schema_matcher(schema: Any, mode: ConstraintMode = STRICT) -> LLMatcher:
    return matcher(JsonSchema(schema_text(schema)), mode)


def accepts(at: LLMatcher, text: str) -> bool:
    at = at.deep_copy()
    tokens = list(text.encode())
    return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def enforced_among(schema: Any, documents: Iterable[Any]) -> tuple[int, int]:
    """How many of ``documents`` the judge takes and how many it refuses; the grammar does the same with each, in some
    order of an object's members, or an assertion fails."""
    judge, at = jsonschema_rs.validator_for(schema), schema_matcher(schema)
    counts = [0, 0]
    for document in documents:
        orders = permutations(document.items()) if isinstance(document, dict) else ()
        spelled = [compact(dict(members)) for members in orders] or [compact(document)]
        right = judge.is_valid(document)
        assert any(accepts(at, text) for text in spelled) is right, (schema, document)
        counts[not right] += 1
    return counts[0], counts[1]


def enforced(schema: Any, taken: list[Any], refused: list[Any]) -> None:
    """The judge and the grammar both take all of ``taken`` and nothing of ``refused``, or an assertion fails."""
    judge = jsonschema_rs.validator_for(
        json.loads(schema) if isinstance(schema, str) else schema, validate_formats=True, offline=True
    )
    at = schema_matcher(schema)
    for value, right in [*((v, True) for v in taken), *((v, False) for v in refused)]:
        assert judge.is_valid(value) is right, f"the test is wrong about {value}"
        assert accepts(at, compact(value)) is right, value


def sentence(at: LLMatcher, chance: random.Random, longest: int = 200) -> str | None:
    """A random sentence of the grammar, None where none was found in ``longest`` bytes."""
    at = at.deep_copy()
    said = bytearray()
    while len(said) < longest:
        mask = at.compute_bitmask()
        if at.is_error():
            return None
        allowed = [token for token in range(257) if mask[token >> 3] >> (token & 7) & 1]
        if BYTES.ends[0] in allowed and (len(allowed) == 1 or chance.random() < 0.3):
            return said.decode()
        allowed = [token for token in allowed if token != BYTES.ends[0]]
        if not allowed:
            return None
        closing = [token for token in allowed if token in b'"]}']
        usual = [token for token in allowed if token in b'ab1"{}[],:0x.eE+-']
        if len(said) > longest // 4 and closing and chance.random() < 0.8:
            allowed = closing
        elif usual and chance.random() < 0.8:
            allowed = usual
        said.append(chance.choice(allowed))
        assert at.consume_token(said[-1])
    return None
