"""Creates a request's policies from its options and the capabilities of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from mmserve.core.info import policy_unsupported
from mmserve.core.request import Policy, Request
from mmserve.decode.commit import COMMIT, UNPENALISED, Commit
from mmserve.decode.commit.scheduled import Scheduled
from mmserve.decode.recompute import RECOMPUTE, Recompute
from mmserve.decode.schedulers import Discrete
from mmserve.decode.text import speller
from mmserve.errors import FieldViolation, InvalidArgument, Unimplemented
from mmserve.models.base import Model
from mmserve.models.commit_filter import CommitFilter


@dataclass(frozen=True)
class Offered:
    """Inputs that a model and its server offer to policies; each policy gets the fields that its constructor names.

    ``spell`` decodes tokens to text: without it a policy that searches text can be created, but not used.
    """

    spell: Callable[[np.ndarray], str] | None = None
    ends: frozenset[int] = frozenset()  # tokens that end an answer
    commit_filter: CommitFilter | None = None
    schedulers: Mapping[str, Discrete] = field(default_factory=dict)

    @classmethod
    def by(cls, model: Model, schedulers: Mapping[str, Discrete] = MappingProxyType({})) -> Self:
        """The inputs that ``model`` offers, with those of the server's ``schedulers`` that fit its kind of canvas."""
        renoises = model.spec.renoising is not None
        usable = {name: s for name, s in schedulers.items() if not model.spec.causal and s.fits(renoises=renoises)}
        return cls(speller(model.tokenizer), model.spec.end_ids, model.commit_filter, usable)


def exists(name: str) -> bool:
    """Whether a policy of any kind has that name."""
    return name in RECOMPUTE or name in COMMIT or name == "scheduler"


def recompute_policy(request: Request) -> Recompute:
    """The request's recompute policy. Raises ``InvalidArgument`` for an unknown name or option."""
    made: Recompute = _policy("diffusion", "recompute", RECOMPUTE, request.diffusion.recompute, request, Offered())
    return made


def commit_policy(request: Request, offered: Offered) -> Commit:
    """The request's commit policy.

    Raises ``InvalidArgument`` for an unknown name, option or scheduler, ``Unimplemented`` if the model does not offer a
    required input.
    """
    known: dict[str, Callable[..., Commit]] = {**COMMIT, "scheduler": _scheduled}
    made: Commit = _policy("diffusion", "commit", known, request.diffusion.commit, request, offered)
    if isinstance(made, Scheduled):
        made.scheduler.check(request.sampling)
    if request.diffusion.commit.name in UNPENALISED and (changes := request.sampling.changes_logits):
        why = f"must not be set with the commit policy {request.diffusion.commit.name!r}"
        raise InvalidArgument.of(f"sampling.{changes[0]}", why)
    return made


@cache
def _taken(make: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a policy's class or function."""
    return frozenset(inspect.signature(make).parameters)


def _policy(
    path: str,
    kind: str,
    known: dict[str, Callable[..., Any]],
    policy: Policy,
    request: Request,
    offered: Offered,
) -> Any:
    """The policy with its options, the inputs it needs of request and model, and the policy it builds on."""
    if policy.name not in known:
        raise InvalidArgument.of(f"{path}.{kind}", f"there is no policy {policy.name!r}; known are {sorted(known)}")
    path = f"{path}.{policy.name}"
    taken = _taken(known[policy.name])
    shared: dict[str, Any] = {
        "steps": request.diffusion.steps_for(request.sampling.max_new_tokens),
        "seed": request.sampling.seed,
        "ends": offered.ends,
        "schedulers": offered.schedulers,
    }
    if offered.spell is not None:
        shared["spell"] = offered.spell
    if "base" in taken:
        base = policy.base or Policy(name="low_confidence")
        shared["base"] = _policy(path, "base", COMMIT, base, request, offered)
    if "commit_filter" in taken:
        if offered.commit_filter is None:
            raise Unimplemented(policy_unsupported(request.model, kind, policy.name))
        shared["commit_filter"] = offered.commit_filter
    try:
        return known[policy.name](**{name: value for name, value in shared.items() if name in taken}, **policy.options)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(FieldViolation(path, str(error))) from error


def _scheduled(schedulers: Mapping[str, Discrete], *, name: str = "", steps: int = 0) -> Scheduled:
    if name not in schedulers:
        raise ValueError(f"there is no scheduler {name!r} for this model; it has {sorted(schedulers)}")
    return Scheduled(schedulers[name], steps)
