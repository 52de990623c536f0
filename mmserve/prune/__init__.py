"""Pruners by name, and the pruner of a request."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from mmserve.core.request import Request, Vision
from mmserve.errors import InvalidArgument
from mmserve.prune.base import Evidence, Pruner
from mmserve.prune.cls_attention import ClsAttention
from mmserve.prune.column_attention import ColumnAttention
from mmserve.prune.fastv import FastV
from mmserve.prune.hired import Hired
from mmserve.prune.mustdrop import MustDrop
from mmserve.prune.random import Random
from mmserve.prune.redvtp import RedVtp
from mmserve.prune.resize import Resize
from mmserve.prune.tome import ToMe
from mmserve.prune.visionzip import VisionZip

PRUNERS: dict[str, Callable[..., Pruner]] = {
    "random": Random,
    "resize": Resize,
    "cls_attention": ClsAttention,
    "hired": Hired,
    "visionzip": VisionZip,
    "mustdrop": MustDrop,
    "tome": ToMe,
    "column_attention": ColumnAttention,
    "fastv": FastV,
    "redvtp": RedVtp,
}


def pruners_for(evidence: frozenset[Evidence]) -> tuple[str, ...]:
    """Names of the pruners supported by a model that provides ``evidence``, ``none`` first."""
    return ("none", *(name for name, kind in PRUNERS.items() if kind().needs <= evidence))


def pruner_of(request: Request) -> Pruner | None:
    """The request's pruner; see ``pruner_for``."""
    return pruner_for(request.vision, seed=request.sampling.seed)


def pruner_for(asked: Vision, *, seed: int) -> Pruner | None:
    """The pruner given by ``asked``, with ``seed`` if it samples; None = no pruning.

    Raises ``InvalidArgument`` for an unknown name, and for a missing amount or one that the pruner does not support.
    """
    if asked.pruner == "none":
        if asked.amount is not None:
            raise InvalidArgument.of(f"vision.{asked.amount.name}", "cannot be set without a pruner: choose one")
        return None
    if asked.pruner not in PRUNERS:
        known = ["none", *PRUNERS]
        raise InvalidArgument.of("vision.pruner", f"there is no pruner {asked.pruner!r}; known are {known}")
    kind = PRUNERS[asked.pruner]
    pruner = kind(seed=seed) if "seed" in inspect.signature(kind).parameters else kind()
    if asked.amount is None:
        raise InvalidArgument.of("vision", f"{asked.pruner} needs how much to keep: set {_either(pruner)}")
    if asked.amount.name not in pruner.amounts:
        raise InvalidArgument.of(f"vision.{asked.amount.name}", f"{asked.pruner} takes {_either(pruner)} instead")
    return None if asked.amount.name != "token_budget" and asked.amount.value >= 1 else pruner


def _either(pruner: Pruner) -> str:
    return " or ".join(sorted(pruner.amounts))


__all__ = ["PRUNERS", "Evidence", "Pruner", "pruner_for", "pruner_of", "pruners_for"]
