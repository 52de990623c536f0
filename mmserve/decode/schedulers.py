"""Discrete schedulers of diffusers, or others with their interface, that a configuration names.

The interface (huggingface/diffusers, ``BlockRefinementScheduler``, ``EntropyBoundScheduler``,
``DiscreteDDIMScheduler``): ``set_timesteps(n)``, and ``step(model_output [B, L, V], timestep, sample [B, L], …)``,
which returns ``prev_sample``, ``sampled_tokens`` and ``sampled_probs``, all ``[B, L]``. A scheduler with
``mask_token_id`` fills masks; one without puts random tokens at positions that it does not accept, and is for models
trained on those.
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
from mmserve.decode.sampler import MAX_TEMPERATURE
from mmserve.errors import ConfigError, FieldViolation, InvalidArgument

#: Sampling parameters that ``step`` may accept, with the values that have no effect.
_SAMPLING: dict[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_STEP = frozenset({"model_output", "timestep", "sample", "generator"})
#: The canvas size of the trial step of a new scheduler.
_TRIAL_LENGTH, _TRIAL_VOCABULARY = 4, 8


@dataclass(frozen=True)
class Discrete:
    """A configured scheduler. Each step uses a new instance, so that no state is shared between requests.

    A step can therefore be repeated, and prefill and decode can run steps in different processes.
    """

    name: str
    kind: type[Any]
    numbers: Mapping[str, Any]
    takes: frozenset[str]  # parameters of ``step``
    edits: bool  # whether it replaces tokens that are committed
    steps: int  # denoising steps of a block, if a request does not set them
    stateful: bool  # whether it keeps state between the steps of a canvas without masks

    def fits(self, *, renoises: bool) -> bool:
        """Whether it is for models whose open positions hold random tokens (``renoises``) or, if False, masks."""
        return not self.stateful if renoises else "mask_token_id" in self.takes

    def check(self, sampling: Sampling) -> None:
        """Raises ``InvalidArgument`` for sampling parameters of the request that the scheduler does not accept."""
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
        """The scheduler's output (tensors ``[1, L]``) after step ``index`` of ``steps`` on one block.

        ``block_length``: positions of a whole block; the sample may be a part of it. ``mask_id`` None: there are no
        masks. After the last step, that step is repeated.
        """
        scheduler = self.kind(**self.numbers)
        optional = {"block_length": block_length, "device": sample_L.device}
        known = inspect.signature(scheduler.set_timesteps).parameters
        scheduler.set_timesteps(steps, **{k: v for k, v in optional.items() if k in known})
        options = {name: getattr(sampling, name) for name in _SAMPLING} | {"mask_token_id": mask_id}
        options["temperature"] = min(sampling.temperature, MAX_TEMPERATURE)
        return scheduler.step(
            model_output=logits_LV[None],
            timestep=min(index, steps - 1),
            sample=sample_L[None],
            generator=generator,
            **{name: value for name, value in options.items() if name in self.takes},
        )


def load_schedulers(configs: Iterable[SchedulerConfig]) -> dict[str, Discrete]:
    """The schedulers by name; each runs a trial step. Raises ``ConfigError`` for an invalid one."""
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
        stateful = _try(scheduler, **({"mask_token_id": None} if masks else {}))
    except ConfigError as error:
        raise ConfigError(f"{where}: {config.kind} {error}") from error
    except Exception as error:  # a scheduler may raise anything for invalid options
        raise ConfigError(f"{where}: {config.kind} fails: {error}") from error
    return Discrete(config.name, kind, dict(config.numbers), frozenset(takes), edits, steps, stateful)


def _find(name: str, where: str) -> type[Any]:
    """The class named ``name``: a class of diffusers, or ``module.Class``."""
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
    """Whether committed tokens may be replaced; diffusers' schedulers indicate that by a positive threshold."""
    return bool((getattr(scheduler.config, "editing_threshold", None) or 0) > 0)


def _try(scheduler: Any, **mask: int | None) -> bool:
    """Runs a trial step. Returns whether it changed the state of ``scheduler``; raises ``ConfigError`` if ``step``
    fails."""
    scheduler.set_timesteps(2)
    before = pickle.dumps(vars(scheduler))
    sample = torch.zeros(1, _TRIAL_LENGTH, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(1, _TRIAL_LENGTH, _TRIAL_VOCABULARY)
    out = scheduler.step(model_output=logits, timestep=0, sample=sample, generator=generator, **mask)
    for name in ("prev_sample", "sampled_tokens", "sampled_probs"):
        value = getattr(out, name, None)
        if not isinstance(value, Tensor) or value.shape != sample.shape:
            raise ConfigError(f"is no discrete scheduler: its step gives no {name!r} of the sample's shape")
    if out.prev_sample.dtype != torch.long:
        raise ConfigError("is no discrete scheduler: its samples are not tokens")
    return pickle.dumps(vars(scheduler)) != before
