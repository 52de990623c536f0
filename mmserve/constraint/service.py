"""Grammars for requests: cached, compiled and proved elsewhere, refused with reasons."""

from __future__ import annotations

from mmserve.constraint.cache import Outcomes, key_of
from mmserve.constraint.findings import Refused, as_error
from mmserve.constraint.grammar import Grammar, kind_of
from mmserve.constraint.limits import CACHE_BYTES, COMPILE_SECONDS
from mmserve.constraint.process import Compiler
from mmserve.constraint.vocabulary import Vocabulary
from mmserve.core.constraint import ConstraintSpec


class Grammars:
    """Turns constraints into grammars for one vocabulary; may be called from any thread, and blocks it."""

    def __init__(
        self, vocabulary: Vocabulary, *, seconds: float = COMPILE_SECONDS, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._fingerprint = vocabulary.fingerprint()
        self._outcomes = Outcomes(cache_bytes)
        self._compiler = Compiler(vocabulary, seconds)
        self._compiler.warm()

    def grammar(self, spec: ConstraintSpec) -> Grammar:
        """The grammar of ``spec``, which a matcher may run under ``limits.PARSER_LIMITS``.

        Takes microseconds when it was asked for before, else milliseconds, at worst ``seconds`` of processor time and a
        wait for those before it. Raises ``InvalidArgument`` with a violation for every reason why there is none,
        ``Unavailable`` where nothing can be compiled.
        """
        key = key_of(spec, self._fingerprint)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome, lasting = self._compiler.compile(spec)
            if lasting:
                self._outcomes.put(key, outcome)
        if isinstance(outcome, Refused):
            raise as_error(kind_of(spec), outcome.findings)
        return outcome

    def close(self) -> None:
        """End the child processes."""
        self._compiler.close()
