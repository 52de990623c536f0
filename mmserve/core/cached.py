"""The contents of a server's caches, as listed and managed: plain data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Self

Kind = Literal["prefix", "visual"]
Tier = Literal["pages", "host", "disk"]
KINDS: tuple[Kind, ...] = ("prefix", "visual")
TIERS: tuple[Tier, ...] = ("pages", "host", "disk")


@dataclass(frozen=True)
class Label:
    """Metadata of a cached block: its identity and owner.

    ``name`` (hex): its public name, the key of a prompt page or of an image's visual tokens. ``parent``: the name of
    the page before it; empty for a prompt's first page and for visual tokens. ``tenant``: the cache partition that it
    belongs to (``Tenant.cache``). ``tokens``: number of positions, or visual tokens, in it.
    """

    kind: Kind
    model: str
    tenant: str
    tokens: int
    name: str
    parent: str = ""

    def text(self) -> str:
        """The label as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, text: str) -> Self:
        """The inverse of ``text``; raises ``ValueError`` or ``TypeError`` for anything else."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Block:
    """One block in one tier; ``size``: bytes, ``hits``: number of lookups by this process that found it.

    ``stale``: the key of a value that no request can use, as other weights, settings or libraries made it; else empty.
    """

    label: Label
    tier: Tier
    size: int
    hits: int = 0
    pinned: bool = False
    worker: str = ""  # the worker that holds it, if there are several
    stale: str = ""


@dataclass(frozen=True)
class CacheEntry:
    """A prompt prefix, or the visual tokens of an image or clip, over all tiers.

    ``id``: for a prefix, the name of its last page. ``tokens``: of the whole prefix. ``sizes``: bytes in each tier;
    pages shared by several prefixes count for each. ``hits``: of its last page, by this process. ``pinned``: never
    evicted, in at least one tier. ``workers``: those that hold its last page. ``stale``: no request can use it, as
    other weights, settings or libraries made it.
    """

    id: str
    kind: Kind
    model: str
    tenant: str
    tokens: int
    sizes: Mapping[Tier, int]
    hits: int = 0
    pinned: bool = False
    workers: tuple[str, ...] = ()
    stale: bool = False


@dataclass(frozen=True)
class Listing:
    """The contents of caches: entries, the largest first, and the bytes of each tier, with every block counted once."""

    entries: tuple[CacheEntry, ...]
    sizes: Mapping[Tier, int] = field(default_factory=dict)


def listing(blocks: Iterable[Block]) -> Listing:
    """Combines ``blocks`` into whole prefixes: one for each page of a model that is not the parent of another page of
    it.

    Different models can have pages with the same name, because names depend only on the prompt.
    """
    by_model: dict[str, list[Block]] = {}
    for block in blocks:
        by_model.setdefault(block.label.model, []).append(block)
    found: list[CacheEntry] = []
    sizes: Counter[Tier] = Counter()
    for own in by_model.values():
        by_name = _by_name(own)
        followed = {each[0].label.parent for each in by_name.values()}
        for name, copies in by_name.items():
            sizes.update(_sizes(copies))
            if name not in followed:
                found.append(_entry(name, by_name))
    found.sort(key=lambda entry: (-sum(entry.sizes.values()), entry.id))
    return Listing(tuple(found), dict(sizes))


def _entry(name: str, by_name: Mapping[str, Sequence[Block]]) -> CacheEntry:
    """The entry whose last block is ``name``."""
    total: Counter[Tier] = Counter()
    tokens = 0
    for each in chain(by_name, name):
        total.update(_sizes(by_name[each]))
        tokens += by_name[each][0].label.tokens
    copies = by_name[name]
    label, pinned = copies[0].label, any(copy.pinned for copy in copies)
    workers = tuple(sorted({copy.worker for copy in copies} - {""}))
    hits = sum(copy.hits for copy in copies)
    stale = all(copy.stale for copy in copies)
    return CacheEntry(name, label.kind, label.model, label.tenant, tokens, dict(total), hits, pinned, workers, stale)


def named(blocks: Iterable[Block], wanted: Sequence[str]) -> list[str]:
    """The names of the blocks of the entries ``wanted``, each after its parent; unknown entries are left out."""
    by_name = _by_name(blocks)
    found: dict[str, None] = {}
    for name in wanted:
        if name in by_name:
            found.update(dict.fromkeys(chain(by_name, name)))
    return list(found)


def alone(blocks: Iterable[Block], wanted: Sequence[str]) -> list[str]:
    """As ``named``, without blocks that other entries also use: these can be dropped with the entries."""
    by_name = _by_name(blocks)
    children = Counter(each[0].label.parent for each in by_name.values())
    found: dict[str, None] = {}
    for name in wanted:
        while name in by_name and name not in found and not children[name]:
            found[name] = None
            name = by_name[name][0].label.parent
            children[name] -= 1
    return list(found)


def chain(by_name: Mapping[str, Sequence[Block]], name: str) -> list[str]:
    """The names of a prefix's known blocks, from the first one on."""
    found: list[str] = []
    while name in by_name:
        found.append(name)
        name = by_name[name][0].label.parent
    return found[::-1]


def _by_name(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.label.name, []).append(block)
    return found


def _sizes(copies: Iterable[Block]) -> Counter[Tier]:
    """Bytes by tier, summed over workers' copies, except on disk, which the workers of a host share."""
    total: Counter[Tier] = Counter()
    files: dict[str, int] = {}
    for copy in copies:
        if copy.tier == "disk":
            files[copy.stale] = max(files.get(copy.stale, 0), copy.size)
        else:
            total[copy.tier] += copy.size
    if files:
        total["disk"] = sum(files.values())
    return total
