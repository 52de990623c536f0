"""Answers that have a longest one: what none of them comes to is padding from the start, and no answer is lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bench, Call
from helpers import ask, threshold, tiny_model
from test_constrained import BLOCK, LAST, constrained, like, of
from test_policies import policy

from mmserve.constraint.admission import Admission
from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.core.canvas import GIVEN
from mmserve.core.constraint import (
    Choice,
    ConstraintKind,
    ConstraintSampling,
    ConstraintSpec,
    Hole,
    JsonSchema,
    Regex,
    Template,
)
from mmserve.core.request import Policy
from mmserve.decode.penalties import Penalties
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]
COLORS = Choice(("red", "green", "blue"))
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
#: Constraints, and the bytes of their longest answers.
BOUNDED: list[tuple[ConstraintKind, int]] = [
    (COLORS, 5),
    (Regex("[0-9]"), 1),
    (Regex(""), 1),  # one position must be left to be filled, if only with an end
    (JsonSchema('{"type": "boolean"}'), 5),
    (JsonSchema(json.dumps(of(n=DIGIT))), len('{"n": 1}')),
]
OPEN: list[ConstraintKind] = [Regex("[a-c]+"), JsonSchema('{"type": "array", "items": {"type": "boolean"}}')]
NONE = np.zeros(0, np.int64)


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    made = tiny_model(vision=False, seed=4)
    return {
        "full": made,
        "shifted": dataclasses.replace(made, spec=dataclasses.replace(made.spec, logit_shift=1)),
        "blocks": like(tiny_model(vision=False, seed=5), Attention.BLOCK_CAUSAL),
        "causal": like(tiny_model(vision=False, seed=3), Attention.CAUSAL),
    }


def answer_of(bench: Bench, call: Call) -> tuple[np.ndarray, np.ndarray]:
    """The answer's tokens, and the passes by which they became final."""
    budget = call.request.sampling.max_new_tokens
    tokens, committed = bench.canvases[call.request.id]
    return tokens[-budget:], committed[-budget:]


@pytest.mark.parametrize(("name", "block"), [("full", 3), ("full", 32), ("shifted", 3), ("blocks", 0)])
def test_what_no_answer_comes_to_is_padding_from_the_start(
    bench: Make, models: dict[str, LoadedModel], name: str, block: int
) -> None:
    made = bench(models[name])
    recompute = BLOCK if name == "blocks" else None
    asked = [
        constrained(ask(f"{i}", "red " * i, max_new_tokens=40, block=block, recompute=recompute), kind)
        for i, (kind, _longest) in enumerate(BOUNDED)
    ]
    ends = models[name].spec.end_ids
    for call, (_kind, longest) in zip(made.submit(*asked), BOUNDED, strict=True):
        done = call.finished()
        assert done.reason == "end" and not done.closed_by_budget
        assert done.forwards <= longest
        tokens, committed = answer_of(made, call)
        assert (committed[longest:] == GIVEN).all() and ends.issuperset(tokens[longest:].tolist())
        assert (committed[:longest] != GIVEN).all()


