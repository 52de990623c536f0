"""Memory required by a model of a configuration, and free memory, determined before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mmserve.config import Config, EngineConfig, ModelConfig, resolve
from mmserve.kv.capacity import free_bytes, pool_bytes
from mmserve.memory import available
from mmserve.models.base import LoadedModel, Model
from mmserve.models.quantized import stored_bytes
from mmserve.models.registry import resolve_device, sketch_model


@dataclass(frozen=True)
class Needed:
    """Bytes required by a model on ``device``."""

    weights: int  # during loading: quantized ones are fp32 until then
    pages: int  # K/V pages
    device: torch.device


def memory_needed(entry: ModelConfig, config: Config) -> Needed:
    """The memory of the model ``entry`` with the other settings of ``config``, from the headers of its files.

    Raises ``ConfigError`` if the model could not be loaded.
    """
    device = resolve_device(entry.device)
    model = sketch_model(entry)
    if not isinstance(model, LoadedModel):
        return Needed(sum(p.numel() * p.itemsize for p in model.network.parameters()), 0, device)
    parts: list[object] = [part for each in _both(model) for part in (each.decoder, each.vision)]
    weights = sum(stored_bytes(part) for part in parts if isinstance(part, torch.nn.Module))
    engine = fitted(config.engine, model, device, free=max(0, free_memory(device) - weights))
    return Needed(weights, _pool_bytes(model, engine), device)


def fitted(engine: EngineConfig, model: Model, device: torch.device, *, free: int | None = None) -> EngineConfig:
    """``engine`` with all values resolved for a model on ``device``: its positions, and the number of pages that fit
    into ``kv_share`` of the ``free`` memory in bytes (None = what is free now)."""
    positions = min(m.spec.max_tokens for m in (model, model.companion) if m is not None)
    if not isinstance(model, LoadedModel):
        return resolve(engine, device=device.type, positions=positions)
    free = free_memory(device) if free is None else free
    none, one = (_pool_bytes(model, replace(engine, pages=count)) for count in (0, 1))
    room = int(engine.kv_share * free - none) // (one - none)
    return resolve(engine, device=device.type, positions=positions, room=max(0, room))


def _both(model: LoadedModel) -> list[LoadedModel]:
    return [model] if model.companion is None else [model, model.companion]


def _pool_bytes(model: LoadedModel, engine: EngineConfig) -> int:
    return sum(pool_bytes(each.decoder.config, engine, each.dtype) for each in _both(model))


def free_memory(device: torch.device) -> int:
    """Free bytes on ``device``: of this machine's memory or of a GPU."""
    return free_bytes(device) if device.type == "cuda" else available()
