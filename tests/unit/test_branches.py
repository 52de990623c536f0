"""Where the branches of a canvas are: each has room, and what it shares with the others is known."""

from __future__ import annotations

import numpy as np
import pytest

from mmserve.core.branches import Branches, branch_capacity


@pytest.mark.parametrize("block", [None, 1, 4, 6, 8, 12, 16, 32])
@pytest.mark.parametrize("page", [1, 4, 8, 16])
def test_branches_fit_after_a_prompt_of_any_length(page: int, block: int | None) -> None:
    lengths = [3, 17, 9]
    room = branch_capacity(lengths, page, block)
    most = 0
    for prompt in range(1, 100):
        branches = Branches.laid_out(prompt, lengths, page, block)
        most = max(most, branches.size - prompt)
        assert branches.fork <= branches.alike <= prompt and branches.copied < page
        assert branches.fork % page == 0 and branches.alike % (block or 1) == 0
        assert (branches.starts % page == 0).all() and branches.starts[0] >= prompt
        assert (branches.starts[1:] >= branches.starts[:-1] + branches.sizes[:-1]).all()
        assert branches.own == sum(lengths)
    assert most <= room < most + 2 * page


def test_places_go_on_from_the_prompts() -> None:
    branches = Branches.laid_out(6, [3, 2], 4)
    assert [each.tolist() for each in branches.each()] == [[8, 9, 10, 11, 12], [16, 17, 18, 19]]
    places = branches.places(None)
    assert places[8:13].tolist() == [4, 5, 6, 7, 8] and places[16:].tolist() == [4, 5, 6, 7]
    pruned = branches.places(np.array([0, 1, 5, 6, 9, 10, 12]))
    assert pruned[8:13].tolist() == [9, 10, 12, 13, 14]


def test_what_a_block_shares_with_a_branch_is_run_in_each() -> None:
    branches = Branches.laid_out(11, [3, 2], 4, block=6)
    assert (branches.alike, branches.fork, branches.copied, branches.prefix) == (6, 4, 2, 7)
    into, of = branches.repeats(np.array([2, 5, 6, 9]))
    assert into.tolist() == [14, 17, 26, 29] and of.tolist() == [2, 3, 2, 3]
