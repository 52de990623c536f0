"""Prefix reuse on paper: keys tell apart whatever K/V depend on, and the pool against a naive model of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmserve.core.cached import Block, Label
from mmserve.engine.prefixes import Prefixes
from mmserve.kv.pool import PagePool
from mmserve.kv.prefix import page_keys, pages_a_unit
from mmserve.kv.table import PageTable

NO_ROWS = np.empty(0, np.int64)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
    """Ids, visual rows, their features as bytes, and the numbers that keys are made with."""
    ids = np.asarray(draw(st.lists(st.integers(0, 3), min_size=1, max_size=60)), np.int64)
    rows = np.asarray(sorted(draw(st.sets(st.integers(0, len(ids) - 1), max_size=20))), np.int64)
    data = draw(st.binary(min_size=4 * len(rows), max_size=4 * len(rows)))
    features = np.frombuffer(data, np.uint8).reshape(len(rows), 4)
    numbers = {
        "page_size": draw(st.sampled_from([1, 3, 4, 8])),
        "block": draw(st.sampled_from([1, 2, 4, 6, 8])),
        "logit_shift": draw(st.integers(0, 1)),
    }
    return ids, rows, features, numbers


@given(prompts())
def test_a_key_for_each_page_that_every_later_request_can_leave_alone(made) -> None:
    ids, rows, features, numbers = made
    size, page, block = len(ids), numbers["page_size"], numbers["block"]
    keys = page_keys(ids, rows, features, **numbers)
    held = len(keys) * page
    assert len(keys) % pages_a_unit(page, block) == 0 and held % block == 0
    assert held <= size // block * block, "in no unfinished block"
    assert held <= size - numbers["logit_shift"], "a row is left to tell of the first token"
    more = held + pages_a_unit(page, block) * page
    assert more > size // block * block or more > size - numbers["logit_shift"], "no further unit would do"
    assert len(set(keys)) == len(keys) and all(len(key) == 32 for key in keys)


@given(prompts(), st.data())
def test_keys_differ_from_where_the_prompts_do(made, data: st.DataObject) -> None:
    ids, rows, features, numbers = made
    keys = page_keys(ids, rows, features, **numbers)
    at = data.draw(st.integers(0, len(ids) - 1))
    unit = pages_a_unit(numbers["page_size"], numbers["block"])
    same = at // (unit * numbers["page_size"]) * unit  # pages of the units left of the change
    assert keys == page_keys(ids.copy(), rows.copy(), features.copy(), **numbers)
    other = ids.copy()
    other[at] += 1
    differ(keys, page_keys(other, rows, features, **numbers), same)
    if at in rows:
        place = int(np.searchsorted(rows, at))
        changed = features.copy()
        changed[place, data.draw(st.integers(0, 3))] ^= 1 << data.draw(st.integers(0, 7))
        differ(keys, page_keys(ids, rows, changed, **numbers), same)
        differ(keys, page_keys(ids, np.delete(rows, place), np.delete(features, place, 0), **numbers), same)


def differ(keys: tuple[bytes, ...], others: tuple[bytes, ...], same: int) -> None:
    """The first ``same`` keys agree, and none behind them, not even where what follows is the same again."""
    assert keys[:same] == others[:same] and len(keys) == len(others)
    assert not set(keys[same:]) & set(others)


def test_pages_of_the_same_contents_at_other_places_have_other_keys() -> None:
    keys = page_keys(np.zeros(40, np.int64), NO_ROWS, None, page_size=8, block=1, logit_shift=1)
    assert len(keys) == len(set(keys)) == 4


@st.composite
def paths(draw: st.DrawFn) -> tuple[bytes, ...]:
    """Keys of a prompt: its own beginnings, so that prompts share some and then part."""
    word = bytes(draw(st.lists(st.sampled_from(b"ab"), max_size=5)))
    return tuple(word[: i + 1] for i in range(len(word)))


class PrefixMachine(RuleBasedStateMachine):
    """Requests come, compute, publish and go; beside the pool, a model of it with nothing but lists."""

    @initialize(total=st.integers(1, 14), unit=st.sampled_from([1, 1, 2]))
    def start(self, total: int, unit: int) -> None:
        self.pool, self.total, self.unit = PagePool(total, unit=unit), total, unit
        self.live: list[PageTable] = []
        self.computed: list[int] = []  # pages of each that hold what they should
        self.contents: dict[int, bytes | None] = {}  # what was computed into each page
        self.published: dict[bytes, int] = {}
        self.idle: list[int] = []  # published, referenced by nobody, in the order in which they came free

    @rule(keys=paths(), more=st.integers(0, 6))
    def take(self, keys: tuple[bytes, ...], more: int) -> None:
        keys = keys[: len(keys) // self.unit * self.unit]
        count, free = len(keys) + more, self.pool.free
        expected: list[int] = []
        for key in keys:
            if key not in self.published:
                break
            expected.append(self.published[key])
        expected = expected[: len(expected) // self.unit * self.unit]
        needed = count - len(expected)
        room = self.total - len(self.references())
        if needed > room - sum(page in self.idle for page in expected):
            with pytest.raises(ValueError, match="wanted"):
                PageTable.take(self.pool, count, keys)
            assert self.pool.free == free
            # Asking made what was found the most recently used.
            came = [page for page in reversed(expected) if page in self.idle]
            self.idle = [page for page in self.idle if page not in expected] + came
            return
        taken = PageTable.take(self.pool, count, keys)
        assert list(taken.ids[: taken.shared]) == expected and len(taken.ids) == count
        self.idle = [page for page in self.idle if page not in expected]
        blank = room - len(self.idle) - sum(page not in self.references() for page in expected)
        evicted = self.idle[: max(0, needed - blank)]
        fresh = taken.ids[taken.shared :]
        assert set(fresh) & set(self.idle) == set(evicted), "least recently used first, and only when there is need"
        self.idle = self.idle[len(evicted) :]
        self.published = {key: page for key, page in self.published.items() if page not in evicted}
        self.contents.update(dict.fromkeys(fresh))
        self.live.append(taken)
        self.computed.append(taken.shared)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Some more pages of a request are run, and published."""
        i = data.draw(st.integers(0, len(self.live) - 1))
        table, done = self.live[i], self.computed[i]
        upto = data.draw(st.integers(done, len(table.ids)))
        for place in range(done, upto):
            page = table.ids[place]
            assert page not in self.published.values(), "a shared page is written"
            self.contents[page] = table.keys[place] if place < len(table.keys) else None
        self.computed[i] = max(done, upto)
        table.publish(self.pool, None if upto == len(table.ids) else upto)
        for page, key in list(zip(table.ids, table.keys, strict=False))[:upto]:
            self.published.setdefault(key, page)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.live) - 1))
        table = self.live.pop(i)
        del self.computed[i]
        self.pool.release(table.ids)
        held = self.references()
        self.idle += [p for p in reversed(table.ids) if p in self.published.values() and p not in held]

    def references(self) -> Counter[int]:
        return Counter(page for table in self.live for page in table.ids)

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = self.references()
        assert self.pool.in_use == len(held) and self.pool.free == self.total - len(held)
        assert self.pool.cached == len(self.published)
        for key, page in self.published.items():
            assert self.contents[page] == key, "a page under a key holds something else"
        for page, count in held.items():
            assert count == 1 or page in self.published.values(), "a page that was not published is shared"

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.live:
                self.pool.release(table.ids)
            assert sorted(self.pool.allocate(self.total)) == list(range(self.total))
            assert self.pool.cached == 0


