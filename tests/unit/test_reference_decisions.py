"""Typed questions of the reference data: their answers, their rows, and what the loss counts of them."""

import random

import helpers
import pytest
import torch

from mmserve.core.decisions import CHOICE, INSTRUCTION, SCORE, YES_NO, Decision
from mmserve.errors import InvalidArgument
from mmserve.models.decisions import closing_ids, questions_ids
from mmserve.reference.batch import NO_COLUMN
from mmserve.reference.copying import Guide
from mmserve.reference.data import collate, draw
from mmserve.reference.decisions import DECISIONS, draw_answered, prompt_question
from mmserve.reference.losses import mask_answers
from mmserve.reference.scenes import Scene
from mmserve.reference.tokenizer import MASK, token_id


@pytest.fixture(scope="module")
def tokenizer():
    return helpers.tokenizer()


def test_each_question_follows_the_prompt_and_ends_with_the_user_s_turn(tokenizer):
    questions = [
        Decision(kind=YES_NO, text="Is there a red circle?"),
        Decision(kind=CHOICE, text="What color is it?", options=("red", "dark green")),
        Decision(kind=SCORE, text="How many?", low=1, high=4, instructions="Count twice."),
        Decision(kind=SCORE, text="How good?", low=0, high=1, options=("bad", "fine")),
        Decision(kind=YES_NO, text="Is it?", options=("it is", "")),
    ]
    asked = [
        "Is there a red circle?",
        "What color is it? 1 red 2 dark green",
        "How many? Count twice. 1-4",
        "How good? 0 bad 1 fine",
        "Is it? yes it is",
    ]
    made = questions_ids(tokenizer, questions)
    closing = tokenizer.decode(closing_ids(tokenizer))
    assert closing == "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert [tokenizer.decode(ids) for ids in made.before] == [f"\n{text}{closing}" for text in asked]
    assert made.lengths == [len(ids) + 1 for ids in made.before]
    spelled = [tuple(tokenizer.decode([t]) for t in candidates) for candidates in made.candidates]
    assert spelled == [("yes", "no"), ("1", "2"), ("1", "2", "3", "4"), ("0", "1"), ("yes", "no")]


def test_an_answer_of_several_tokens_is_refused_by_its_question(tokenizer):
    questions = [Decision(kind=YES_NO, text="a"), Decision(kind=SCORE, text="b", low=5, high=12)]
    with pytest.raises(InvalidArgument, match=r"questions\[1\].*one token for each of 5, 6"):
        questions_ids(tokenizer, questions)


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
        for k, s, c in (draw(i, 0, scenes_only=False, mix="deciding", scale=0.1) for i in range(99))
        if k == "decisions"
    )
    batch = collate("decisions", samples, canvas, tokenizer)
    ids, weight = mask_answers(batch, mask_id, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(ids == mask_id, batch.share > 0)
    assert torch.equal(weight, batch.share)
    assert (ids == mask_id).sum(1).tolist() == [len(questions) for _thing, questions in samples]


def test_a_question_sees_what_it_is_about_and_itself_as_it_does_when_it_is_asked(tokenizer):
    samples = [(thing := DECISIONS["decisions"](random.Random(3)), [])]
    samples[0][1].extend(prompt_question(thing, each) for each in draw_answered(thing, 3, random.Random(4)))
    batch = collate("decisions", samples, 0, tokenizer)
    shared, [sees] = int((batch.question[0] == 0).sum()), batch.attention_mask(causal=False)[0]
    text = tokenizer.decode(batch.ids[0, :shared])
    assert text.endswith(f"<image>\n{INSTRUCTION}")
    for number, question in enumerate(samples[0][1], start=1):
        own = (batch.question[0] == number).nonzero()[:, 0]
        [ids] = questions_ids(tokenizer, [question.decision]).before
        assert batch.ids[0, own[:-1]].tolist() == list(ids) and batch.share[0, own[-1]] == 1
        assert batch.positions[0, own].tolist() == list(range(shared, shared + len(own)))
        seen = {*range(shared), *own.tolist()}
        assert all({*row.nonzero()[:, 0].tolist()} == seen for row in sees[own])
    assert all({*row.nonzero()[:, 0].tolist()} == {*range(shared)} for row in sees[:shared])


def test_a_described_scene_is_told_before_its_questions():
    rng = random.Random(2)
    told = DECISIONS["decisions_text"](rng)
    [first, *_others] = draw_answered(told, 3, rng)
    question = prompt_question(told, first)
    assert question.text == f"{told.text}\n{INSTRUCTION}"
    assert question.decision == first.decision and question.answer == first.decision.answers[first.right]


def test_the_slot_of_a_choice_is_guided_to_the_right_label_and_labels_to_their_options(tokenizer):
    guided = 0
    for kind in DECISIONS:
        rng = random.Random(5)
        thing = DECISIONS[kind](rng)
        answered = draw_answered(thing, 8, rng)
        batch = collate(kind, [(thing, [prompt_question(thing, each) for each in answered])], 0, tokenizer)
        guide, texts = Guide.of(batch), [tokenizer.decode([i]) for i in batch.ids[0].tolist()]
        assert ((guide.source >= 0) <= (batch.share > 0)).all()
        for number, each in enumerate(answered, start=1):
            own = (batch.question[0] == number).nonzero().flatten()
            labels = [int(c) for c in own if guide.neighbour[0, c] >= 0]
            assert [texts[c] for c in labels] == (list(each.decision.answers) if each.decision.kind == CHOICE else [])
            source = int(guide.source[0, own[-1]])
            if not labels:
                assert source == NO_COLUMN
                continue
            guided += 1
            assert source == labels[each.right]
            for column, option in zip(labels, each.decision.options, strict=True):
                assert option.startswith(texts[int(guide.neighbour[0, column])].strip())
    assert guided > 8


def test_before_the_slot_a_causal_model_is_guided_to_the_right_option_and_from_it_to_its_label(tokenizer):
    guided = 0
    for kind in DECISIONS:
        rng = random.Random(7)
        thing = DECISIONS[kind](rng)
        answered = draw_answered(thing, 8, rng)
        batch = collate(kind, [(thing, [prompt_question(thing, each) for each in answered])], 0, tokenizer)
        guide, texts = Guide.causal(batch), [tokenizer.decode([i]) for i in batch.ids[0].tolist()]
        columns = torch.arange(batch.ids.shape[1])
        assert ((guide.source[0] < columns) & (guide.neighbour[0] < columns)).all()
        assert (batch.share[0, 1:] > 0)[guide.source[0, :-1] >= 0].all()
        for number, each in enumerate(answered, start=1):
            own = (batch.question[0] == number).nonzero().flatten()
            ends = [int(c) for c in own if guide.neighbour[0, c] >= 0]
            labels = [texts[int(guide.neighbour[0, c])] for c in ends]
            assert labels == (list(each.decision.answers) if each.decision.kind == CHOICE else [])
            assert int(guide.source[0, own[-1] - 1]) == (ends[each.right] if ends else NO_COLUMN)
            for column, option in zip(ends, each.decision.options, strict=bool(ends)):
                assert option.endswith(texts[column].strip())
            guided += bool(ends)
    assert guided > 8
