"""The workers of a cluster by role, and the limits of their batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mmserve.config import EngineConfig
from mmserve.errors import ConfigError

#: Possible roles of a worker: one stage, or consecutive stages.
ROLES = ("e", "p", "d", "ep", "pd", "epd")
_PART = re.compile(r"(\d+)([epd]+)")


@dataclass(frozen=True)
class Layout:
    """The number of workers of each role, as in ``6e1p1d`` or ``8epd``."""

    counts: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout in ``text``; raises ``ConfigError`` for an unknown role, and without workers for prefill or
        decode."""
        parts = _PART.findall(text)
        if not parts or "".join(count + role for count, role in parts) != text:
            raise ConfigError(f"a layout is counts and roles as in 6e1p1d or 4ep2d, not {text!r}")
        counts: dict[str, int] = {}
        for count, role in parts:
            if role not in ROLES:
                raise ConfigError(f"{text!r}: a worker's role is one of {', '.join(ROLES)}, not {role!r}")
            counts[role] = counts.get(role, 0) + int(count)
        layout = cls(tuple((role, count) for role, count in counts.items() if count))
        for stage, name in (("p", "prefills"), ("d", "decodes")):
            if not layout.having(stage):
                raise ConfigError(f"{text!r}: no worker {name}")
        return layout

    def __str__(self) -> str:
        return "".join(f"{count}{role}" for role, count in self.counts)

    @property
    def roles(self) -> list[str]:
        """The role of each worker."""
        return [role for role, count in self.counts for _ in range(count)]

    @property
    def workers(self) -> int:
        """Total number of workers."""
        return sum(count for _role, count in self.counts)

    def having(self, stages: str) -> int:
        """Number of workers that run at least one of ``stages``."""
        return sum(count for role, count in self.counts if set(role) & set(stages))

    def times(self, factor: int) -> Layout:
        """The layout with ``factor`` times the workers of each role."""
        return Layout(tuple((role, factor * count) for role, count in self.counts))


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Limits of a worker's batches, as in ``[engine]``, and ``shards``: number of workers that share a request's
    images."""

    encode_batch: int = 8  # images
    prefill_tokens: int = 2048
    decode_tokens: int = 4096
    max_running: int = 64
    max_pending: int = 8  # requests between two stages, for each worker of the later one
    shards: int = 1

    @classmethod
    def of(cls, engine: EngineConfig) -> Batching:
        """The limits of ``engine``, whose values must be resolved."""
        return cls(
            encode_batch=engine.encode_batch,
            prefill_tokens=engine.prefill_tokens,
            decode_tokens=engine.decode_tokens,
            max_running=engine.max_running,
            max_pending=engine.max_pending_per_stage,
        )


def layouts(workers: int, *, images: bool) -> Iterator[Layout]:
    """All layouts of ``workers`` workers with a single route for requests: e+p+d, ep+d, e+pd, epd, and p+d, pd without
    images."""
    shapes = (("e", "p", "d"), ("ep", "d"), ("e", "pd"), ("epd",)) if images else (("p", "d"), ("pd",))
    for shape in shapes:
        for counts in _shares(workers, len(shape)):
            yield Layout(tuple(zip(shape, counts, strict=True)))


def all_in_one(workers: int, *, images: bool) -> Layout:
    """The baseline in which each worker runs all stages."""
    return Layout((("epd" if images else "pd", workers),))


def prefill_decode(workers: int, *, images: bool) -> list[Layout]:
    """The baselines with separate decode, and encode together with prefill."""
    return [Layout((("ep" if images else "p", first), ("d", workers - first))) for first in range(1, workers)]


def _shares(whole: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (whole,)
        return
    for first in range(1, whole - parts + 2):
        yield from ((first, *rest) for rest in _shares(whole - first, parts - 1))
