"""The reference data: deterministic, apart from the test items, and right about what it draws."""

import io
import json
import random

import av
import helpers
import numpy as np
import pytest
import torch

from mmserve.reference import scenes
from mmserve.reference.arithmetic import final_answer
from mmserve.reference.clips import Actor, Clip, h264
from mmserve.reference.data import BLOCK, CLIPS, ROWS, WITHOUT_MEDIA, collate, draw, frame_times
from mmserve.reference.items import TEST_SEEDS, TRAIN_SEEDS
from mmserve.reference.model import FRAME_TOKENS, FRAMES, VISUAL_TOKENS
from mmserve.reference.recipe import MIXES
from mmserve.reference.scenes import COLORS, KINDS, Shape
from mmserve.reference.tasks import SUBJECTS, TASKS, correct, sample
from mmserve.reference.tokenizer import EOT, MASK, SPECIALS, token_id, train_tokenizer
from mmserve.reference.train import mask_answers


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_draws_the_same_question_and_pictures(task):
    one, two = (sample(task, random.Random(5)) for _ in range(2))
    assert one[1] == two[1]
    assert len(one[1].answer) > 0
    for first, second in zip(*(SUBJECTS[TASKS[task]].media(thing) for thing, _q in (one, two)), strict=True):
        pictures = [list(m.pictures) if hasattr(m, "pictures") else [m] for m in (first, second)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*pictures, strict=True))


def test_training_and_test_seeds_are_disjoint():
    assert TEST_SEEDS.stop <= TRAIN_SEEDS.start


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_is_right_and_another_is_wrong(task):
    for seed in range(40):
        _thing, question = sample(task, random.Random(seed))
        assert correct(question, question.answer)
        assert not correct(question, question.answer + "x")
        assert not correct(question, "")


@pytest.mark.parametrize("task", [t for t in TASKS if t not in ("json", "caption", "arithmetic")])
def test_no_answer_is_right_most_of_the_time(task):
    answers = [sample(task, random.Random(seed))[1].answer for seed in range(150)]
    assert max(answers.count(a) for a in set(answers)) < 0.65 * len(answers)


def test_short_answers_follow_from_the_shapes():
    for seed in range(60):
        rng = random.Random(seed)
        scene, question = sample("what", rng)
        place = question.text.removeprefix("What is at the ").removesuffix("?")
        assert (
            question.answer == ([f"a {s.size} {s.name}" for s in scene.shapes if s.position == place] or ["nothing"])[0]
        )
        scene, question = sample("yes_no", rng)
        name = question.text.removeprefix("Is there a ").removesuffix("?")
        there = [s.position for s in scene.shapes if name in (s.name, s.kind, f"{s.color} shape")]
        assert question.answer == (f"yes, at the {there[0]}" if there else "no")
        scene, question = sample("count", rng)
        word = question.text.split()[2].removesuffix("s")
        places = [s.position for s in scene.shapes if word in ("shape", s.kind, s.color)]
        assert question.answer == (f"{len(places)}: {', '.join(places)}" if places else "0")


def test_json_holds_the_fields_that_the_question_asks_for_and_no_others():
    asked = set()
    for seed in range(80):
        scene, question = sample("json", random.Random(seed))
        value = json.loads(question.answer)
        if question.text.startswith("Give JSON with "):
            assert ("count" in value) == ("count" in question.text)
            assert ("colors" in value) == ("colors" in question.text)
            assert ("objects" in value) == ("objects" in question.text)
        for shape, held in zip(scene.shapes, value.get("objects", ()), strict="objects" in value):
            asked.add(tuple(held))
            assert all(held[k] == v for k, v in (("shape", shape.kind), ("color", shape.color)) if k in held)
            if "position" in held:
                assert f"{held['position']['row']} {held['position']['column']}" == shape.position
    assert len(asked) > 6


def test_json_is_judged_by_value_and_arithmetic_by_its_last_line():
    _scene, question = sample("json", random.Random(1))
    assert correct(question, json.dumps(json.loads(question.answer), indent=2))
    assert not correct(question, question.answer[:-1])
    _nothing, question = sample("arithmetic", random.Random(1))
    assert correct(question, f"no working\nAnswer: {final_answer(question.answer)}")
    assert not correct(question, question.answer.rpartition("\n")[0])


def test_every_line_of_working_is_true():
    for seed in range(100):
        _nothing, question = sample("arithmetic", random.Random(seed))
        *lines, last = question.answer.splitlines()
        for line in lines:
            left, right = line.split("=")
            assert eval(left) == int(right)
            assert 0 <= int(right) <= 99
        assert last == f"Answer: {lines[-1].split('=')[1]}"


def test_a_shape_is_drawn_in_its_cell_in_its_color():
    for seed in range(30):
        rng = random.Random(seed)
        shapes = scenes.draw_shapes(rng)
        picture = np.asarray(scenes.paint(shapes, rng)).astype(int)
        for s in shapes:
            side = scenes.CELL
            cell = picture[s.row * side : (s.row + 1) * side, s.column * side : (s.column + 1) * side].reshape(-1, 3)
            near = np.abs(cell - np.array(COLORS[s.color])).max(1) < 45
            assert near.sum() > 80


