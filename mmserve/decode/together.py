"""Greedy candidates of several requests in one call of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from mmserve.decode.commit import Candidates
from mmserve.decode.commit.base import is_partial, is_proposing, is_verified
from mmserve.decode.forward import Pass
from mmserve.decode.logits import Logits, RowLogits, joined
from mmserve.decode.sampler import GREEDY_BELOW, Shared, candidates, verified_mask
from mmserve.decode.scores import Scores
from mmserve.decode.state import Decoding
from mmserve.models.base import ModelSpec

#: A request of a batch, its pass, and the logits of that pass.
Member = tuple[Decoding, Pass, RowLogits]
#: What the requests of a call share: matrix product, figures that are read, whether one is the confidence, and biases.
_Key = tuple[int, frozenset[str], bool, frozenset[tuple[int, float]]]


def is_plain(d: Decoding) -> bool:
    """Whether a request's candidates depend only on logits and their biases: greedy, not penalised, not observed."""
    sampling, streaming = d.request.sampling, d.request.streaming
    if streaming.records and streaming.alternatives:
        return False
    greedy = sampling.temperature < GREEDY_BELOW and not sampling.penalises
    observed = any(extension.observes for extension in d.extensions)
    return greedy and not observed and not is_partial(d.commit) and not is_proposing(d.commit)


def is_forced(d: Decoding, p: Pass, spec: ModelSpec) -> bool:
    """Whether the confidence of a pass's candidates is unused: there is only one, which the policy must choose, and
    log-probabilities are not requested."""
    asked = d.request.streaming.tokens or d.request.streaming.drafts
    return spec.causal and len(p.targets) == 1 and not is_verified(d.commit) and not asked


def share(members: Sequence[Member], spec: ModelSpec, scores: Scores | None) -> list[RowLogits | Shared]:
    """The input of ``candidates`` for each request; requests that are plain and have the same biases share one call.

    Candidates are identical bit for bit either way, except that an unused confidence is 1. Nothing is computed before
    the first request of a group is read: only one of a batch's matrix products is held at a time.
    """
    groups: dict[_Key, _Group] = {}
    made: list[RowLogits | Shared] = []
    for member in members:
        d, p, logits = member
        product = logits.product if isinstance(logits, Logits) and is_plain(d) else None
        if product is None or not isinstance(logits, Logits):
            made.append(logits)
            continue
        with_confidence, biases = not is_forced(d, p, spec), frozenset(d.request.sampling.logit_bias.items())
        key = product, d.commit.reads, with_confidence, biases
        group = groups.setdefault(key, _Group(spec, scores, with_confidence))
        made.append(Shared(partial(group.candidates, len(group.members))))
        group.members.append((d, p, logits))
    return made


class _Group:
    """Requests whose logits are read together; their policies read the same fields of candidates."""

    def __init__(self, spec: ModelSpec, scores: Scores | None, with_confidence: bool) -> None:
        self.members: list[tuple[Decoding, Pass, Logits]] = []
        self._spec, self._scores, self._with_confidence = spec, scores, with_confidence
        self._made: list[Candidates] | None = None

    def candidates(self, index: int) -> Candidates:
        """The candidates of member ``index``."""
        if self._made is None:
            positions = [p.targets for _d, p, _logits in self.members]
            first = self.members[0][0]
            found = candidates(
                joined([logits for _d, _p, logits in self.members]),
                np.concatenate(positions),
                first.canvas,  # unused if greedy and not penalised; of the sampling, only the biases are used
                first.request.sampling,
                self._spec.banned_ids,
                None,
                self._scores,
                first.commit.reads,
                verified_mask(self._spec),
                with_confidence=self._with_confidence,
            )
            self._made = found.split([len(p) for p in positions])
        return self._made[index]
