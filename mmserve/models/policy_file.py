"""``policy.json`` in a checkpoint's folder: its default policies, and their measurements.

Written by ``mmserve tune``. For an invalid file, ``ConfigError`` explains how to repair it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.core.request import Policy
from mmserve.core.tuning import Measured, Pair
from mmserve.errors import ConfigError
from mmserve.models.own_files import finite, read_own, write_own

POLICY_FILE = "policy.json"
#: Value of the configuration key that disables reading a file.
NO_FILE = "off"
_REMEDY = "write it anew with `mmserve tune`, or remove it"
_ROW = {
    "quality": float,
    "agreement": float,
    "same": float,
    "time_ratio": float,
    "forwards": float,
}


@dataclass(frozen=True, kw_only=True)
class PolicyFile:
    """A file's contents: plain decoding, the default, and all measured pairs."""

    path: Path
    plain: Pair
    default: Pair
    curve: tuple[Measured, ...]
    measured: dict[str, Any] = field(default_factory=dict)


def load_policies(path: Path, *, required: bool = False) -> PolicyFile | None:
    """The file at ``path``, or in the model's folder there; None if there is none and it is not ``required``.

    Raises ``ConfigError`` for a file that cannot be read or is malformed.
    """
    path = path / POLICY_FILE if path.is_dir() else path
    if not path.is_file():
        if required:
            raise ConfigError(f"there is no policy file {path}: `mmserve tune --out {path}` writes one")
        return None
    return read_own(path, "a policy file", lambda data: _file(path, data), _REMEDY)


def save_policies(path: Path, plain: Pair, default: Pair, curve: list[Measured], measured: dict[str, Any]) -> None:
    """Write a file that ``load_policies`` reads."""
    data = {
        "plain": _pair_data(plain),
        "default": _pair_data(default),
        "measured": measured,
        "curve": [row_data(row) for row in curve],
    }
    write_own(path, data)


def row_data(row: Measured) -> dict[str, Any]:
    """A measured pair in the file's format."""
    return {**_pair_data(row.pair), "accuracy": row.accuracy, **{name: getattr(row, name) for name in _ROW}}


def _file(path: Path, data: Any) -> PolicyFile:
    return PolicyFile(
        path=path,
        plain=_pair(data["plain"]),
        default=_pair(data["default"]),
        curve=tuple(_row(row) for row in data["curve"]),
        measured=dict(data.get("measured", {})),
    )


def _row(data: Any) -> Measured:
    numbers = {name: finite(name, data[name]) for name in _ROW}
    if numbers["time_ratio"] <= 0:
        raise ValueError(f"time_ratio must be above 0, not {numbers['time_ratio']}")
    accuracy = None if data.get("accuracy") is None else finite("accuracy", data["accuracy"])
    return Measured(pair=_pair(data), accuracy=accuracy, **numbers)


def _pair(data: Any) -> Pair:
    return Pair(_policy(data["recompute"]), _policy(data["commit"]))


def _policy(data: Any) -> Policy:
    """A policy such as ``{"name": "threshold", "confidence": 0.9}``; ``base`` is also a policy."""
    options = dict(data)
    name, base = options.pop("name"), options.pop("base", None)
    if not isinstance(name, str) or not all(isinstance(value, int | float | str) for value in options.values()):
        raise ValueError(f"a policy is a name and its numbers, not {data!r}")
    return Policy(name=name, options=options, base=None if base is None else _policy(base))


def _pair_data(pair: Pair) -> dict[str, Any]:
    return {"recompute": _policy_data(pair.recompute), "commit": _policy_data(pair.commit)}


def _policy_data(policy: Policy) -> dict[str, Any]:
    base = {} if policy.base is None else {"base": _policy_data(policy.base)}
    return {"name": policy.name, **policy.options, **base}
