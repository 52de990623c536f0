"""The bundled model's data and training: deterministic, apart from the test items, and resumable."""

import json
import random

import pytest
import torch

from mmserve.reference import evaluate, scenes
from mmserve.reference.data import BLOCK, collate, draw
from mmserve.reference.scenes import TASKS, TEST_SEEDS, TRAIN_SEEDS, Question, correct, draw_scene, sample, scene_json
from mmserve.reference.tokenizer import EOT, MASK, SPECIALS, token_id, train_tokenizer
from mmserve.reference.train import Recipe, Run, mask_answers


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def test_the_same_seed_draws_the_same_scene_and_question():
    one, two = (sample(random.Random(5), "what") for _ in range(2))
    assert one[1] == two[1]
    assert one[0].png() == two[0].png()


def test_training_and_test_seeds_are_disjoint():
    assert not set(range(TEST_SEEDS.start, TEST_SEEDS.stop)) & {TRAIN_SEEDS.start, TRAIN_SEEDS.stop - 1}
    assert TEST_SEEDS.stop <= TRAIN_SEEDS.start


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_can_be_told_from_the_scene_alone(task):
    for seed in range(50):
        scene, question = sample(random.Random(seed), task)
        assert correct(question, question.answer)
        assert not correct(question, question.answer + "x")
        if task == "what":
            place = question.text.removeprefix("What is at the ").removesuffix("?")
            there = [f"a {s.size} {s.color} {s.kind}" for s in scene.shapes if s.position == place]
            assert question.answer == (there or ["nothing"])[0]
        if task == "count":
            kind = question.text.split()[2].removesuffix("s")
            places = [s.position for s in scene.shapes if kind in ("shape", s.kind)]
            assert question.answer == (f"{len(places)}: {', '.join(places)}" if places else "0")
        if task == "yes_no":
            name = question.text.removeprefix("Is there a ").removesuffix("?")
            names = {s.position: (s.kind, f"{s.color} shape", f"{s.color} {s.kind}") for s in scene.shapes}
            there = [place for place, called in names.items() if name in called]
            assert question.answer == (f"yes, at the {there[0]}" if there else "no")


def test_a_scene_drawn_holds_the_colors_it_says():
    for seed in range(30):
        scene = draw_scene(random.Random(seed))
        for shape in scene.shapes:
            cell = scene.picture.crop(
                (
                    shape.column * scenes.CELL,
                    shape.row * scenes.CELL,
                    (shape.column + 1) * scenes.CELL,
                    (shape.row + 1) * scenes.CELL,
                )
            )
            _count, (r, g, b) = max(c for c in cell.getcolors() if c[1] != scenes.BACKGROUND)
            assert all(abs(x - y) <= 12 for x, y in zip((r, g, b), scenes.COLORS[shape.color], strict=True))


def test_json_answers_are_judged_by_value_not_by_spelling():
    scene = draw_scene(random.Random(1))
    question = Question("json", "Describe the scene as JSON.", scene_json(scene))
    assert correct(question, json.dumps(json.loads(question.answer), indent=2))
    assert not correct(question, question.answer[:-1])


def test_the_tokenizer_holds_every_byte_and_its_special_tokens(tokenizer):
    text = "".join(map(chr, range(32, 0x2FF))) + "日本語 🙂 \x00\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len({token_id(tokenizer, t) for t in SPECIALS}) == len(SPECIALS)


def test_training_the_tokenizer_twice_gives_the_same_one(tokenizer):
    assert train_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_loss_counts_answer_tokens_and_nothing_else(tokenizer):
    for kind in ("short", "caption", "json"):
        _kind, samples, canvas = draw(1, 0, {kind: 1.0})
        batch = collate(kind, samples[:6], canvas, tokenizer)
        assert torch.allclose(batch.share.sum(1), torch.ones(6))
        for row, (_scene, questions) in enumerate(samples[:6]):
            answered = batch.ids[row][batch.share[row] > 0]
            kept = [t for t in answered.tolist() if t != tokenizer.eos_token_id]
            ends = "".join(q.answer + EOT for q in questions)
            assert tokenizer.decode(kept) == ends
            assert (batch.share[row] > 0)[~batch.seen[row]].sum() == 0


