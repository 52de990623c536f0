"""Typed questions of the reference data: their answers, their canvas, and what the loss counts of them."""

import random

import helpers
import pytest
import torch

from mmserve.core.decisions import CHOICE, SCORE, YES_NO, Decision, questions_text
from mmserve.errors import InvalidArgument
from mmserve.models.decisions import slots
from mmserve.reference.data import collate, draw
from mmserve.reference.decisions import DECISIONS, draw_answered, prompt_question
from mmserve.reference.losses import mask_answers
from mmserve.reference.scenes import Scene
from mmserve.reference.tokenizer import MASK, token_id


@pytest.fixture(scope="module")
def tokenizer():
    return helpers.tokenizer()


def test_the_canvas_has_the_questions_and_a_slot_of_one_token_after_each(tokenizer):
    questions = [
        Decision(kind=YES_NO, text="Is there a red circle?"),
        Decision(kind=CHOICE, text="What color is it?", options=("red", "dark green")),
        Decision(kind=SCORE, text="How many?", low=1, high=4, instructions="Count twice."),
        Decision(kind=SCORE, text="How good?", low=0, high=1, options=("bad", "fine")),
        Decision(kind=YES_NO, text="Is it?", options=("it is", "")),
    ]
    asked = [
        "Is there a red circle?",
        "What color is it? A red B dark green:",
        "How many? Count twice. 1-4:",
        "How good? 0 bad 1 fine:",
        "Is it? yes it is:",
    ]
    assert len(questions_text(questions, together=True).splitlines()) == 1
    made = slots(tokenizer, questions, token_id(tokenizer, MASK), together=True)
    assert tokenizer.decode(made.ids) == "\n".join(text + MASK for text in asked)
    assert [made.ids[place] for place in made.places] == [token_id(tokenizer, MASK)] * 5
    spelled = [tuple(tokenizer.decode([t]) for t in candidates) for candidates in made.candidates]
    assert spelled == [("yes", "no"), ("A", "B"), ("1", "2", "3", "4"), ("0", "1"), ("yes", "no")]


def test_an_answer_of_several_tokens_is_refused_by_its_question(tokenizer):
    questions = [Decision(kind=YES_NO, text="a"), Decision(kind=SCORE, text="b", low=5, high=12)]
    with pytest.raises(InvalidArgument, match=r"questions\[1\].*one token for each of 5, 6"):
        slots(tokenizer, questions, 0, together=True)


def test_answers_about_a_scene_follow_from_its_shapes():
    asked = set()
    for seed in range(150):
        rng = random.Random(seed)
        scene = DECISIONS["decisions"](rng)
        assert isinstance(scene, Scene)
        for each in draw_answered(scene, 8, rng):
            text, label = each.decision.text, each.decision.labels[each.right]
            asked.add(each.decision.kind)
            if text.startswith("Is there a "):
                name = text.removeprefix("Is there a ").removesuffix("?")
                there = any(name in (s.name, s.kind, f"{s.color} shape") for s in scene.shapes)
                assert label == ("yes" if there else "no")
            elif text.startswith("Is the ") and " at the " in text:
                name, _, place = text.removeprefix("Is the ").removesuffix("?").partition(" at the ")
                there = any((s.name, s.position) == (name, place) for s in scene.shapes)
                assert label == ("yes" if there else "no")
            elif text.startswith("How many "):
                word = text.split()[2].removesuffix("s")
                assert int(label) == sum(word in ("shape", s.kind, s.color) for s in scene.shapes)
            elif text.startswith("What is at "):
                place = text.removeprefix("What is at the ").removesuffix("?")
                held = [f"a {s.size} {s.name}" for s in scene.shapes if s.position == place] or ["nothing"]
                assert label == held[0]
    assert asked == {YES_NO, CHOICE, SCORE}


@pytest.mark.parametrize("kind", DECISIONS)
def test_no_place_among_the_options_is_right_more_often_than_chance_by_far(kind):
    rng, right = random.Random(1), []
    for _ in range(120):
        thing = DECISIONS[kind](rng)
        found = [a for a in draw_answered(thing, 6, rng) if a.decision.kind == CHOICE]
        right += [a.right == 0 for a in found if len(a.decision.options) == 2]
    assert 0.3 < sum(right) / len(right) < 0.7


def test_all_slots_are_masked_and_only_they_count(tokenizer):
    mask_id = token_id(tokenizer, MASK)
    samples, canvas = next(
        (s, c)
        for k, s, c in (draw(i, 0, looking=False, mix="deciding", scale=0.1) for i in range(99))
        if k == "decisions"
    )
    batch = collate("decisions", samples, canvas, tokenizer)
    ids, weight = mask_answers(batch, mask_id, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(ids == mask_id, batch.share > 0)
    assert torch.equal(weight, batch.share)
    counts = [len(question.decisions) for _thing, [question] in samples]
    assert (ids == mask_id).sum(1).tolist() == counts


def test_a_causal_model_is_asked_one_question_at_a_time():
    kinds = {
        kind: samples
        for kind, samples, _c in (
            draw(i, 0, looking=False, mix="deciding", scale=0.1, causal=True, packed=True) for i in range(60)
        )
        if kind in DECISIONS
    }
    for kind, samples in kinds.items():
        for _thing, questions in samples:
            assert all(len(question.decisions) == 1 for question in questions), kind
    assert "decisions" in kinds


def test_a_described_scene_is_told_before_its_questions():
    rng = random.Random(2)
    told = DECISIONS["decisions_text"](rng)
    answered = draw_answered(told, 3, rng)
    question = prompt_question(told, answered, together=True)
    assert question.text.startswith(told.text + "\n")
    first = answered[0].decision
    assert question.answer.startswith(first.asked) and first.answers[answered[0].right] in question.answer
    apart = prompt_question(told, answered[:1], together=False)
    assert apart.text.endswith("\n" + first.asked) and apart.answer == first.answers[answered[0].right]