TestPrefixPool = PrefixMachine.TestCase


def test_only_a_page_that_is_handed_out_can_be_published_and_only_under_one_key() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(1 - page, b"other")
    pool.publish(page, b"key")
    pool.publish(page, b"key")
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(page, b"other")
    assert pool.cached == 1


def test_of_two_that_computed_the_same_the_first_is_kept() -> None:
    pool = PagePool(4)
    first, second = (PageTable.take(pool, 1, (b"key",)) for _ in range(2))
    first.publish(pool, None)
    second.publish(pool, None)
    assert (pool.cached, pool.lookups, pool.hits) == (1, 2, 0)
    pool.release(second.ids)
    assert PageTable.take(pool, 2, (b"key",)).ids[0] == first.ids[0]
    assert pool.hits == 1


def test_the_end_of_a_prompt_is_given_up_before_its_beginning() -> None:
    pool = PagePool(3)
    table = PageTable.take(pool, 3, (b"1", b"2", b"3"))
    table.publish(pool, None)
    pool.release(table.ids)
    pool.release(pool.allocate(1))
    assert PageTable.take(pool, 2, (b"1", b"2", b"3")[:2]).shared == 2


class Beyond:
    """What is beyond the pool, as labels alone."""

    def __init__(self) -> None:
        self.labels: list[Label] = []

    def save(self, pages: list[tuple[int, Label]]) -> None:
        self.labels += [label for _page, label in pages]

    def blocks(self) -> list[Block]:
        return [Block(label, "host", 1) for label in self.labels]

    def pin(self, names: list[str], _pinned: bool) -> int:
        return len({label.name for label in self.labels} & set(names))


def test_a_page_that_went_and_came_back_is_known_again_where_one_that_follows_it_stayed() -> None:
    pool, tier, keys = PagePool(3), Beyond(), (b"begin", b"end")
    kept: Any = Prefixes(pool, cast(Any, tier), {}, lambda call: call(), "m", 16, 1)

    def prefilled(keys: tuple[bytes, ...]) -> Any:
        return SimpleNamespace(keys=keys, request=SimpleNamespace(id="r", tenant=SimpleNamespace(cache="")))

    for count in (2, 1):  # both pages, then the first of them again
        for page, key in zip(pool.allocate(count), keys, strict=False):
            pool.publish(page, key)
        kept.published(prefilled(keys))
        if count == 2:
            pool.unpublish(keys[:1])
            kept.published(prefilled(tuple(bytes([i]) for i in range(8))))  # pages that are not there are forgotten
    assert kept.pin([keys[-1].hex()], pinned=True) == 2
