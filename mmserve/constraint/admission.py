"""Admission of constrained requests: a grammar, compiled and probed in a child process, and a session for each sample.

Runs on two threads of its own: compiling a grammar takes milliseconds, a pathological one two seconds of CPU time, and
no other request waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llguidance import LLParserLimits
from tokenizers import Tokenizer

from mmserve.constraint.compile.document import effective_schema
from mmserve.constraint.compile.service import Grammars
from mmserve.constraint.compile.wire import TokenTable
from mmserve.constraint.limits import LARGE_BYTES, MAX_TEMPLATE_BYTES, MAX_TEMPLATE_SECONDS, PARSER_LIMITS
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.parser_states import SharedParserStates
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary, spell
from mmserve.constraint.search.witness import Infeasible, Witness, fitting, start_witness
from mmserve.constraint.session.answer import ConstrainedAnswer, splitter
from mmserve.constraint.session.sampling import PrefixNode, SampleState
from mmserve.constraint.session.session import Session
from mmserve.constraint.session.template import OpenedHole, TemplateAnswer, laid_out, one_by_one, opened, spelling
from mmserve.constraint.session.validation import AnswerValidator, ValidatorProcess, validator_of
from mmserve.core.constraint import (
    CheckedConstraint,
    ConstraintSampling,
    ConstraintSpec,
    Hole,
    JsonSchema,
    Regex,
    Template,
)
from mmserve.errors import FailedPrecondition, InvalidArgument, MMServeError, Unavailable, Unimplemented
from mmserve.models.base import EncoderModel

logger = logging.getLogger("mmserve.decode")

#: The constraint of a hole that has none.
ANYTHING = Regex(r"[\s\S]*")

#: Total grammar size (bytes) up to which each sample of a request gets its own parsers. Compiling more takes too long;
#: and as searches have a separate parser, samples that share one use little of its limits.
_OWN_PARSERS = 100_000


@dataclass(frozen=True)
class _Language:
    """Objects that the constraints of one model share; created for the first constraint."""

    vocabulary: Vocabulary
    lexicon: Lexicon
    states: SharedParserStates
    grammars: Grammars
    tokenizer: Tokenizer
    large: threading.Lock  # held while a large grammar is compiled, so that a core stays free
    ends: tuple[int, int]  # the end token, and the padding token after it
    cache: str = ""  # the tenants' cache partition

    def opened(
        self,
        spec: ConstraintSpec,
        budget: int,
        field: str,
        count: Callable[[str, float], None] = lambda text, seconds: None,
    ) -> OpenedHole:
        """The grammar of ``spec`` and its first witness of ``budget`` positions; ``field``: the field that sets the
        budget.

        ``count`` is called with the grammar's text and the CPU seconds that it took, before it is compiled here, and
        may raise.
        """
        grammar, found, seconds = self.grammars.first(spec, budget, self.cache)
        count(grammar.text, seconds)
        validator = validator_of(spec, exact=grammar.exact)
        with failures(f"at least {{}} for {{}} that obeys the constraint, not {budget}", field):
            shortest = fitting(found, budget)
            with self.large if len(grammar.text) > LARGE_BYTES else contextlib.nullcontext():
                compiled = Grammar(grammar.text, self.vocabulary, LLParserLimits(**PARSER_LIMITS))
                witness = start_witness(compiled, budget, shortest, self.states.of(compiled, self.cache))
        return OpenedHole(compiled, witness, grammar.warnings, validator, grammar.longest)

    def holes(self, template: Template) -> list[str | OpenedHole]:
        """``template`` with the grammars and first witnesses of its holes. Raises ``InvalidArgument``."""
        used, took = 0, dict[str, float]()  # bytes; seconds by grammar, as equal holes are compiled once

        def count(text: str, seconds: float) -> None:
            nonlocal used
            used += len(text)
            took[text] = max(seconds, took.get(text, 0.0))
            why = ""
            if used > MAX_TEMPLATE_BYTES:
                why = f"makes the grammars of the template's holes larger than {MAX_TEMPLATE_BYTES} bytes together"
            elif sum(took.values()) > MAX_TEMPLATE_SECONDS:
                why = f"takes more than {MAX_TEMPLATE_SECONDS:g} s of processor time to compile the template's holes"
            if why:
                raise InvalidArgument.of("constraint", f"{why}; make them simpler, or use fewer holes")

        def filled(hole: Hole) -> OpenedHole:
            return self.opened(ConstraintSpec(hole.kind or ANYTHING, hole.mode), hole.max_tokens, "max_tokens", count)

        return opened(template, filled)


@contextmanager
def failures(why: str, field: str) -> Iterator[None]:
    """Converts failures of a grammar that passed the probe to the request's error.

    ``why``: a format string with two fields, the number of tokens needed and what needs them.
    """
    try:
        yield
    except Infeasible as error:
        if error.needed is None:
            raise Unimplemented(
                "the search for an answer that obeys the constraint gave up, and there may be one; "
                "make the constraint simpler"
            ) from error
        known = "the shortest answer" if error.exact else "the shortest answer found"
        known = "any answer" if error.too_long else known
        raise InvalidArgument.of(field, f"must be {why.format(error.needed, known)}") from error
    except (KeyboardInterrupt, SystemExit, MMServeError):
        raise
    except BaseException as error:
        logger.warning("a grammar that passed the probe cannot be started", exc_info=error)
        raise InvalidArgument.of("constraint", f"makes the grammar engine fail: {type(error).__name__}") from error


class Admission:
    """Admits constrained requests to one model; thread-safe and blocking."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self._language: _Language | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._process = ValidatorProcess()  # for answers to be checked (``check``)

    def admit(
        self, spec: ConstraintSpec, budget: int, samples: int = 1, cache: str = "", *, speculates: bool = True
    ) -> list[Session]:
        """A session for each of ``samples`` answers of ``budget`` tokens under ``spec``.

        Args:
            cache: the cache partition of the request's tenant (``core.tenant.Tenant.cache``).
            speculates: whether forced text may be run as a draft when tokens are sampled by rejection. False with a
                repetition penalty, which counts tokens of the canvas but not of a draft.

        Raises:
            InvalidArgument: there is no grammar for ``spec`` (with all reasons), or ``budget`` is too small (with the
                number needed).
            Unimplemented: the model's tokens cannot be constrained, or the search for a first answer exceeded its
                limits.
        """
        first = self._first(spec, budget, cache, speculates=speculates)
        own_parsers = first.weight * (samples - 1) <= _OWN_PARSERS
        with failures("at least {}, the length of {}", "sampling.max_new_tokens"):
            answers = [first, *(first.another(own_parsers=own_parsers) for _ in range(samples - 1))]
        return [Session(each, self._model.spec.causal) for each in answers]

    def _first(self, spec: ConstraintSpec, budget: int, cache: str, *, speculates: bool) -> ConstrainedAnswer:
        language = replace(self._made(), cache=cache)
        if isinstance(spec.kind, Template):
            return self._template(language, spec.kind, budget)
        whole = language.opened(spec, budget, "sampling.max_new_tokens")
        if spec.sampling is not ConstraintSampling.MASK:  # draws condition on open positions
            sampled = SampleState(
                PrefixNode() if spec.sampling is ConstraintSampling.ASAP else None, speculates=speculates
            )
            return ConstrainedAnswer(whole.witness, language.lexicon, whole.warnings, whole.validator, sampled)
        begins = whole.witness.resized(self._reach(whole, budget))
        given = laid_out([begins], budget, language.ends).fixed
        return ConstrainedAnswer(whole.witness, language.lexicon, whole.warnings, whole.validator, given=given)

    def _template(self, language: _Language, template: Template, budget: int) -> ConstrainedAnswer:
        found = language.holes(template)
        holes = [part for part in found if isinstance(part, OpenedHole)]
        warnings = tuple(dict.fromkeys(warning for hole in holes for warning in hole.warnings))
        validators = tuple(hole.validator for hole in holes)
        if self._model.spec.causal:
            with failures(f"at least {{}} for the template, not {budget}", "sampling.max_new_tokens"):
                witness = one_by_one(found, language.vocabulary, language.lexicon, budget)
            return ConstrainedAnswer(
                witness, language.lexicon, warnings, validators=validators, split=splitter(witness)
            )
        parts = list[list[int] | Witness]()
        for part in found:
            if isinstance(part, str):
                parts.append(spelling(part, language.tokenizer, language.lexicon))
            else:
                size = len(part.witness.tokens)
                reach = self._reach(part, size)
                parts += [part.witness.resized(reach), [language.ends[1]] * (size - reach)]
        return TemplateAnswer.of(laid_out(parts, budget, language.ends), language.lexicon, warnings, validators)

    def _reach(self, opened: OpenedHole, size: int) -> int:
        """How many of ``size`` positions of a canvas an answer can reach; the rest is padding from the first step on.

        No tokenisation of a valid answer is longer, so no answer is excluded. Next-token models have no canvas after
        the frontier, and canvases of random tokens have their own padding.
        """
        spec = self._model.spec
        if opened.longest is None or spec.causal or spec.renoising is not None:
            return size
        return min(size, max(opened.longest, opened.witness.length, 1))

    def check(self, spec: ConstraintSpec, budget: int, cache: str = "", answer: str | None = None) -> CheckedConstraint:
        """Check that answers of ``budget`` tokens can obey ``spec``, and validate ``answer`` against its JSON schema.

        ``cache``: see ``admit``. Raises the errors of ``admit``, and ``InvalidArgument`` for an ``answer`` if ``spec``
        is not a JSON schema.
        """
        [session] = self.admit(spec, budget, cache=cache)
        wrong: FailedPrecondition | None = None
        if answer is not None:
            if not isinstance(spec.kind, JsonSchema):
                raise InvalidArgument.of("answer", "can be checked against a JSON schema only")
            try:
                AnswerValidator(effective_schema(spec.kind), process=self._process).check(answer)
            except FailedPrecondition as error:
                wrong = error.with_traceback(None)
        return CheckedConstraint(session.warnings, wrong)

    def warm(self) -> None:
        """Create the objects that the first constraint needs; does nothing for a model without constraints."""
        with contextlib.suppress(Unimplemented, Unavailable):  # raised again for the request that needs it
            self._made()

    def close(self) -> None:
        """Stop the compiling processes; later calls of ``admit`` raise ``Unavailable``."""
        with self._lock:
            self._closed = True
            if self._language is not None:
                self._language.grammars.close()
        self._process.close()

    def _made(self) -> _Language:
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping")
            if self._language is None:
                self._language = _language(self._model)
            return self._language


def spelled_vocabulary(model: EncoderModel) -> Vocabulary:
    """The vocabulary of ``model`` for its constraints. Raises ``Unimplemented`` if the bytes of its tokens are
    unknown."""
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
    table = TokenTable(vocabulary.token_bytes, tuple(sorted(spec.end_ids)))
    padding = min(spec.end_ids) if spec.padding_id is None else spec.padding_id
    ends = min(spec.end_ids - {padding}, default=padding), padding
    lexicon = Lexicon.of(vocabulary.token_bytes)
    grammars = Grammars(table)
    states = SharedParserStates(lexicon)
    return _Language(vocabulary, lexicon, states, grammars, tokenizer, threading.Lock(), ends)
