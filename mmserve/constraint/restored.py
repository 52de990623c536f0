"""Conversion of constraint sessions to plain data and back: grammars are compiled again, and matchers advanced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from llguidance import LLParserLimits

from mmserve.constraint.admission import ANYTHING, spelled_vocabulary
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.matcher import BoundedHole, Concatenation, Constraint, Grammar
from mmserve.constraint.search.parser_states import SharedParserStates
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import Outcome, Witness
from mmserve.constraint.session.answer import ConstrainedAnswer, splitter
from mmserve.constraint.session.observer import Meter, Ranked
from mmserve.constraint.session.sampling import SampledRun, SampleState
from mmserve.constraint.session.session import Session
from mmserve.constraint.session.template import HoleAnswer, TemplateAnswer
from mmserve.constraint.session.validation import AnswerValidator, validator_of
from mmserve.core.constraint import ConstraintSpec, Hole, Template
from mmserve.core.constraint_state import (
    ConstraintState,
    GapState,
    LanguageState,
    MeterState,
    RankedState,
    RunState,
    SampledState,
    WitnessState,
)
from mmserve.core.request import Request
from mmserve.errors import Unimplemented
from mmserve.models.base import EncoderModel


def session_state(session: Session) -> ConstraintState:
    """``session`` as plain data.

    Raises ``Unimplemented`` for ``asap`` sampling, whose samples share state within one process.
    """
    ranked = session.observed()
    state = _answer_state(session.answer)
    return state if ranked is None else replace(state, ranked=_ranked_state(ranked))


class Restorer:
    """Restores constrained requests of one model from plain data; thread-safe."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._made: tuple[Vocabulary, Lexicon, SharedParserStates] | None = None

    def restored(self, request: Request, state: ConstraintState) -> Session:
        """The request's session at ``state``, with its own parsers; takes as long as compiling."""
        assert request.constraint is not None
        with self._lock:
            if self._made is None:
                vocabulary = spelled_vocabulary(self._model)
                lexicon = Lexicon.of(vocabulary.token_bytes)
                self._made = vocabulary, lexicon, SharedParserStates(lexicon)
        restoring = _Restoring(*self._made, request.tenant.cache)
        answer = restoring.answer(state, request.constraint)
        found = [] if state.ranked is None else [restoring.ranked(state.ranked, answer.witness, broken=state.broken)]
        return Session(answer, self._model.spec.causal, found=found)


@dataclass(frozen=True)
class _Restoring:
    vocabulary: Vocabulary
    lexicon: Lexicon
    states: SharedParserStates
    cache: str

    def answer(
        self, state: ConstraintState, spec: ConstraintSpec | None, meter: Meter | None = None
    ) -> ConstrainedAnswer:
        """``spec``: None for a hole, whose validator is that of the whole answer."""
        meter = meter or _meter(state.meter)
        validators: Sequence[AnswerValidator | None] = ()
        if spec is not None and isinstance(spec.kind, Template) and state.validated_holes:
            holes = [part for part in spec.kind.parts if isinstance(part, Hole)]
            specs = [ConstraintSpec(hole.kind or ANYTHING, hole.mode) for hole in holes]
            validators = [
                validator_of(each, exact=not has) for each, has in zip(specs, state.validated_holes, strict=True)
            ]
        if state.gaps:
            gaps = tuple(HoleAnswer(gap.start, self.answer(gap.state, None, meter)) for gap in state.gaps)
            of = state.witness
            witness = replace(gaps[0].state.witness, tokens=of.tokens, length=of.length, known=of.known, cut=of.cut)
            kind: Callable[..., ConstrainedAnswer] = partial(TemplateAnswer, gaps=gaps)
        else:
            witness, kind = self.witness(state.witness, broken=state.broken), ConstrainedAnswer
        of_draws = state.sampled
        return kind(
            witness,
            self.lexicon,
            state.warnings,
            None if spec is None else validator_of(spec, exact=not state.validated),
            of_draws and SampleState(None, of_draws.speculates, of_draws.log_weight),
            state.drafted,
            state.forced,
            state.asked,
            state.broken,
            state.late,
            meter,
            splitter(witness),
            tuple(validators),
            state.given,
        )

    def witness(self, state: WitnessState, *, broken: bool = False) -> Witness:
        """The witness; if its parser has failed (``broken``), its matcher is not advanced, because it is not used."""
        language, shared = self.language(state.language)
        matcher = language.start()
        if not broken:
            matcher.consume(state.tokens[: min(state.known, state.length)].tolist())
        return Witness(
            state.tokens,
            state.length,
            matcher,
            state.known,
            language.vocabulary.end_ids,
            completions=state.completions,
            classes=language.classes,
            states=self.states.of(shared, self.cache) if shared is not None else None,
            language=language,
            cut=state.cut,
        )

    def language(self, state: LanguageState) -> tuple[Constraint, Grammar | None]:
        """The language, and its grammar, if it is a single one: searches under it share cached states."""
        limits = LLParserLimits(**PARSER_LIMITS)
        grammars = [Grammar(text, self.vocabulary, limits) for text in state.grammars]
        if not state.texts:
            return grammars[0], grammars[0]
        holes = tuple(BoundedHole(grammar, most) for grammar, most in zip(grammars, state.most, strict=True))
        return Concatenation(state.texts, holes, self.vocabulary), None

    def ranked(self, state: RankedState | RunState, witness: Witness, *, broken: bool = False) -> Ranked | SampledRun:
        """The observation of the current pass, whose tokens are not final yet; ``broken``: see ``witness``."""
        if isinstance(state, RankedState):
            top = TopK(state.positions, state.tokens, state.log_probabilities)
            return Ranked(top, state.plain, state.own, state.kept)
        of = state.witness
        matcher = witness.matcher.fork()
        if not broken:
            first, last = (min(each.known, each.length) for each in (witness, of))
            matcher.consume(of.tokens[first:last].tolist())
        ahead = replace(witness, tokens=of.tokens, length=of.length, matcher=matcher, known=of.known, cut=of.cut)
        return SampledRun(state.tokens, state.log_probabilities, ahead, state.log_weight)


