"""Discrete schedulers of diffusers, or others with their interface, as a configuration names them.

The interface (huggingface/diffusers, ``BlockRefinementScheduler``, ``EntropyBoundScheduler``,
``DiscreteDDIMScheduler``): ``set_timesteps(n)``, and ``step(model_output [B, L, V], timestep, sample [B, L], …)`` that
returns ``prev_sample``, ``sampled_tokens`` and ``sampled_probs``, all ``[B, L]``. One that takes ``mask_token_id``
fills masks; one that does not puts random tokens where it is not sure, and is for models that were trained on those.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mmserve.config import SchedulerConfig
from mmserve.core.request import Sampling
from mmserve.decode.sampler import HOTTEST
from mmserve.errors import ConfigError, FieldViolation, InvalidArgument

#: What ``step`` may take of a request, and the value that asks for nothing.
_SAMPLING: dict[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_STEP = frozenset({"model_output", "timestep", "sample", "generator"})
#: The size of the step that a new scheduler is tried with.
_TRIED_LENGTH, _TRIED_VOCABULARY = 4, 8


@dataclass(frozen=True)
class Discrete:
    """A configured scheduler. Each step gets a new one, so that nothing of a request can reach another one.

    That also makes a step repeatable, and lets prefill and decode take theirs in different places.
    """

    name: str
    kind: type[Any]
    numbers: Mapping[str, Any]
    takes: frozenset[str]  # parameters of ``step``
    edits: bool  # whether it replaces tokens that are committed
    steps: int  # denoising steps a block, where a request does not set them
    remembers: bool  # whether it keeps something between the steps of a canvas without masks

    def serves(self, *, renoises: bool) -> bool:
        """Whether it is for models whose open positions hold random tokens (``renoises``), or else masks."""
        return not self.remembers if renoises else "mask_token_id" in self.takes

    def check(self, sampling: Sampling) -> None:
        """``InvalidArgument`` for what the request asks of sampling and the scheduler does not take."""
        wrong = [
            FieldViolation(f"sampling.{name}", f"the scheduler {self.name!r} does not take it")
            for name, nothing in _SAMPLING.items()
            if getattr(sampling, name) != nothing and name not in self.takes
        ]
        if wrong:
            raise InvalidArgument(*wrong)

    def step(
        self,
        logits_LV: Tensor,
        sample_L: Tensor,
        index: int,
        *,
        steps: int,
        block_length: int,
        mask_id: int | None,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Any:
        """The scheduler's output (rows of ``[1, L]``) after step ``index`` of ``steps`` on one block.

        ``block_length``: positions of a whole block, of which the sample may hold a part. ``mask_id`` None: there are
        no masks. Past the last step the last one is repeated.
        """
        scheduler = self.kind(**self.numbers)
        optional = {"block_length": block_length, "device": sample_L.device}
        known = inspect.signature(scheduler.set_timesteps).parameters
        scheduler.set_timesteps(steps, **{k: v for k, v in optional.items() if k in known})
        asked = {name: getattr(sampling, name) for name in _SAMPLING} | {"mask_token_id": mask_id}
        asked["temperature"] = min(sampling.temperature, HOTTEST)
        return scheduler.step(
            model_output=logits_LV[None],
            timestep=min(index, steps - 1),
            sample=sample_L[None],
            generator=generator,
            **{name: value for name, value in asked.items() if name in self.takes},
        )


def load_schedulers(configs: Iterable[SchedulerConfig]) -> dict[str, Discrete]:
    """The schedulers by name, each tried once; raises ``ConfigError`` for a wrong one."""
    return {config.name: _load(config) for config in configs}


def _load(config: SchedulerConfig) -> Discrete:
    where = f"[schedulers.{config.name}]"
    kind = _find(config.kind, where)
    takes = set(inspect.signature(kind.step).parameters) - {"self"}
    if missing := sorted(_STEP - takes):
        raise ConfigError(f"{where}: {config.kind} is no discrete scheduler: its step takes no {missing[0]!r}")
    known = set(inspect.signature(kind).parameters)
    if unknown := sorted(set(config.numbers) - known):
        raise ConfigError(f"{where} has no key {unknown[0]!r}; {config.kind} has {sorted(known)}")
    try:
        scheduler = kind(**config.numbers)
        if getattr(scheduler.config, "corrector_steps", 0):
            raise ConfigError("cannot be corrected between its steps here: leave corrector_steps at 0")
        steps, edits = int(scheduler.num_inference_steps), _edits(scheduler)
        masks = "mask_token_id" in takes
        if masks:
            _try(scheduler, mask_token_id=0)
        remembers = _try(scheduler, **({"mask_token_id": None} if masks else {}))
    except ConfigError as error:
        raise ConfigError(f"{where}: {config.kind} {error}") from error
    except Exception as error:  # its numbers are its own: it alone knows what is wrong with them
        raise ConfigError(f"{where}: {config.kind} fails: {error}") from error
    return Discrete(config.name, kind, dict(config.numbers), frozenset(takes), edits, steps, remembers)


def _find(name: str, where: str) -> type[Any]:
    """The class named ``name``: one of diffusers, or with its module in front any other one."""
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(import_module(module or "diffusers"), kind)
    except ModuleNotFoundError as error:
        hint = "" if module else "; install it with: pip install 'mmserve[schedulers]'"
        raise ConfigError(f"{where} needs the package {error.name}{hint}") from error
    except AttributeError as error:
        raise ConfigError(f"{where}: {module or 'diffusers'} has no class {kind!r}") from error
    if not (isinstance(found, type) and hasattr(found, "step") and hasattr(found, "set_timesteps")):
        raise ConfigError(f"{where}: {name} is no scheduler")
    return found


def _edits(scheduler: Any) -> bool:
    """Whether committed tokens may be replaced: diffusers' schedulers mark that by a positive threshold."""
    return bool((getattr(scheduler.config, "editing_threshold", None) or 0) > 0)


def _try(scheduler: Any, **mask: int | None) -> bool:
    """Whether a first step changes the state of ``scheduler``; ``ConfigError`` if it is no step over tokens."""
    scheduler.set_timesteps(2)
    before = pickle.dumps(vars(scheduler))
    sample = torch.zeros(1, _TRIED_LENGTH, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(1, _TRIED_LENGTH, _TRIED_VOCABULARY)
    out = scheduler.step(model_output=logits, timestep=0, sample=sample, generator=generator, **mask)
    for name in ("prev_sample", "sampled_tokens", "sampled_probs"):
        value = getattr(out, name, None)
        if not isinstance(value, Tensor) or value.shape != sample.shape:
            raise ConfigError(f"is no discrete scheduler: its step gives no {name!r} of the sample's shape")
    if out.prev_sample.dtype != torch.long:
        raise ConfigError("is no discrete scheduler: its samples are not tokens")
    return pickle.dumps(vars(scheduler)) != before