def test_passes_read_masks_where_no_answer_comes_to(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is told of no end that it has not said; a template's text it reads as it stands."""
    made = bench(models["full"])
    decoder = made.engine.stages.decoder
    begun: list[Any] = []
    begin = decoder.begin
    monkeypatch.setattr(decoder, "begin", lambda *given: begun.append(begin(*given)) or begun[-1])
    for i, (kind, longest) in enumerate(BOUNDED):
        made.ask(constrained(ask(f"{i}", max_new_tokens=24), kind))
        masks = decoder.parts.model.decoder.embed(torch.full((24,), models["full"].spec.mask_id))
        assert torch.equal(begun[-1].embeddings[-24 + longest :], masks[longest:]), kind
    form = Template(("it is ", Hole(4, Regex("[0-9]"))))
    made.ask(constrained(ask("form", max_new_tokens=24), form))
    canvas, embeddings = begun[-1].canvas, begun[-1].embeddings
    stands = torch.from_numpy(canvas.committed_at == GIVEN)
    assert stands.sum() > 10
    assert torch.equal(embeddings[stands], decoder.parts.model.decoder.embed(torch.from_numpy(canvas.tokens))[stands])


def test_padding_that_passes_do_not_read_is_no_repetition(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template's text is one, and so is what has become final."""
    counted = list[set[int]]()
    apply = Penalties.apply

    def noted(penalties: Penalties, logits: torch.Tensor) -> None:
        assert penalties.seen is not None
        counted.append(set(penalties.seen.tolist()))
        apply(penalties, logits)

    monkeypatch.setattr(Penalties, "apply", noted)
    made = bench(models["full"])
    for i, kind in enumerate((COLORS, Template(("=", Hole(4, Regex("[0-9]{4}")))))):
        counted.clear()
        request = constrained(ask(f"{i}", max_new_tokens=24, repetition_penalty=1.3), kind)
        made.ask(request)
        assert len(counted) > 1
        tokens, committed = made.canvases[request.id]
        known = set(tokens[committed < GIVEN].tolist())
        ends = models["full"].spec.end_ids  # those of an answer are no repetition
        given = set(tokens[committed == GIVEN].tolist())
        assert given - known, "what stands there can be told from the prompt"
        assert counted[0] == (known if i == 0 else known | (given - ends))
        first = set(tokens[committed == 1].tolist()) - ends
        assert counted[1] == counted[0] | first


def test_what_may_go_on_without_end_is_as_it_was(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[Any]:
        made = bench(models["full"])
        asked = [
            constrained(ask(f"{i} {seed}", max_new_tokens=24, temperature=seed / 2, seed=seed), kind)
            for i, kind in enumerate(OPEN)
            for seed in range(3)
        ]
        calls = made.submit(*asked)
        return [(c.finished().text, c.finished().forwards, *(x.tolist() for x in answer_of(made, c))) for c in calls]

    found = run()
    monkeypatch.setattr(Admission, "_reach", lambda _self, _opened, size: size)
    assert run() == found


@pytest.mark.parametrize("commit", [policy("low_confidence"), threshold(0.3), policy("random"), policy("edit")])
def test_the_same_alone_and_together_however_it_is_drawn(
    bench: Make, models: dict[str, LoadedModel], commit: Policy
) -> None:
    made = bench(models["full"], watch=commit.name != "edit")
    asked = [
        constrained(
            ask(f"{i} {seed}", max_new_tokens=24, temperature=seed, seed=seed, steps=6 * seed, block=8, commit=commit),
            kind,
        )
        for i, (kind, _longest) in enumerate(BOUNDED)
        for seed in range(2)
    ]
    together = [call.finished() for call in made.submit(*asked)]
    for request, done in zip(asked, together, strict=True):
        [alone] = made.submit(dataclasses.replace(request, id=f"{request.id} alone"))
        assert (alone.finished().text, alone.finished().forwards) == (done.text, done.forwards)


def test_every_option_comes_in_whichever_tokens(bench: Make, models: dict[str, LoadedModel]) -> None:
    made = bench(models["full"], watch=False)
    asked = [constrained(ask(f"{i}", temperature=5.0, seed=i, max_new_tokens=32), COLORS) for i in range(24)]
    assert {call.finished().text for call in made.submit(*asked)} == set(COLORS.options)
    admission = Admission(models["full"])
    [session] = admission.admit(ConstraintSpec(COLORS), 32)
    admission.close()
    state, byte_ids = session.answer, session.answer.lexicon.ids
    spelled = np.array([byte_ids[bytes([byte])] for byte in b"green"])
    likely = TopK(np.arange(5), spelled[:, None], np.zeros((5, 1), np.float32))
    state.search(np.where(state.given < 0, -1, state.given), likely, 32)
    assert state.witness.tokens[:5].tolist() == spelled.tolist() and state.witness.length == 5


def test_models_that_cannot_see_it_and_draws_that_are_true_are_left_alone(models: dict[str, LoadedModel]) -> None:
    def given(model: LoadedModel, sampling: ConstraintSampling) -> np.ndarray:
        admission = Admission(model)
        [session] = admission.admit(ConstraintSpec(COLORS, sampling=sampling), 32)
        admission.close()
        return session.answer.given

    assert (given(models["full"], ConstraintSampling.MASK)[5:] >= 0).all()
    assert (given(models["full"], ConstraintSampling.AWRS) < 0).all()
    assert (given(models["causal"], ConstraintSampling.MASK) < 0).all()


def test_a_hole_is_no_longer_than_what_may_fill_it(bench: Make, models: dict[str, LoadedModel]) -> None:
    made = bench(models["full"])
    template = Template(("Count: ", Hole(12, Regex("[0-9]")), ", color: ", Hole(12, COLORS), "."))
    request = dataclasses.replace(ask("form", max_new_tokens=60), constraint=ConstraintSpec(template))
    [call] = made.submit(request)
    done = call.finished()
    assert done.text == f"Count: {done.holes[0]}, color: {done.holes[1]}."
    assert len(done.holes[0]) == 1 and done.holes[1] in COLORS.options
    assert done.forwards <= 6 and int((answer_of(made, call)[1] > GIVEN).sum()) == 6


SENTENCES = Choice(("It is a circle.", "There is a red square.", "No shape at all."))


def test_what_can_read_in_one_way_only_is_final_at_once(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided, told = ConstrainedAnswer.decided, list[int]()

    def checked(state: ConstrainedAnswer, known: np.ndarray) -> np.ndarray:
        found = decided(state, known)
        begun = state.read(known[: int(np.argmin(known))].tolist()) if (known < 0).any() else ""
        ways = [option for option in SENTENCES.options if option.startswith(begun)]
        told.append(len(found))
        assert not len(found) or len(ways) == 1
        return found

    def passes(ask_whether: Callable[..., np.ndarray], **options: Any) -> int:
        monkeypatch.setattr(ConstrainedAnswer, "decided", ask_whether)
        made = bench(models["full"])
        asked = [constrained(ask(f"{seed}", max_new_tokens=40, seed=seed, **options), SENTENCES) for seed in range(3)]
        done = [call.finished() for call in made.submit(*asked)]
        assert all(each.text in SENTENCES.options for each in done)
        return sum(each.forwards for each in done)

    for options in ({"temperature": 1.0}, {"commit": policy("random"), "block": 4}):
        assert passes(checked, **options) < passes(lambda _state, _known: NONE, **options)
    assert any(told)


def test_to_ask_of_a_frontier_again_finds_nothing_more(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided, looked = ConstrainedAnswer.decided, ConstrainedAnswer._decided
    asked = [0]

    def counted(state: ConstrainedAnswer, known: np.ndarray) -> np.ndarray:
        asked[0] += 1
        return looked(state, known)

    def again(state: ConstrainedAnswer, known: np.ndarray) -> np.ndarray:
        state.asked = -1
        return decided(state, known)

    def run(ask_whether: Callable[..., np.ndarray]) -> tuple[list[Any], int]:
        monkeypatch.setattr(ConstrainedAnswer, "decided", ask_whether)
        asked[0] = 0
        made = bench(models["full"])
        requests = [
            constrained(ask(f"{seed}", max_new_tokens=40, seed=seed, temperature=1.0, commit=policy("random")), kind)
            for seed, kind in enumerate((SENTENCES, COLORS, Template(("It: ", Hole(20, SENTENCES), Hole(9, COLORS)))))
        ]
        done = [call.finished() for call in made.submit(*requests)]
        return [(each.text, each.forwards) for each in done], asked[0]

    monkeypatch.setattr(ConstrainedAnswer, "_decided", counted)
    (once, few), (always, many) = run(decided), run(again)
    assert once == always and 0 < few < many


def test_one_answer_alone_takes_one_pass(bench: Make, models: dict[str, LoadedModel]) -> None:
    made = bench(models["full"])
    [call] = made.submit(constrained(ask("only", max_new_tokens=40), Choice(("a small red circle",))))
    assert (call.finished().text, call.finished().forwards) == ("a small red circle", 1)


def test_next_tokens_are_what_they_were(bench: Make, models: dict[str, LoadedModel]) -> None:
    made = bench(models["causal"])
    [call] = made.submit(constrained(ask("next", max_new_tokens=40, recompute=LAST), COLORS))
    assert call.finished().text in COLORS.options
    assert (answer_of(made, call)[1] != GIVEN).all()
