"""Cost model of stages: seconds of a pass from the sizes of its batch, with fitted coefficients.

Forms as in DistServe (arXiv 2401.09670, appendix A) for prefill and decode, and the same with patches for encode:

- load ``a + b·Σmegapixels``
- encode ``a + b·Σpatches + c·Σpatches²``
- prefill ``a + b·Σn + c·Σn²``
- decode ``a + b·Σcontext + c·Σrows`` (``rows``: positions run by a step, 1 for a next-token model)
- transfer between hosts ``latency + bytes / bandwidth``
- handover between processes of one host ``a + b·bytes``, in CPU seconds
- on one host, passes slow down with the number of busy cores: by a factor of ``interference`` if all are busy
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError

#: Cost and workload files shipped with the package, by name.
SHIPPED = {"epdserve": "epdserve.json"}
#: Event at which a request's first token is sent: the end of its prefill, or its start in decode (as in mmserve's
#: engine).
FIRST_TOKEN = ("prefill", "decode")


@dataclass(frozen=True)
class Curve:
    """Seconds of a pass: ``a + b·x + c·y``, each coefficient non-negative."""

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0

    def __call__(self, x: float, y: float = 0.0) -> float:
        """Seconds for the sums ``x`` and ``y``."""
        return self.a + self.b * x + self.c * y


@dataclass(frozen=True)
class Link:
    """Transfer between workers: ``latency`` in seconds and ``bandwidth`` in bytes a second; 0 = by reference, no
    time."""

    latency: float = 0.0
    bandwidth: float = 0.0

    def seconds(self, size: float) -> float:
        """Seconds for which a sender is busy with ``size`` bytes, without the latency."""
        return size / self.bandwidth if self.bandwidth else 0.0


@dataclass(frozen=True)
class Costs:
    """Costs of a model on one kind of worker.

    ``embedding_bytes``: of a visual token from encode to prefill; ``kv_bytes``: of a position from prefill to decode.
    ``chunked``: longer prompts are prefilled in chunks. ``interference``: time of a pass while all cores of its host
    are busy relative to an idle host; at least 1. ``quality``: relative residuals of each fit, for reports.
    """

    name: str
    source: str
    encode: Curve
    prefill: Curve
    decode: Curve
    load: Curve = Curve()
    link: Link = Link()
    handover: Curve = Curve()
    interference: float = 1.0
    embedding_bytes: float = 0.0
    kv_bytes: float = 0.0
    chunked: bool = False
    first_token: str = "decode"
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    def encode_seconds(self, patches: Iterable[int]) -> float:
        """Seconds of one pass of the vision tower over images with the given numbers of patches."""
        each = list(patches)
        return self.encode(sum(each), sum(p * p for p in each))

    def prefill_seconds(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds of one pass over ``(done, new)`` positions of each prompt; ``done`` is 0 for a whole prompt."""
        each = list(chunks)
        return self.prefill(sum(new for _, new in each), sum((done + new) ** 2 - done**2 for done, new in each))

    def decode_seconds(self, context: float, rows: float) -> float:
        """Seconds of one step of a batch with ``context`` attended positions in total that runs ``rows``."""
        return self.decode(context, rows)

    def to_json(self) -> dict[str, Any]:
        """As plain data for ``from_json``."""
        return asdict(self)


def from_json(data: Any, where: str) -> Costs:
    """Costs from plain data. Raises ``ConfigError`` with ``where`` and the key for invalid data."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be a JSON object")
    known = set(Costs.__dataclass_fields__)
    if unknown := set(data) - known:
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}; known are {', '.join(sorted(known))}")
    made = dict(data)
    try:
        for key in ("load", "encode", "prefill", "decode", "handover"):
            if key in made:
                made[key] = Curve(**_numbers(made[key], f"{where}: {key}"))
        if "link" in made:
            made["link"] = Link(**_numbers(made["link"], f"{where}: link"))
        costs = Costs(**made)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if costs.first_token not in FIRST_TOKEN:
        raise ConfigError(f"{where}: first_token must be one of {', '.join(FIRST_TOKEN)}, not {costs.first_token!r}")
    _numbers({key: getattr(costs, key) for key in ("embedding_bytes", "kv_bytes", "interference")}, where)
    if costs.interference < 1:
        raise ConfigError(f"{where}: interference must be at least 1, not {costs.interference!r}")
    return costs


def read(path: str) -> Costs:
    """Costs from a file of ``mmserve plan --measure``, or the shipped ones with a name in ``SHIPPED``."""
    return from_json(read_part(path, "costs"), path)


def read_part(path: str, part: str) -> Any:
    """The value of ``part`` in such a file, as plain data; the whole file if it has only that part."""
    at = Path(__file__).parent / SHIPPED[path] if path in SHIPPED else Path(path)
    try:
        data = json.loads(at.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return data[part] if isinstance(data, dict) and part in data else data


def _numbers(values: Any, where: str) -> dict[str, float]:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a JSON object")
    for key, number in values.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
            raise ConfigError(f"{where}: {key} must be a number of at least 0, not {number!r}")
    return {key: float(number) for key, number in values.items()}