def test_masks_hide_answer_tokens_only_and_carry_the_loss_of_their_block(tokenizer):
    mask_id = token_id(tokenizer, MASK)
    _kind, samples, _canvas = draw(0, 0, {"json": 1.0})
    batch = collate("json", samples, 64, tokenizer)
    ids, weight = mask_answers(batch, mask_id, 0.1, torch.Generator().manual_seed(0))
    masked = ids == mask_id
    assert not (masked & (batch.share == 0)).any()
    assert torch.equal(ids[~masked], batch.ids[~masked])
    assert not (weight[~masked] != 0).any()
    blockwise = (masked & (weight == 0)).any(1)  # rows with masks that carry no loss: the blocks to the right
    assert 0.05 < blockwise.float().mean() < 0.5  # half of the rows, where the random block is the left of two
    for row in blockwise.nonzero()[:, 0]:
        current = batch.block[row][weight[row] > 0].unique()
        assert len(current) <= 1
        right = (batch.share[row] > 0) & (torch.arange(ids.shape[1]) >= 0) & (weight[row] == 0) & masked[row]
        assert len(current) == 0 or (batch.block[row][right] > current).all()
    assert int(batch.block.max()) == 64 // BLOCK - 1


@pytest.mark.parametrize("kind", ["short", "caption"])
def test_the_masked_loss_is_unbiased(kind, tokenizer):
    """Averaged over masks, the weights add up to the share of each answer token."""
    mask_id = token_id(tokenizer, MASK)
    _kind, samples, canvas = draw(1, 0, {kind: 1.0})
    batch = collate(kind, samples[:8], canvas, tokenizer)
    generator = torch.Generator().manual_seed(1)
    draws = 3000
    mean = sum(mask_answers(batch, mask_id, 0.1, generator)[1] for _ in range(draws)) / draws
    assert torch.allclose(mean, batch.share, atol=0.03)


def test_a_run_resumed_ends_where_one_uninterrupted_does(tmp_path):
    recipe = Recipe(tower_steps=1, steps=3)
    torch.set_num_threads(1)
    whole = Run(recipe, tmp_path / "whole")
    for _ in range(3):
        whole.step()
    first = Run(recipe, tmp_path / "parts")
    first.step()
    first.step()
    first.save()
    second = Run(recipe, tmp_path / "parts")
    assert second.resume()
    second.step()
    for name, value in whole.average.state_dict().items():
        assert torch.equal(value, second.average.state_dict()[name]), name


def test_a_run_can_begin_with_anothers_weights_and_says_so(tmp_path):
    first = Run(Recipe(tower_steps=1, steps=3), tmp_path / "first")
    first.step()
    first.save()
    second = Run(Recipe(tower_steps=1, steps=4, seed=9), tmp_path / "second")
    second.begin_from(tmp_path / "first")
    assert second.done == 1
    for name, value in first.average.state_dict().items():
        assert torch.equal(value, second.average.state_dict()[name]), name
    second.save()
    third = Run(second.recipe, tmp_path / "second")
    assert third.resume()
    assert third.before["recipe"]["steps"] == 3
    assert third.before["done"] == 1


def test_captions_name_every_shape_once_in_any_order():
    orders = set()
    for seed in range(30):
        scene = draw_scene(random.Random(seed))
        said = scenes.caption(scene, random.Random(seed)).answer.split(", ")
        wanted = [f"a {s.size} {s.color} {s.kind} at the {s.position}" for s in scene.shapes]
        assert sorted(said) == sorted(wanted)
        orders.add(said == wanted)
    assert orders == {True, False}


def test_another_recipes_state_is_refused(tmp_path):
    run = Run(Recipe(tower_steps=1, steps=3), tmp_path)
    run.save()
    with pytest.raises(SystemExit, match="another recipe"):
        Run(Recipe(tower_steps=2, steps=3), tmp_path).resume()


def test_wilson_intervals_hold_the_share_and_stay_within_bounds():
    for right, n in ((0, 10), (10, 10), (450, 500), (1, 3)):
        row = evaluate.row("task", right, n)
        assert 0 <= row.low <= row.accuracy <= row.high <= 1
    assert evaluate.row("task", 450, 500).low == pytest.approx(0.8705, abs=5e-4)


def test_evaluation_items_differ_between_indices_seeds_and_tasks():
    drawn = {
        evaluate.item(task, index, seed)[0].png() for task in ("what", "json") for index in (0, 1) for seed in (0, 1)
    }
    assert len(drawn) == 8
