"""Where a constrained request begins: its grammar, compiled and proved elsewhere, and the first witness of its answer.

Runs on a worker of its own: a grammar takes milliseconds, a bad one two seconds, and nobody else shall wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass

from llguidance import LLParserLimits

from mmserve.constraint.judging import Judge, judge_of
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.service import Grammars
from mmserve.constraint.vocabulary import Vocabulary as Proved
from mmserve.core.constraint import ConstraintSampling, ConstraintSpec
from mmserve.decode.constrained.futures import Place
from mmserve.decode.constraint.matcher import Grammar
from mmserve.decode.constraint.witness import Infeasible, Witness, admit
from mmserve.decode.paths.lexicon import Lexicon
from mmserve.decode.paths.vocabulary import Vocabulary, spell
from mmserve.errors import InvalidArgument, Unavailable, Unimplemented
from mmserve.models.base import Model

logger = logging.getLogger("mmserve.decode")


@dataclass(frozen=True)
class Admitted:
    """A constraint that can be kept within its request's budget; all samples of the request share it."""

    witness: Witness
    lexicon: Lexicon
    warnings: tuple[str, ...]
    judge: Judge | None  # of the finished answer, where its grammar is wider than the constraint
    sampling: ConstraintSampling = ConstraintSampling.MASK
    futures: Place | None = None  # what its samples, one after another, have met so far


@dataclass(frozen=True)
class _Language:
    """What constraints over one model's tokens need; made once, with the first of them."""

    vocabulary: Vocabulary
    lexicon: Lexicon
    grammars: Grammars


class Admission:
    """Admits constrained requests to one model; may be called from any thread, and blocks it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._language: _Language | None = None
        self._closed = False
        self._lock = threading.Lock()

    def admit(self, spec: ConstraintSpec, budget: int) -> Admitted:
        """The first witness of an answer of ``budget`` tokens that obeys ``spec``.

        Raises ``InvalidArgument`` where there is no grammar for it, with every reason, or the budget is too small,
        with the number needed; ``Unimplemented`` where the model's tokens cannot be constrained.
        """
        language = self._made()
        grammar = language.grammars.grammar(spec)
        judge = judge_of(spec, exact=grammar.exact)
        limits = LLParserLimits(**PARSER_LIMITS)
        try:
            compiled = Grammar(grammar.text, language.vocabulary, limits)
            witness = admit(compiled, language.lexicon, budget)
        except Infeasible as error:
            if error.needed is None:
                raise InvalidArgument.of("constraint", "no answer was found that obeys it") from error
            known = "the shortest answer" if error.exact else "the shortest answer found"
            why = f"must be at least {error.needed} for {known} that obeys the constraint, not {budget}"
            raise InvalidArgument.of("sampling.max_new_tokens", why) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            logger.warning("a grammar that was proved cannot be begun", exc_info=error)
            raise InvalidArgument.of("constraint", f"makes the grammar engine fail: {type(error).__name__}") from error
        futures = Place() if spec.sampling is ConstraintSampling.ASAP else None
        return Admitted(witness, language.lexicon, grammar.warnings, judge, spec.sampling, futures)

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


def _language(model: Model) -> _Language:
    tokenizer, spec = model.tokenizer.backend_tokenizer, model.spec
    size = model.vocab_size
    try:
        spelled = spell(tokenizer)
    except ValueError as error:
        raise Unimplemented(f"model {spec.name!r} decodes without constraints: {error}") from error
    banned = {*spec.banned_ids, spec.mask_id}
    generated = [b"" if i in banned else text for i, text in enumerate(spelled[:size])]
    vocabulary = Vocabulary.spelled(generated + [b""] * (size - len(generated)), spec.end_ids, tokenizer)
    proved = Proved(vocabulary.token_bytes, min(spec.end_ids))
    return _Language(vocabulary, Lexicon.of(vocabulary.token_bytes), Grammars(proved))
