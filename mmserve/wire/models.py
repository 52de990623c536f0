"""Conversion of ``ModelInfo`` to its message, and back."""

from __future__ import annotations

import json

from mmserve.core.info import ModelInfo
from mmserve.core.tuning import FAST, Measured, Tuning
from mmserve.v1 import model_pb2
from mmserve.wire.plain import from_message, to_message
from mmserve.wire.policies import chosen_pair, put_pair


def to_model_info(info: ModelInfo) -> model_pb2.ModelInfo:
    """The protobuf form of ``info``."""
    message = to_message(info, model_pb2.ModelInfo())
    for part in (message.capabilities, message.limits, message.defaults):
        part.SetInParent()
        to_message(info, part)
    if (tuning := info.tuning) is None:
        return message
    defaults = message.defaults
    defaults.policy_source = tuning.source
    put_pair(defaults.exact, tuning.plain)
    put_pair(defaults.balanced, tuning.default)
    put_pair(defaults.fast, tuning.pair(FAST))
    for row in tuning.curve:
        put_pair(to_message(row, defaults.curve.add()).policies, row.pair)
    defaults.measured_json = json.dumps(tuning.measured) if tuning.measured else ""
    return message


def from_model_info(message: model_pb2.ModelInfo) -> ModelInfo:
    """The core form of ``message``."""
    parts = (message, message.capabilities, message.limits, message.defaults)
    return from_message(ModelInfo, *parts, tuning=_tuning(message.defaults))


def _tuning(message: model_pb2.ModelDefaults) -> Tuning | None:
    plain, default = chosen_pair(message.exact), chosen_pair(message.balanced)
    if plain is None or default is None:
        return None  # the server does not report it, or has policies unknown to this version
    curve = [(chosen_pair(row.policies), row) for row in message.curve]
    return Tuning(
        source=message.policy_source,
        plain=plain,
        default=default,
        curve=tuple(from_message(Measured, row, pair=pair) for pair, row in curve if pair is not None),
        measured=json.loads(message.measured_json or "{}"),
    )
