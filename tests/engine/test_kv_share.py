"""KVShare: positions of images that are run again while the answer is decoded, against the rule written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bench
from helpers import ask, picture, tiny_model
from plain_reuse import kv_of_images_alone, shared_answer, with_three_layers

from mmserve.config import MediaConfig
from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.events import Finished
from mmserve.core.request import ImagePart, Message, Policy, Request, TextPart
from mmserve.decode import runner
from mmserve.decode.extensions.image_reuse.selective import SelectiveRecompute
from mmserve.decode.forward import Pass
from mmserve.decode.passes import Passes
from mmserve.encode.embedding import embedded
from mmserve.encode.encoder import Encoder
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]

ONE, TWO = (ImagePart(picture(i)) for i in range(2))
PARTS = (TextPart("look here: "), ONE, TextPart("and "), TWO, TextPart("what?"))


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    return with_three_layers(tiny_model(vision=True))


def say(name: str, new_tokens: int = 6, **options: Any) -> Request:
    asked = ask(name, recompute=Policy(name="last"), max_new_tokens=new_tokens)
    streaming = dataclasses.replace(asked.streaming, tokens=True)
    by = None if options.pop("plain", False) else Policy(name="kv_share", options=options)
    return dataclasses.replace(asked, messages=(Message("user", PARTS),), image_reuse=by, streaming=streaming)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of each pass that decodes, of one request at a time."""
    passes: list[list[int]] = []
    real = Passes.next

    def next_pass(self: Passes, d: Any, rows: np.ndarray) -> Pass:
        made = real(self, d, rows)
        passes.append(made.rows.tolist())
        return made

    monkeypatch.setattr(Passes, "next", next_pass)
    return passes


@pytest.mark.parametrize(("share", "each_step"), [(0.25, 1), (0.0, 3)])
@torch.inference_mode()
def test_the_answer_is_that_of_the_rule_written_out(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch, share: float, each_step: int
) -> None:
    request, passes = say("r", recompute=share, each_step=each_step), watched(monkeypatch)
    done = bench(causal).ask(request)
    encoder = Encoder(causal, MediaConfig(), max_tokens=500)
    [found] = encoder.encode([request])
    [begun] = encoder.encode([dataclasses.replace(request, messages=(Message("user", (ONE, TextPart("?"))),))])
    x, _deep = embedded(causal, found.ids, found)
    images = [slice(s.start, s.stop) for s in found.spans]
    at = torch.cat([torch.arange(s.start, s.stop) for s in images])
    alone = kv_of_images_alone(causal, x, images, begun.spans[0].start)
    tokens, likely, beside = shared_answer(causal, x, at, alone, round(share * len(at)), each_step, 6)
    assert passes == [[*rows, len(found.ids) + i] for i, rows in enumerate(beside)]
    order = [row for rows in beside for row in rows]
    assert order != sorted(order), "another order than that of positions"
    assert [t.id for t in done.tokens] == tokens
    torch.testing.assert_close([t.log_probability for t in done.tokens], likely, rtol=1e-4, atol=1e-4)


def test_it_goes_on_until_every_position_was_run(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = watched(monkeypatch)
    done = bench(causal).ask(say("r", new_tokens=7, recompute=0.2, each_step=3))
    assert [len(rows) - 1 for rows in passes] == [3, 3, 0, 0, 0, 0]
    beside = [row for rows in passes for row in rows[:-1]]
    assert len(set(beside)) == len(beside) == done.usage.reused_tokens == 6
    passes.clear()
    none, some = (bench(causal).ask(say("r", recompute=0.2, each_step=n)) for n in (0, 3))
    assert {len(rows) for rows in passes[:5]} == {1}, "none are run beside tokens where none are asked for"
    assert some.recomputed_tokens - none.recomputed_tokens == 6
    assert [t.log_probability for t in none.tokens] != [t.log_probability for t in some.tokens]


def test_a_pass_that_failed_leaves_no_trace(bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [say(str(each_step), each_step=each_step) for each_step in (1, 2)]
    b = bench(causal, prefix_cache=False)
    expected = [told(b.ask(r)) for r in asked]
    real, failed = runner.forward, []

    def poisoned(model: LoadedModel, store: Any, batch: list[Any], floor: int, **options: Any) -> Any:
        found = real(model, store, batch, floor, **options)
        if len(batch) > 1:
            failed.append([p.observation for p in batch])
            raise RuntimeError("only alone")
        return found

    monkeypatch.setattr(runner, "forward", poisoned)
    assert [told(call.finished()) for call in b.submit_together(*asked)] == expected
    assert any(None not in seen for seen in failed), "both were being repaired"


def told(done: Finished) -> tuple[object, ...]:
    return done.text, done.usage, done.recomputed_tokens, done.tokens


def test_what_a_constraint_forces_is_decoded_one_by_one(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many passes there are, and so what is run again, must not depend on what the server runs ahead."""
    ends = tiny_model(vision=False).spec.end_ids
    ending = dataclasses.replace(causal, spec=dataclasses.replace(causal.spec, end_ids=ends))
    passes = watched(monkeypatch)
    forced = ConstraintSpec(kind=Regex("forced text"))
    lengths = {}
    for name, options in (("plain", {"plain": True}), ("shared", {"each_step": 2})):
        request = dataclasses.replace(say(name, new_tokens=16, **options), constraint=forced)
        assert bench(ending).ask(request).text == "forced text"
        lengths[name] = [len(rows) for rows in passes]
        passes.clear()
    assert max(lengths["plain"]) > 3, "a constraint alone runs ahead"
    assert max(lengths["shared"]) == 3 and len(lengths["shared"]) > len(lengths["plain"])


def test_policies_that_draft_are_refused(bench: Make, causal: LoadedModel) -> None:
    drafting = dataclasses.replace(say("r").diffusion, commit=Policy(name="ngram"))
    with pytest.raises(InvalidArgument, match=r"must not be a policy that drafts .* set its each_step to 0"):
        bench(causal).submit(dataclasses.replace(say("r"), diffusion=drafting))
    greedy = say("r", each_step=0)
    drafted = dataclasses.replace(greedy, diffusion=drafting)
    assert [bench(causal).ask(r).text for r in (greedy, drafted)] == [bench(causal).ask(greedy).text] * 2


def test_the_next_rows_are_those_that_count_most_and_the_first_of_equals() -> None:
    state = SelectiveRecompute(2, 1, np.array([3, 5, 8, 9]), np.array([1, 2, 1, 2.0]), np.array([4, 1, 2, 2.0]))
    assert state.rows().tolist() == [3, 9] and state.rows().tolist() == [3, 9]
    assert SelectiveRecompute(2, 1, np.array([3, 5, 8]), np.zeros(3), np.zeros(3)).rows().tolist() == [3, 5]
