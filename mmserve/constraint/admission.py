"""Where a constrained request begins: its grammar, compiled and proved elsewhere, and the first witness of its answer.

Runs on a worker of its own, two at once: a grammar takes milliseconds, a bad one two seconds of a processor, and nobody
else shall wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLParserLimits
from tokenizers import Tokenizer

from mmserve.constraint.compile.service import Grammars
from mmserve.constraint.compile.vocabulary import Vocabulary as Proved
from mmserve.constraint.limits import LARGE_BYTES, PARSER_LIMITS
from mmserve.constraint.search import first_witness as first
from mmserve.constraint.search.concatenation import Concatenation
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.shared import SharedParserStates
from mmserve.constraint.search.vocabulary import Vocabulary, spell
from mmserve.constraint.search.witness import Infeasible, Witness, fitting, start_witness
from mmserve.constraint.session.answer import ConstrainedAnswer, Split
from mmserve.constraint.session.draws import SampleState
from mmserve.constraint.session.futures import PrefixNode
from mmserve.constraint.session.judge import Judge, judge_of
from mmserve.constraint.session.session import Session
from mmserve.constraint.session.template import Layout, TemplateAnswer, laid_out
from mmserve.constraint.session.templates import OpenedHole, one_by_one, opened, side_by_side, spelling
from mmserve.core.constraint import ConstraintSampling, ConstraintSpec, Hole, Regex, Template
from mmserve.errors import InvalidArgument, MMServeError, Unavailable, Unimplemented
from mmserve.models.base import EncoderModel

logger = logging.getLogger("mmserve.decode")

#: What a hole without a constraint holds.
ANYTHING = Regex(r"[\s\S]*")

#: Bytes of grammars up to which the samples of a request have parsers of their own: to compile more takes too long, and
#: as searches have parsers apart, samples that share one take little of its limits.
_APART = 100_000


@dataclass(frozen=True)
class _Admitted:
    """A constraint that can be kept within its request's budget."""

    witness: Witness
    lexicon: Lexicon
    warnings: tuple[str, ...]
    judge: Judge | None  # of the finished answer, where its grammar is wider than the constraint
    sampled: SampleState | None = None  # where tokens are drawn true to the model
    judges: tuple[Judge | None, ...] = ()  # of what fills each hole of a template
    split: Split | None = None  # of a template that is one language
    layout: Layout | None = None  # of a template whose holes have a state each
    given: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # as of ``ConstrainedAnswer``

    def answer(self) -> ConstrainedAnswer:
        """The answer of a sample that begins."""
        if self.layout is not None:
            return TemplateAnswer.of(self.layout, self.lexicon, self.warnings, self.judge, self.judges)
        sampled = None if self.sampled is None else replace(self.sampled, met=[])
        return ConstrainedAnswer(
            self.witness,
            self.lexicon,
            self.warnings,
            self.judge,
            sampled,
            judges=self.judges,
            split=self.split,
            given=self.given,
        )

    def apart(self) -> _Admitted:
        """The same for another sample, with parsers of its own: what one has spent of their limits is not missed by the
        others. Takes as long as compiling."""
        if self.layout is not None:
            return replace(self, layout=self.layout.apart())
        witness = self.witness.apart()
        return replace(self, witness=witness, split=splitter(witness) if self.split is not None else None)

    @property
    def weight(self) -> int:
        """Bytes of the grammars that ``apart`` compiles."""
        witnesses = [self.witness] if self.layout is None else [witness for _start, witness in self.layout.holes]
        return sum(each.language.weight for each in witnesses if each.language is not None)