def _answer_state(answer: ConstrainedAnswer) -> ConstraintState:
    sampled = answer.sampled
    if sampled is not None and sampled.futures is not None:
        raise Unimplemented("constraint.sampling 'asap' needs prefill and decode in one process; use 'awrs'")
    return ConstraintState(
        witness=_witness_state(answer.witness),
        warnings=answer.warnings,
        validated=answer.validator is not None,
        validated_holes=tuple(validator is not None for validator in answer.validators),
        sampled=None if sampled is None else SampledState(sampled.speculates, sampled.log_weight),
        ranked=None,
        drafted=answer.drafted,
        forced=answer.forced,
        asked=answer.asked,
        broken=answer.broken,
        late=answer.late,
        given=answer.given,
        meter=_meter_state(answer.meter),
        gaps=tuple(GapState(gap.start, replace(_answer_state(gap.state), meter=None)) for gap in answer.gaps)
        if isinstance(answer, TemplateAnswer)
        else (),
    )


def _witness_state(witness: Witness) -> WitnessState:
    return WitnessState(
        _language_state(witness.language),
        witness.tokens,
        witness.length,
        witness.known,
        witness.completions,
        witness.cut,
    )


def _language_state(language: Constraint | None) -> LanguageState:
    if isinstance(language, Grammar):
        return LanguageState((language.source,))
    assert isinstance(language, Concatenation), "every request's witness has its language"
    grammars = [hole.constraint for hole in language.holes]
    texts = tuple(grammar.source for grammar in grammars if isinstance(grammar, Grammar))
    return LanguageState(texts, language.texts, tuple(hole.most for hole in language.holes))


def _ranked_state(ranked: Ranked | SampledRun) -> RankedState | RunState:
    if isinstance(ranked, Ranked):
        top = ranked.top
        return RankedState(top.positions, top.tokens, top.log_probabilities, ranked.plain, ranked.own, ranked.kept)
    witness = _witness_state(ranked.witness)
    return RunState(ranked.tokens, ranked.log_probabilities, witness, ranked.log_weight)


def _meter_state(meter: Meter) -> MeterState:
    outcomes = tuple(sorted(outcome.value for outcome in meter._outcomes))
    steps = np.array(meter._steps, np.float64)
    return MeterState(meter.fallbacks, meter.late, meter.forward_seconds, steps, meter._open, outcomes)


def _meter(state: MeterState | None) -> Meter:
    if state is None:
        return Meter()
    outcomes = {Outcome(each) for each in state.outcomes}
    return Meter(state.fallbacks, state.late, state.forward_seconds, state.steps.tolist(), state.open, outcomes)
