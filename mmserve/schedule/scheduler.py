"""The scheduler: a pure function from the requests' states and the budgets to a plan.

First come, first served at every stage, each bounded by its budget; a prefill that is begun goes before new ones. A
batch always takes at least its first request, so nothing can be too large to run. Of a next-token model's prompt that
is longer than the budget a batch takes a chunk, and decode has its turn between two. Decode batches take whoever waited
longest since their last step. A constrained request is encoded once its grammar is there; those after it do not wait
for that. Nor does text wait for media: a request with media is encoded once these are read, one without is tokenized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmserve.core.plan import Budgets, Entry, Plan
from mmserve.core.request import RequestId, Stage

_HOLDS_PAGES = frozenset({Stage.PREFILLING, Stage.PREFILLED, Stage.STEPPING, Stage.READY})


def schedule(entries: Sequence[Entry], budgets: Budgets) -> Plan:
    """What each idle stage does next, given all live requests in order of arrival."""
    return Plan(
        constrain=_constrain(entries, budgets) if "constrain" in budgets.idle else (),
        load=_load(entries, budgets) if "load" in budgets.idle else (),
        tokenize=_tokenize(entries, budgets) if "tokenize" in budgets.idle else (),
        encode=_encode(entries, budgets) if "encode" in budgets.idle else (),
        prefill=_prefill(entries, budgets) if "prefill" in budgets.idle else (),
        decode=_decode(entries, budgets) if "decode" in budgets.idle else (),
    )


def _constrain(entries: Sequence[Entry], budgets: Budgets) -> tuple[RequestId, ...]:
    """Those that go side by side begin in order of arrival; one whose constraint is slow may be overtaken."""
    room = budgets.handover - _count(entries, Stage.CONSTRAINING, Stage.CONSTRAINED)
    waiting = [e.id for e in entries if e.stage is Stage.QUEUED and e.constrained]
    return tuple(waiting[: min(budgets.constrain, max(0, room))])


def _load(entries: Sequence[Entry], budgets: Budgets) -> tuple[RequestId, ...]:
    """Those that are read side by side begin in order of arrival; one whose media are slow may be overtaken."""
    room = budgets.handover - _count(entries, Stage.LOADING, Stage.LOADED)
    waiting = [e.id for e in entries if e.images and _startable(e)]
    return tuple(waiting[: min(budgets.load, max(0, room))])


def _tokenize(entries: Sequence[Entry], budgets: Budgets) -> tuple[RequestId, ...]:
    tokenizing = sum(e.stage is Stage.ENCODING and not e.images for e in entries)
    room = budgets.handover - tokenizing - _count(entries, Stage.ENCODED)
    queued = [e for e in entries if not e.images and _startable(e)][: max(0, room)]
    return _fill(queued, [1 for _ in queued], budgets.encode_batch)


def _encode(entries: Sequence[Entry], budgets: Budgets) -> tuple[RequestId, ...]:
    encoding = sum(e.stage is Stage.ENCODING and e.images > 0 for e in entries)
    room = budgets.handover - encoding - _count(entries, Stage.ENCODED)
    loaded = [e for e in entries if e.stage is Stage.LOADED][: max(0, room)]
    return _fill(loaded, [e.images for e in loaded], budgets.encode_batch)


def _startable(entry: Entry) -> bool:
    """Whether nothing is left that comes before a request's media and text."""
    return entry.stage is Stage.CONSTRAINED or (entry.stage is Stage.QUEUED and not entry.constrained)


def _prefill(entries: Sequence[Entry], budgets: Budgets) -> tuple[RequestId, ...]:
    places = max(0, budgets.handover - _count(entries, Stage.PREFILLING, Stage.PREFILLED))
    encoded = [e for e in entries if e.stage is Stage.ENCODED]
    begun = [e for e in encoded if e.prefilled is not None]  # these hold their pages already
    running, pages = budgets.max_running - _count(entries, *_HOLDS_PAGES) - len(begun), budgets.free_pages
    waiting = begun[:places]
    for entry in (e for e in encoded if e.prefilled is None):
        if len(waiting) >= places or not running > 0 or entry.pages > pages:
            break  # nobody overtakes the first that does not fit: it would wait for ever
        running, pages = running - 1, pages - entry.pages
        waiting.append(entry)
    return _fill(waiting, [e.tokens - (e.prefilled or 0) for e in waiting], budgets.prefill_tokens)


def _decode(entries: Sequence[Entry], budgets: Budgets) -> tuple[RequestId, ...]:
    ready = sorted((e for e in entries if e.stage in (Stage.PREFILLED, Stage.READY)), key=lambda e: e.last_step)
    return _fill(ready, [e.tokens for e in ready], budgets.decode_tokens)


def _count(entries: Sequence[Entry], *stages: Stage) -> int:
    return sum(e.stage in stages for e in entries)


def _fill(entries: Sequence[Entry], costs: Iterable[int], budget: int) -> tuple[RequestId, ...]:
    """The longest prefix whose costs fit the budget, at least one entry."""
    taken: list[RequestId] = []
    for entry, cost in zip(entries, costs, strict=True):
        budget -= cost
        if taken and budget < 0:
            break
        taken.append(entry.id)
    return tuple(taken)
