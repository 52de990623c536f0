"""Drafts of the canvas and alternatives of tokens: what they add up to, and that asking for them changes no answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from harness import Bench
from helpers import ask, dkv, threshold, tiny_model

from mmserve.core.constraint import ConstraintSpec, Hole, Regex, Template
from mmserve.core.events import Draft, DraftPosition, Finished
from mmserve.core.request import Policy, Request, Streaming
from mmserve.models.base import Attention, LoadedModel

MODEL = tiny_model(vision=False)
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dual": {"recompute": Policy(name="dual"), "commit": threshold(0.05)},
    "dkv": {"recompute": dkv(2)},
    "drawn": {"temperature": 1.0, "seed": 5, "top_k": 9},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "edit": {"commit": Policy(name="edit", options={"confidence": 0.05, "edit_confidence": 0.05})},
    "early": {"commit": Policy(name="early_commit", options={"early": 0.5})},
    "entropy": {"commit": Policy(name="entropy_bound")},
    "guidance": {},
}


def watched(request: Request, **streaming: Any) -> Request:
    return dataclasses.replace(request, streaming=Streaming(drafts=True, tokens=True, **streaming))


def asked(name: str, **more: Any) -> Request:
    request = ask(name, max_new_tokens=16, block=8, **{**POLICIES[name], **more})
    if name == "guidance":
        request = dataclasses.replace(request, diffusion=dataclasses.replace(request.diffusion, cfg_scale=0.5))
    return request


def canvases(drafts: list[Draft]) -> list[dict[int, DraftPosition]]:
    """The canvas after each draft."""
    found: list[dict[int, DraftPosition]] = []
    for draft in drafts:
        found.append({**(found[-1] if found else {}), **{at.index: at for at in draft.positions}})
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_drafts_add_up_to_the_answer_and_change_nothing(bench: Any, name: str) -> None:
    b: Bench = bench(MODEL, watch=False)
    alone = b.ask(dataclasses.replace(asked(name), streaming=Streaming(tokens=True)))
    call = b.submit(watched(asked(name), alternatives=3))[0]
    done = call.finished()
    bare = dataclasses.replace(done, tokens=tuple(dataclasses.replace(t, alternatives=()) for t in done.tokens))
    assert (bare.text, bare.tokens, bare.forwards, bare.edits) == (
        alone.text,
        alone.tokens,
        alone.forwards,
        alone.edits,
    )

    drafts = [event for event in call.events if isinstance(event, Draft)]
    assert [draft.forwards for draft in drafts] == list(range(1, done.forwards + 1))
    assert [at.index for at in drafts[0].positions] == list(range(16))
    last = canvases(drafts)[-1]
    content = [at for _index, at in sorted(last.items()) if at.id not in MODEL.spec.end_ids]
    assert [at.id for at in content[: len(done.tokens)]] == [token.id for token in done.tokens]
    for at, token in zip(content, done.tokens, strict=False):
        assert at.confidence == pytest.approx(2.718281828**token.log_probability, abs=2e-3)
        assert at.text == token.text == MODEL.tokenizer.decode([token.id])
        assert at.state in ("committed", "edited")


@pytest.mark.parametrize("name", POLICIES)
def test_alternatives_are_in_order_and_the_greedy_token_leads_them(bench: Any, name: str) -> None:
    b: Bench = bench(MODEL, watch=False)
    done = b.submit(watched(asked(name), alternatives=4))[0].finished()
    judged = [token for token in done.tokens if token.alternatives]
    assert judged
    for token in judged:
        numbers = [other.log_probability for other in token.alternatives]
        assert len(numbers) == 4 and numbers == sorted(numbers, reverse=True)
        assert not {other.id for other in token.alternatives} & set(MODEL.spec.banned_ids)
        mine = next((other for other in token.alternatives if other.id == token.id), None)
        if name != "drawn":
            assert mine is token.alternatives[0]
        if mine is not None:
            assert mine.log_probability == pytest.approx(token.log_probability, abs=1e-4)


def test_a_committed_position_changes_only_to_edited(bench: Any) -> None:
    b: Bench = bench(MODEL, watch=False)
    for name in ("plain", "edit"):
        call = b.submit(watched(asked(name)))[0]
        done = call.finished()
        drafts = [event for event in call.events if isinstance(event, Draft)]
        edited = 0
        for before, after in zip(canvases(drafts), canvases(drafts)[1:], strict=False):
            for index, at in after.items():
                if before[index].state in ("committed", "edited") and before[index].id != at.id:
                    assert at.state == "edited"
                    edited += 1
        assert edited == done.edits and (edited > 0) == (name == "edit")


def causal() -> LoadedModel:
    model = tiny_model(vision=False, seed=3)
    spec = dataclasses.replace(model.spec, attention=Attention.CAUSAL, logit_shift=1)
    return dataclasses.replace(model, spec=spec)


@pytest.mark.parametrize("commit", [None, Policy(name="ngram")])
def test_a_next_token_model_fills_its_canvas_from_the_left(bench: Any, commit: Policy | None) -> None:
    b: Bench = bench(causal(), watch=False)
    request = ask("r", "red red red red", max_new_tokens=10, recompute=Policy(name="last"), commit=commit)
    call = b.submit(watched(request, alternatives=2))[0]
    done: Finished = call.finished()
    for canvas in canvases([event for event in call.events if isinstance(event, Draft)]):
        final = [canvas[i].state == "committed" for i in range(10)]
        assert final == sorted(final, reverse=True)
    assert all(token.alternatives[0].id == token.id for token in done.tokens)


def test_text_of_a_template_is_pinned(bench: Any) -> None:
    b: Bench = bench(MODEL, watch=False)
    parts = ("a ", Hole(4, Regex("[b-d]{2}")), " z", Hole(2, Regex("[0-9]")))
    request = dataclasses.replace(ask("t", max_new_tokens=24), constraint=ConstraintSpec(Template(parts)))
    call = b.submit(watched(request, alternatives=2))[0]
    done = call.finished()
    drafts = [event for event in call.events if isinstance(event, Draft)]
    pinned = [at for at in drafts[0].positions if at.state == "pinned"]
    assert "".join(at.text for at in pinned) == "a  z" and all(at.confidence == 1 for at in pinned)
    last = canvases(drafts)[-1]
    assert {at.index for at in last.values() if at.state == "pinned"} == {at.index for at in pinned}
    assert "".join(MODEL.tokenizer.decode([t.id]) for t in done.tokens) == done.text
