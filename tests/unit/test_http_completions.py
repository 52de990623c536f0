"""Bodies of completions: the answer ends with a suffix, which takes room of its own."""

from __future__ import annotations

from mmserve.http.completions import Completions

MOST = (1 << 32) - 1


def test_the_largest_room_before_a_suffix_is_left_to_the_model_to_refuse() -> None:
    asked = Completions().read({"model": "m", "prompt": "a", "suffix": "b", "max_tokens": MOST})
    assert asked.message.sampling.max_new_tokens == MOST