def test_a_clip_shows_what_its_script_says():
    shape = Shape("circle", "red", "large", 1, 1)
    clip = Clip("moves", (Actor(shape, moves="right"),), 4, 7)
    columns = []
    for picture in clip.frames([0.0, 2.0, 3.9]).pictures:
        red = np.asarray(picture).astype(int)
        columns.append(np.argwhere((red[..., 0] > 150) & (red[..., 1] < 100))[:, 1].mean())
    assert columns[0] < scenes.CELL < columns[1] < 2 * scenes.CELL < columns[2]
    late = Clip("appears", (Actor(shape, appears=2),), 4, 7)
    shown = [(np.asarray(p).astype(int)[..., 0] > 150).sum() for p in late.frames([1.9, 2.0]).pictures]
    assert shown[0] < 50 < shown[1]


def test_a_clip_is_written_as_real_h264():
    clip = SUBJECTS["video"].draw(random.Random(3))
    frames = clip.frames()
    with av.open(io.BytesIO(h264(frames))) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        decoded = [f.to_ndarray(format="rgb24") for f in container.decode(stream)]
    assert len(decoded) == len(frames.pictures)
    worst = max(
        np.abs(d.astype(int) - np.asarray(p).astype(int)).mean() for d, p in zip(decoded, frames.pictures, strict=True)
    )
    assert worst < 8


def test_frames_are_taken_from_the_middle_of_equal_spans():
    times = frame_times(8)
    assert times == [i + 0.5 for i in range(FRAMES)]


def test_the_tokenizer_holds_every_byte_splits_digits_and_knows_its_special_tokens(tokenizer):
    text = "".join(map(chr, range(32, 0x2FF))) + "日本語 🙂 \x00\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1234567")) == 7
    assert len({token_id(tokenizer, t) for t in SPECIALS}) == len(SPECIALS)
    stored = helpers.tokenizer()
    assert stored.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert stored.chat_template == tokenizer.chat_template
    assert stored.special_tokens_map == tokenizer.special_tokens_map


@pytest.mark.parametrize("kind", ROWS)
def test_the_loss_counts_answer_tokens_and_nothing_else(kind, tokenizer):
    mix = next(mix for mix in ("broad", "deciding", "decisions_alone", "dictated_and_copies") if kind in MIXES[mix])
    samples, canvas = next(
        (s[:4], c)
        for k, s, c in (draw(step, 0, scenes_only=False, scale=0.2, mix=mix) for step in range(400))
        if k == kind
    )
    batch = collate(kind, samples, canvas, tokenizer)
    asked = torch.tensor([float(len(questions)) for _thing, questions in samples])
    assert torch.allclose(batch.share.sum(1), asked)
    for row, (_thing, questions) in enumerate(samples):
        answered = batch.ids[row][batch.share[row] > 0]
        kept = [t for t in answered.tolist() if t != tokenizer.eos_token_id]
        ends = ["" if q.decision is not None else EOT for q in questions]
        assert tokenizer.decode(kept) == "".join(q.answer + end for q, end in zip(questions, ends, strict=True))
    assert not (batch.share > 0)[~batch.unpadded].any()
    assert not (batch.share > 0)[batch.visual_at].any()
    each = dict.fromkeys(("image", "listing", "json", "watch", "decisions"), VISUAL_TOKENS)
    each |= dict.fromkeys(("pair", "cells"), 2 * VISUAL_TOKENS)
    each |= dict.fromkeys(("video", "narration", "decisions_video"), FRAMES * FRAME_TOKENS)
    if kind == "stream":
        each[kind] = len(samples[0][0].whole) * FRAME_TOKENS
    assert (batch.visual_at.sum(1) == each.get(kind, 0)).all()
    shown = {"pair": 2, "cells": 2} | dict.fromkeys(CLIPS, FRAMES) | dict.fromkeys((*WITHOUT_MEDIA, "stream"), 0)
    pictures = shown.get(kind, 1) * len(samples)
    assert (0 if batch.pixels is None else len(batch.pixels)) == pictures


def test_masks_hide_answer_tokens_only_and_are_unbiased(tokenizer):
    mask_id = token_id(tokenizer, MASK)
    samples, canvas = next((s[:8], c) for k, s, c in (draw(i, 0, scenes_only=True) for i in range(50)) if k == "json")
    batch = collate("json", samples, canvas, tokenizer)
    generator = torch.Generator().manual_seed(0)
    total, draws = torch.zeros_like(batch.share), 1500
    for _ in range(draws):
        ids, weight = mask_answers(batch, mask_id, 0.1, generator)
        masked = ids == mask_id
        assert not (masked & (batch.share == 0)).any()
        assert not weight[~masked].any()
        total += weight
    answered = batch.share > 0
    ratio = torch.where(answered, total / draws / batch.share.clamp(min=1e-9), 0)
    by_place = ratio.sum(0) / answered.sum(0).clamp(min=1)  # of all rows together
    assert (by_place[answered.sum(0) > 3] - 1).abs().max() < 0.3 and abs(ratio[answered].mean() - 1) < 0.03
    assert int(batch.block.max()) == (int((batch.share > 0).sum(1).max()) - 1) // BLOCK


def test_every_kind_and_color_is_drawn():
    drawn = {(s.kind, s.color) for seed in range(300) for s in scenes.draw_shapes(random.Random(seed))}
    assert drawn == {(k, c) for k in KINDS for c in COLORS}
