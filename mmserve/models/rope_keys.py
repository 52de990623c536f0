"""Rotary position embedding in a ``config.json``, with the keys of transformers 5 or of earlier versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.keys import Keys
from mmserve.models.rope_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling
from mmserve.models.rotary import frequency_axes

#: Kinds of scaling of positions with one axis. "dynamic" has no effect within ``max_position_embeddings``, which limits
#: requests; "su" is Phi-3's first name of "longrope".
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "su", "yarn", None)
#: Kinds of positions with several axes (M-RoPE).
AXES_KINDS = ("default", "mrope", None)
_ORIGINAL = "original_max_position_embeddings"
#: Maximum frequencies of a head with several axes.
_MOST_FREQUENCIES = 4096


@dataclass(frozen=True)
class Rope:
    """Base, scaling, the position axis of each frequency, and the rotated share of a head."""

    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
    share: float = 1.0
    positions: int | None = None  # maximum positions, if not ``max_position_embeddings``


def read_rope(keys: Keys, *, partial: bool = False) -> Rope:
    """From ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of earlier versions.

    Dimple also has ``mrope_section``. ``partial``: the architecture may rotate only a share of each head. Raises
    ``ConfigError`` naming what is not implemented.
    """
    merged: dict[str, Any] = {"rope_type": "default", "mrope_section": keys.values.get("mrope_section")}
    for name in ("rope_parameters", "rope_scaling"):
        values = keys.values.get(name) or {}
        if not isinstance(values, Mapping):
            raise ConfigError(f"{keys.path}: {name} must be an object, not {values!r}")
        merged |= {"rope_type": values["type"]} if "type" in values else {}
        merged |= values
    if keys.values.get(_ORIGINAL) is not None:  # a top-level key, as in Phi-3, has priority
        merged[_ORIGINAL] = keys.values[_ORIGINAL]
    rope = Keys(merged, keys.path)
    kind = keys.values.get("model_type")
    interleaved = rope.flag("mrope_interleaved") or kind in ("qwen3_vl", "qwen3_vl_moe")
    axes = _axes(rope, interleaved=interleaved)
    rope.check({"rope_type": AXES_KINDS if axes else KINDS})
    if not partial:
        rope.check({"partial_rotary_factor": (1, None)})
    theta = rope.number("rope_theta", default=keys.number("rope_theta", default=10_000.0))
    share = rope.number("partial_rotary_factor", default=keys.number("partial_rotary_factor", default=1.0))
    scaling, positions = _scaling(keys, rope)
    return Rope(theta, scaling, axes, share, positions)


def _scaling(keys: Keys, rope: Keys) -> tuple[RopeScaling | None, int | None]:
    kind = rope.values["rope_type"]
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_positions=rope.integer(_ORIGINAL),
        ), None
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor")), None
    if kind == "yarn":
        return _yarn(keys, rope)
    if kind in ("longrope", "su"):
        return _longrope(keys, rope)
    return None, None


def _yarn(keys: Keys, rope: Keys) -> tuple[YarnScaling, int]:
    """The scaling, and the number of positions to which it extends the original ones.

    Qwen's model cards add ``rope_scaling`` without changing ``max_position_embeddings``.
    """
    most = keys.integer("max_position_embeddings", default=2048)
    original = rope.integer(_ORIGINAL, default=most)
    factor = rope.number("factor", default=most / original)
    usual = YarnScaling.usual_amplitude
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        amplitude = usual(factor, rope.number("mscale")) / usual(factor, rope.number("mscale_all_dim"))
    else:
        amplitude = usual(factor)
    scaling = YarnScaling(
        factor=factor,
        original_positions=original,
        amplitude=rope.number("attention_factor", default=amplitude),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.values.get("truncate") is not False,
    )
    stated = rope.values.get(_ORIGINAL) is not None
    return scaling, max(most, int(factor * original)) if stated else most


def _longrope(keys: Keys, rope: Keys) -> tuple[LongRopeScaling, int]:
    """The factors of short contexts, and the number of positions that they are for.

    transformers uses other factors for all positions of a longer sequence, so cached keys would become invalid:
    contexts are limited to the range of the short factors.
    """
    most = keys.integer("max_position_embeddings", default=2048)
    original = rope.integer(_ORIGINAL, default=most)
    factor = rope.number("factor", default=most / original)
    factors = rope.values.get("short_factor")
    if not isinstance(factors, list) or not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise ConfigError(f"{rope.path}: short_factor must be a list of positive numbers, not {factors!r}")
    if original < 2:
        raise ConfigError(f"{rope.path}: {_ORIGINAL} must be at least 2 with longrope, not {original}")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    amplitude = rope.number("attention_factor", default=usual)
    return LongRopeScaling(factors=tuple(map(float, factors)), amplitude=amplitude), min(most, original)


def _axes(rope: Keys, *, interleaved: bool) -> tuple[int, ...]:
    """M-RoPE's axes (``mrope_section``: frequencies of time, rows and columns); () if positions have one axis."""
    sections = rope.values.get("mrope_section")
    if sections is None:
        return ()
    whole = isinstance(sections, list) and all(type(count) is int and count > 0 for count in sections)
    if not whole or len(sections) != 3 or sum(sections) > _MOST_FREQUENCIES:
        most = f", together at most {_MOST_FREQUENCIES}"
        raise ConfigError(f"{rope.path}: mrope_section must be three positive numbers{most}, not {sections!r}")
    return frequency_axes(sections, interleaved=interleaved)
