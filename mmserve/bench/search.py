"""Costs of constraints without a model: search, masks and compilation with a vocabulary as large as LLaDA's.

The model is simulated (``copyist.py``) and the vocabulary synthetic, so that no download is needed. Times are CPU time
of one thread, independent of other load.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLParserLimits

from mmserve.bench.copyist import Copyist, decode, written
from mmserve.bench.measures import Figures, Progress, percentile
from mmserve.bench.schemas import SCHEMAS, Wanted
from mmserve.constraint.compile.grammar import grammar_of
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.parser_states import ParserStateCache, SharedParserStates
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import find_first, start_witness
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.constraint.session.session import Session
from mmserve.core.constraint import ConstraintSpec, JsonSchema
from mmserve.settle import settle

#: Vocabulary size of LLaDA's logits.
TOKENS = 126_464
BLOCK = 32
_END = 0
_CONSONANTS, _VOWELS = "bcdfghklmnprstvw", "aeiou"
_JSON = (
    *('{"', '"}', '":"', '","', '":', ',"', '"},{"', '"}}', '"}]}', "},{"),
    *("[[", "]]", '["', '"]', "],[", '":[', "[{"),
)


@dataclass(frozen=True)
class Language:
    """A vocabulary in the forms that constraints use."""

    vocabulary: Vocabulary
    lexicon: Lexicon


@dataclass
class _Taken:
    """Seconds of each measured operation."""

    steps: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    rewriting: list[float] = field(default_factory=list)
    compiling: list[float] = field(default_factory=list)
    admission: list[float] = field(default_factory=list)
    readmission: list[float] = field(default_factory=list)  # of a grammar admitted before
    fallbacks: int = 0
    commits: int = 0
    exact: list[bool] = field(default_factory=list)


def made_up(tokens: int, seed: int = 0) -> Language:
    """A synthetic byte-level vocabulary of ``tokens`` tokens: all bytes, JSON punctuation as merged by BPE, numbers of
    up to three digits, the words of the built-in documents, and random words."""
    rng = random.Random(seed)
    spelled = {bytes([b]): None for b in range(256)}
    spelled.update(dict.fromkeys(text.encode() for text in _JSON))
    spelled.update(dict.fromkeys(str(i).encode() for i in range(1000)))
    for wanted in SCHEMAS:
        for part in json.dumps([wanted.schema, wanted.documents]).split('"'):
            for word in part.split():
                spelled.update(dict.fromkeys(f"{before}{word}".encode() for before in ("", " ") if word.isalnum()))
    while len(spelled) < tokens - 1:
        word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 4)))
        word += rng.choice(("", "", "n", "s", "ing"))
        spelled[rng.choice((word, word.capitalize(), f" {word}", f" {word}")).encode()] = None
    texts = [b"", *spelled]
    return Language(Vocabulary.spelled(texts, {_END}), Lexicon.of(texts))


def run(
    rounds: int, seed: int, progress: Progress, *, tokens: int = TOKENS, schemas: Sequence[Wanted] = SCHEMAS
) -> Figures:
    """Results over ``rounds`` decodes of each document of ``schemas``, with a vocabulary of ``tokens``.

    The vocabulary is frozen for the garbage collector, as in a server.
    """
    language = made_up(tokens)
    settle()
    shared = SharedParserStates(language.lexicon)
    taken = _Taken()
    for wanted in schemas:
        progress(f"search: {wanted.name}")
        grammar = _compiled(wanted, language, taken)
        for document in wanted.documents:
            _masks(grammar, document, language, taken)
            for number in range(rounds):
                rng = random.Random(f"{seed} {wanted.name} {number}")
                _decoded(grammar, document, language, shared.of(grammar), rng, taken)
    return {
        "vocabulary": tokens,
        "block_length": BLOCK,
        "steps": len(taken.steps),
        "step_ms": _figures(taken.steps),
        "fallback_share": round(taken.fallbacks / len(taken.steps), 4),
        "exact_share": round(statistics.mean(taken.exact), 4),
        "tokens_per_step": round(taken.commits / len(taken.steps), 2),
        "mask_us_mean": round(1e6 * statistics.mean(taken.masks), 1),
        "rewrite_ms": _figures(taken.rewriting),
        "compile_ms": _figures(taken.compiling),
        "admit_ms": _figures(taken.admission),
        "admit_again_ms": _figures(taken.readmission),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 50th and the 99th percentile, and the maximum."""
    return {name: round(percentile(values, share), 3) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    return percentiles([1000 * s for s in seconds])


def _compiled(wanted: Wanted, language: Language, taken: _Taken) -> Grammar:
    spec = ConstraintSpec(JsonSchema(json.dumps(wanted.schema)))
    begun = time.thread_time()
    text = grammar_of(spec).text
    rewritten = time.thread_time()
    grammar = Grammar(text, language.vocabulary, LLParserLimits(**PARSER_LIMITS))
    taken.rewriting.append(rewritten - begun)
    taken.compiling.append(time.thread_time() - rewritten)
    return grammar


def _masks(grammar: Grammar, document: Any, language: Language, taken: _Taken) -> None:
    """Measure the mask before each token of ``document``."""
    at = grammar.start()
    for token in language.lexicon.cover(written(document).encode()) or []:
        begun = time.thread_time()
        at.mask()
        taken.masks.append(time.thread_time() - begun)
        at.consume([token])


def _decoded(
    grammar: Grammar, document: Any, language: Language, states: ParserStateCache, rng: random.Random, taken: _Taken
) -> None:
    ids = language.lexicon.cover(written(document).encode()) or []
    size, first = (len(ids) // BLOCK + 2) * BLOCK, None
    for times in (taken.admission, taken.readmission):
        started = time.thread_time()
        first = first or find_first(grammar, language.lexicon, size)
        witness = start_witness(grammar, size, first.shortest(size), states)
        times.append(time.thread_time() - started)
    session = Session(ConstrainedAnswer(witness, language.lexicon))
    done = decode(session, Copyist(ids, _END, rng), block=BLOCK, clock=time.thread_time)
    taken.steps += done.seconds
    taken.fallbacks += session.stats.report().fallbacks
    taken.commits += sum(done.commits)
    taken.exact.append(json.loads(done.text(language.lexicon)) == document)