@dataclass(frozen=True)
class _Language:
    """What constraints over one model's tokens need; made once, with the first of them."""

    vocabulary: Vocabulary
    lexicon: Lexicon
    states: SharedParserStates
    grammars: Grammars
    tokenizer: Tokenizer
    large: threading.Lock  # held while a large grammar is compiled: others are to have a processor meanwhile
    ends: tuple[int, int]  # the token that ends an answer, and the one that fills a canvas after it
    cache: str = ""  # the tenants' part of the caches

    def opened(self, spec: ConstraintSpec, budget: int, field: str) -> OpenedHole:
        """The grammar of ``spec`` and the first witness of ``budget`` positions; ``field`` is what names the budget."""
        grammar, found = self.grammars.first(spec, budget, self.cache)
        judge = judge_of(spec, exact=grammar.exact)
        with failures(f"at least {{}} for {{}} that obeys the constraint, not {budget}", field):
            close = fitting(found, budget)
            with self.large if len(grammar.text) > LARGE_BYTES else contextlib.nullcontext():
                compiled = Grammar(grammar.text, self.vocabulary, LLParserLimits(**PARSER_LIMITS))
                witness = start_witness(compiled, budget, close, self.states.of(compiled, self.cache))
        return OpenedHole(compiled, witness, grammar.warnings, judge, grammar.longest)

    def filled(self, hole: Hole) -> OpenedHole:
        """A template's hole."""
        return self.opened(ConstraintSpec(hole.kind or ANYTHING, hole.mode), hole.max_tokens, "max_tokens")

    def spelling(self, text: str) -> list[int]:
        """``text`` in the model's tokens."""
        return spelling(text, self.tokenizer, self.lexicon)


@contextmanager
def failures(why: str, field: str) -> Iterator[None]:
    """What goes wrong with a grammar that was proved, as the request's error; ``why`` has states for the number of
    tokens that are needed and for what needs them."""
    try:
        yield
    except Infeasible as error:
        if error.needed is None:
            raise Unimplemented(
                "the search for an answer that obeys the constraint gave up, and there may be one; "
                "make the constraint simpler"
            ) from error
        known = "the shortest answer" if error.exact else "the shortest answer found"
        known = "any answer" if error.hopeless else known
        raise InvalidArgument.of(field, f"must be {why.format(error.needed, known)}") from error
    except (KeyboardInterrupt, SystemExit, MMServeError):
        raise
    except BaseException as error:
        logger.warning("a grammar that was proved cannot be begun", exc_info=error)
        raise InvalidArgument.of("constraint", f"makes the grammar engine fail: {type(error).__name__}") from error


