"""``decisions.json`` in a checkpoint's folder: calibration of its probabilities of typed questions.

Written by ``mmserve calibrate``. For an invalid file, ``ConfigError`` explains how to repair it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmserve.core.decisions import DECISION_KINDS, Calibration, Scaling
from mmserve.models.own_files import finite, read_own, write_own

CALIBRATION_FILE = "decisions.json"
_REMEDY = "write it anew with `mmserve calibrate`, or remove it"


def load_calibration(folder: Path) -> Calibration:
    """The calibration in the checkpoint's ``folder``; without a file, probabilities are not calibrated.

    Raises ``ConfigError`` for a file that cannot be read or is malformed.
    """
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return Calibration()
    return read_own(path, "a calibration", _calibration, _REMEDY)


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write a file that ``load_calibration`` reads."""
    kinds = {kind: {"temperature": s.temperature, "bias": s.bias} for kind, s in calibration.kinds.items()}
    write_own(path, {"kinds": kinds, "measured": dict(calibration.measured)})


def _calibration(data: Any) -> Calibration:
    if unknown := set(data["kinds"]) - set(DECISION_KINDS):
        raise ValueError(f"it has the kinds {sorted(unknown)}, and known are {', '.join(DECISION_KINDS)}")
    kinds = {kind: _scaling(kind, values) for kind, values in data["kinds"].items()}
    return Calibration(kinds, dict(data.get("measured", {})))


def _scaling(kind: str, values: Any) -> Scaling:
    temperature, bias = (finite(f"{name} of {kind}", values[name]) for name in ("temperature", "bias"))
    if temperature <= 0:
        raise ValueError(f"temperature of {kind} must be above 0, not {temperature}")
    return Scaling(temperature=temperature, bias=bias)
