"""The page pool: nobody shares a page, and every page comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmserve.kv.pool import PagePool, pages_for


class PoolMachine(RuleBasedStateMachine):
    """Requests come and go in any order."""

    @initialize(total=st.integers(1, 40))
    def start(self, total: int) -> None:
        self.pool, self.total, self.held = PagePool(total), total, []

    @rule(count=st.integers(0, 45))
    def allocate(self, count: int) -> None:
        free = self.pool.free
        if count > free:
            with pytest.raises(ValueError, match="wanted"):
                self.pool.allocate(count)
            assert self.pool.free == free
            return
        pages = self.pool.allocate(count)
        assert len(pages) == count
        self.held.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(data=st.data())
    def release_twice(self, data: st.DataObject) -> None:
        if self.held and (pages := self.held[data.draw(st.integers(0, len(self.held) - 1))]):
            self.pool.release(pages)
            self.held.remove(pages)
            free = self.pool.free
            with pytest.raises(ValueError, match="twice"):
                self.pool.release(pages)
            assert self.pool.free == free

    @invariant()
    def pages_are_conserved_and_nobody_shares_one(self) -> None:
        if not hasattr(self, "pool"):
            return
        out = [page for pages in self.held for page in pages]
        assert len(set(out)) == len(out)
        assert set(out) <= set(range(self.total))
        assert self.pool.in_use == len(out)
        assert self.pool.free == self.total - len(out)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for pages in self.held:
                self.pool.release(pages)
            assert sorted(self.pool.allocate(self.total)) == list(range(self.total))


TestPool = PoolMachine.TestCase


def test_a_page_listed_twice_in_one_release_is_refused() -> None:
    pool = PagePool(4)
    first, _second = pool.allocate(2)
    with pytest.raises(ValueError, match="twice"):
        pool.release((first, first))
    assert pool.in_use == 2


@given(st.integers(0, 5000), st.integers(1, 300))
def test_pages_for_is_the_least_number_that_holds_the_positions(positions: int, page_size: int) -> None:
    pages = pages_for(positions, page_size)
    assert pages * page_size >= positions
    assert (pages - 1) * page_size < positions


def test_a_shared_beginning_goes_after_what_follows_it_also_where_it_was_computed_twice() -> None:
    pool = PagePool(4)
    keys = (b"begin", b"one"), (b"begin", b"other")
    held = [pool.allocate(2) for _ in keys]
    for pages, names in zip(held, keys, strict=True):
        for page, key in zip(pages, names, strict=True):
            pool.publish(page, key)
    for pages in held:
        pool.release(pages)
    pool.evicted = []
    pool.allocate(4)
    assert [key for _page, key in pool.evicted] == [b"one", b"other", b"begin"]