class Admission:
    """Admits constrained requests to one model; may be called from any thread, and blocks it."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self._language: _Language | None = None
        self._closed = False
        self._lock = threading.Lock()

    def admit(
        self, spec: ConstraintSpec, budget: int, samples: int = 1, cache: str = "", *, speculates: bool = True
    ) -> list[Session]:
        """A session for each of ``samples`` answers of ``budget`` tokens that obey ``spec``.

        Args:
            cache: what is kept of ``spec`` serves requests of these tenants only (``core.tenant.Tenant.cache``).
            speculates: whether forced text may be run as a draft where tokens are drawn true to the model. A repetition
                penalty counts tokens of the canvas, and a draft is not there yet.

        Raises:
            InvalidArgument: there is no grammar for ``spec`` (every reason is given), or ``budget`` is too small (the
                number needed is given).
            Unimplemented: the model's tokens cannot be constrained, or the search for an answer gave up, so that it is
                not known whether there is one.
        """
        first = self._first(spec, budget, cache, speculates=speculates)
        admitted = [first] * samples
        if first.weight * (samples - 1) <= _APART:
            with failures("at least {}, the length of {}", "sampling.max_new_tokens"):
                admitted = [first, *(first.apart() for _ in range(samples - 1))]
        return [Session(each.answer(), self._model.spec.causal) for each in admitted]

    def _first(self, spec: ConstraintSpec, budget: int, cache: str, *, speculates: bool) -> _Admitted:
        language = replace(self._made(), cache=cache)
        if isinstance(spec.kind, Template):
            return self._template(language, spec.kind, budget)
        whole = language.opened(spec, budget, "sampling.max_new_tokens")
        if spec.sampling is not ConstraintSampling.MASK:  # a draw is from what the model says beside open positions
            sampled = SampleState(
                PrefixNode() if spec.sampling is ConstraintSampling.ASAP else None, speculates=speculates
            )
            return _Admitted(whole.witness, language.lexicon, whole.warnings, whole.judge, sampled)
        begins = whole.witness.resized(self._reach(whole, budget))
        given = laid_out([begins], budget, language.ends).fixed
        return _Admitted(whole.witness, language.lexicon, whole.warnings, whole.judge, given=given)

    def _template(self, language: _Language, template: Template, budget: int) -> _Admitted:
        found = opened(template, language.filled)
        holes = [part for part in found if isinstance(part, OpenedHole)]
        warnings = tuple(dict.fromkeys(warning for hole in holes for warning in hole.warnings))
        judges = tuple(hole.judge for hole in holes)
        if self._model.spec.causal:
            with failures(f"at least {{}} for the template, not {budget}", "sampling.max_new_tokens"):
                witness = one_by_one(found, language.vocabulary, language.lexicon, budget)
            split = splitter(witness)
            return _Admitted(witness, language.lexicon, warnings, None, judges=judges, split=split)
        parts = list[list[int] | Witness]()
        for part in found:
            if isinstance(part, str):
                parts.append(language.spelling(part))
            else:
                size = len(part.witness.tokens)
                reach = self._reach(part, size)
                parts += [part.witness.resized(reach), [language.ends[1]] * (size - reach)]
        layout = side_by_side(parts, budget, language.ends)
        return _Admitted(holes[0].witness, language.lexicon, warnings, None, judges=judges, layout=layout)

    def _reach(self, opened: OpenedHole, size: int) -> int:
        """Of ``size`` positions of a canvas, those that an answer may come to: after them padding stands from the
        start. That takes nothing from anybody: no other token could stand there, in whichever tokens an answer is
        spelled. A next-token model has seen none of it, and canvases of random tokens are padded by their own rule."""
        spec = self._model.spec
        if opened.longest is None or spec.causal or spec.renoising is not None:
            return size
        return min(size, max(opened.longest, opened.witness.length, 1))

    def warm(self) -> None:
        """Make ready now what the first constraint would wait for; for a model without constraints, nothing."""
        with contextlib.suppress(Unimplemented, Unavailable):  # whoever asks is told
            self._made()

    def close(self) -> None:
        """End the processes that compile; nothing is admitted any more."""
        with self._lock:
            self._closed = True
            if self._language is not None:
                self._language.grammars.close()

    def _made(self) -> _Language:
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping")
            if self._language is None:
                self._language = _language(self._model)
            return self._language


def splitter(witness: Witness) -> Split | None:
    """What a template's answer is split by; None where it is not one language.

    By a parser that nothing else is asked of: it is needed when the answer is whole."""
    row = witness.language
    return row.apart().split if isinstance(row, Concatenation) else None


def spelled_vocabulary(model: EncoderModel) -> Vocabulary:
    """The tokens that constraints of ``model`` are over. Raises ``Unimplemented`` where it is not known what they
    spell."""
    tokenizer, spec = model.tokenizer.backend_tokenizer, model.spec
    size = model.vocab_size
    try:
        spelled = spell(tokenizer)
    except ValueError as error:
        raise Unimplemented(f"model {spec.name!r} decodes without constraints: {error}") from error
    banned = {*spec.banned_ids, spec.mask_id}
    generated = [b"" if i in banned else text for i, text in enumerate(spelled[:size])]
    return Vocabulary.spelled(generated + [b""] * (size - len(generated)), spec.end_ids, tokenizer)


def _language(model: EncoderModel) -> _Language:
    tokenizer, spec = model.tokenizer.backend_tokenizer, model.spec
    vocabulary = spelled_vocabulary(model)
    proved = Proved(vocabulary.token_bytes, min(spec.end_ids), tuple(sorted(spec.end_ids)))
    padding = min(spec.end_ids) if spec.padding_id is None else spec.padding_id
    ends = min(spec.end_ids - {padding}, default=padding), padding
    lexicon = Lexicon.of(vocabulary.token_bytes)
    grammars = Grammars(proved, program=first.__name__)
    states = SharedParserStates(lexicon)
    return _Language(vocabulary, lexicon, states, grammars, tokenizer, threading.Lock(), ends)
