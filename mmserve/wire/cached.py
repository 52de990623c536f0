"""Conversion of cache entries to messages, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mmserve.core.cached import CacheEntry, Kind, Tier
from mmserve.v1 import cache_pb2 as pb
from mmserve.wire.plain import to_message

#: Kinds by their numbers.
KINDS: Mapping[Any, Kind] = {pb.CACHE_KIND_PREFIX: "prefix", pb.CACHE_KIND_VISUAL: "visual"}
_NUMBERS = {kind: number for number, kind in KINDS.items()}


def to_entry(entry: CacheEntry) -> pb.CacheEntry:
    """The message of ``entry``."""
    return to_message(entry, pb.CacheEntry(kind=_NUMBERS[entry.kind]))


def from_entry(message: pb.CacheEntry) -> CacheEntry:
    """The entry of ``message``."""
    return CacheEntry(
        message.id,
        KINDS[message.kind],
        message.model,
        message.tenant,
        message.tokens,
        cast(dict[Tier, int], dict(message.sizes)),
        message.hits,
        message.pinned,
        tuple(message.workers),
        message.stale,
    )


def kind_number(kind: Kind | None) -> Any:
    """The number of a kind; that of all kinds for None. Raises ``KeyError`` for an unknown one."""
    return pb.CACHE_KIND_UNSPECIFIED if kind is None else _NUMBERS[kind]
