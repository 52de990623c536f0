"""``decisions.json`` beside a checkpoint: how its probabilities of typed questions are calibrated.

``mmserve calibrate`` writes it. Of a wrong file, ``ConfigError`` explains how to mend it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mmserve.core.decisions import DECISION_KINDS, Calibration, Scaling
from mmserve.errors import ConfigError

CALIBRATION_FILE = "decisions.json"
FORMAT = 1
_REMEDY = "write it anew with `mmserve calibrate`, or remove it"


def load_calibration(folder: Path) -> Calibration:
    """The file in the checkpoint's ``folder``; without one, probabilities are taken as they are.

    Raises ``ConfigError`` for a file that cannot be read or that has another form.
    """
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return Calibration()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable as JSON ({error}): {_REMEDY}") from error
    try:
        return _calibration(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is not a calibration of this version: {why}; {_REMEDY}") from error


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write a file that ``load_calibration`` reads."""
    kinds = {kind: {"temperature": s.temperature, "bias": s.bias} for kind, s in calibration.kinds.items()}
    data = {"format": FORMAT, "kinds": kinds, "measured": dict(calibration.measured)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _calibration(data: Any) -> Calibration:
    if data["format"] != FORMAT:
        raise ValueError(f"its format is {data['format']!r}, not {FORMAT}")
    if unknown := set(data["kinds"]) - set(DECISION_KINDS):
        raise ValueError(f"it has the kinds {sorted(unknown)}, and known are {', '.join(DECISION_KINDS)}")
    kinds = {kind: _scaling(kind, values) for kind, values in data["kinds"].items()}
    return Calibration(kinds, dict(data.get("measured", {})))


def _scaling(kind: str, values: Any) -> Scaling:
    temperature, bias = values["temperature"], values["bias"]
    for name, value in (("temperature", temperature), ("bias", bias)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} of {kind} must be a finite number, not {value!r}")
    if temperature <= 0:
        raise ValueError(f"temperature of {kind} must be above 0, not {temperature}")
    return Scaling(temperature=float(temperature), bias=float(bias))
