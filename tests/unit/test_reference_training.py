"""The training program: what it minimises, that it resumes exactly, and that it learns."""

import json
import random
from dataclasses import replace
from pathlib import Path

import helpers
import pytest
import torch

from mmserve.errors import ConfigError
from mmserve.reference import heldout
from mmserve.reference.data import collate, draw
from mmserve.reference.export import export
from mmserve.reference.items import Question
from mmserve.reference.losses import PIECEWISE
from mmserve.reference.model import ReferenceModel
from mmserve.reference.plot import plot
from mmserve.reference.recipe import OBJECTIVES, Recipe
from mmserve.reference.tasks import SUBJECTS, TASKS
from mmserve.reference.train import Run, train

#: Two steps of the tower alone, then three of everything; a row or two each.
TINY = Recipe(tower_steps=2, scene_steps=1, packed_steps=5, steps=5, scale=0.05, warmup=2)


@pytest.fixture(scope="module", autouse=True)
def tokenizer():
    with helpers.one_tokenizer():
        yield helpers.tokenizer()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_in(folder: Path, recipe: Recipe) -> Run:
    return Run(recipe, folder, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["diffusion", "causal"])
def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(tmp_path, objective):
    recipe = replace(TINY, objective=objective)
    whole = run_in(tmp_path / "whole", recipe)
    train(whole, workers=0)

    class Killed(Exception):
        pass

    first = run_in(tmp_path / "stopped", recipe)
    step, seen = first.step, []

    def stopped(batch):
        if len(seen) == 3:
            raise Killed
        seen.append(batch)
        return step(batch)

    first.step = stopped
    with pytest.raises(Killed):
        train(first, workers=0)
    first.save()
    second = run_in(tmp_path / "stopped", recipe)
    assert second.resume() and second.done == 3
    train(second, workers=0)
    assert second.done == whole.done == recipe.steps
    for name, value in whole.average.state_dict().items():
        assert torch.equal(value, second.average.state_dict()[name]), name
    with pytest.raises(SystemExit, match="another recipe"):
        run_in(tmp_path / "stopped", replace(recipe, seed=1)).resume()


def test_the_first_stage_trains_the_tower_and_nothing_else(tmp_path):
    recipe = replace(TINY, steps=2)
    run = run_in(tmp_path, recipe)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    train(run, workers=0)
    changed = {
        name.partition(".")[0] for name, value in run.model.state_dict().items() if not value.equal(before[name])
    }
    assert changed == {"tower"}


def test_a_run_can_begin_with_the_weights_of_another(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(torch.optim, "Muon", lambda matrices, lr, **_: torch.optim.SGD(matrices, lr))  # much quicker
    first = run_in(tmp_path / "one", replace(TINY, steps=1, tower_steps=0))
    kind, samples, canvas = draw(0, 0, scenes_only=True, scale=0.05)
    first.step(collate(kind, samples, canvas, tokenizer))
    first.save()
    second = run_in(tmp_path / "two", replace(TINY, seed=5))
    second.begin_from(tmp_path / "one")
    assert all(torch.equal(a, b) for a, b in zip(first.average.parameters(), second.model.parameters(), strict=True))
    second.save()
    export(tmp_path / "two", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "It began with the weights of the run below." in card and "1 steps in" in card
    with pytest.raises(SystemExit, match="is not there"):
        second.begin_from(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_step_on_answers_cut_into_pieces_teaches_the_same_changes(tmp_path, tokenizer, monkeypatch):
    samples, canvas = next((s[:1], c) for k, s, c in (draw(i, 0, scenes_only=False) for i in range(60)) if k == "json")
    batch = collate("json", samples, canvas, tokenizer)
    auxiliary = []
    for share in (0.0, 1.0):
        monkeypatch.setitem(PIECEWISE, "json", share)
        auxiliary.append(float(run_in(tmp_path, replace(TINY, tower_steps=0)).step(batch)["changes"]))
    assert auxiliary[0] == pytest.approx(auxiliary[1], rel=0.1) and auxiliary[0] > 0  # the media see another answer


@pytest.mark.slow
def test_training_lowers_the_loss_of_a_batch_it_sees_again(tmp_path, tokenizer):
    for objective in OBJECTIVES:
        run = run_in(tmp_path / objective, replace(TINY, objective=objective, tower_steps=0, warmup=1, steps=1000))
        _kind, samples, canvas = draw(3, 0, scenes_only=True, scale=0.1)
        batch = collate("json", samples, canvas if objective == "diffusion" else 0, tokenizer)
        losses = [float(run.step(batch)["loss"]) for _ in range(30)]
        assert sum(losses[-8:]) / 8 < 0.6 * sum(losses[:3]) / 3, objective


@pytest.mark.parametrize("kind", ["image", "video", "pair", "calls"])
def test_a_question_in_a_packed_row_gets_the_logits_it_gets_alone_in_a_causal_model(kind, tokenizer):
    torch.manual_seed(0)
    model = ReferenceModel(640, causal=True).eval()
    samples = _packed(kind)
    packed = collate(kind, samples, 0, tokenizer)
    assert packed.packed and int(packed.question.max()) > 1

    def logits(batch):
        with torch.no_grad():
            visual = None
            if batch.pixels is not None:
                visual = model.visual(model.image_features(batch.pixels)[0], pooled=batch.pooled)
            return model(visual, batch.ids, batch.visual_at, batch.positions, batch.attention_mask(causal=True))[0]

    together = logits(packed)
    for row, (thing, questions) in enumerate(samples[1:], start=1):
        for number, question in enumerate(questions, start=1):
            alone = collate(kind, [samples[0], (thing, [question])], 0, tokenizer)  # a first clip goes through a file
            at = (packed.question[row] == number) & packed.unpadded[row]
            mine = (alone.question[-1] == 1) & alone.unpadded[-1]
            assert torch.equal(packed.ids[row][at], alone.ids[-1][mine])
            assert (together[row][at] - logits(alone)[-1][mine]).abs().max() < 1e-3


def _packed(kind: str) -> list[tuple[object, list[Question]]]:
    mix = "calls_alone" if kind == "calls" else "broad"
    drawn = (draw(i, 0, scenes_only=False, packed=True, mix=mix) for i in range(60))
    return next(s[:2] for k, s, _c in drawn if k == kind)


def test_packed_rows_ask_different_questions_and_single_rows_one():
    for step in range(12):
        _kind, packed, _canvas = draw(step, 0, scenes_only=False, packed=True, scale=0.2)
        _kind, single, _canvas = draw(step, 0, scenes_only=False, scale=0.2)
        assert all(len(questions) == 1 for _thing, questions in single)
        for _thing, questions in packed:
            assert len({q.text for q in questions}) == len(questions) <= 4


def test_a_mix_may_ask_some_tasks_more_often():
    steps = [draw(step, 0, scenes_only=False, mix="perfecting") for step in range(40)]
    asked = [q.task for kind, samples, _c in steps if kind == "image" for _thing, qs in samples for q in qs]
    assert asked.count("count") > 2 * asked.count("color") > 0


def test_accuracy_is_measured_for_every_kind_and_an_untrained_model_has_none(tokenizer, monkeypatch):
    monkeypatch.setattr(heldout, "PASSES", 4)
    torch.manual_seed(0)
    for causal in (False, True):
        found = heldout.quick_accuracy(ReferenceModel(640, causal=causal), tokenizer, TINY)
        assert set(found) == set(SUBJECTS) and max(found.values()) < 0.1


def test_the_log_becomes_a_picture(tmp_path):
    with pytest.raises(ConfigError, match=r"no log\.jsonl"):
        plot(tmp_path)
    lines = [{"step": 100, "seconds": 1, "loss_json": 2.0}, {"step": 200, "seconds": 2, "loss_json": 1.0, "json": 0.5}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_the_card_tells_the_accuracy_that_was_measured(tmp_path):
    run = run_in(tmp_path, replace(TINY, objective="causal"))
    run.save()
    rows = [{"task": task, "n": 500, "accuracy": 0.98, "low": 0.96, "high": 0.99} for task in TASKS]
    settings = {"recompute": "last", "commit": "low_confidence", "seed": 3}
    report = {"bench": "quality", "rows": rows, "settings": settings, "machine": {"cpu": "abacus", "torch": "2.0"}}
    (tmp_path / "quality.json").write_text(json.dumps(report))
    export(tmp_path, tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "| when | 500 | 98.0% | 96.0% to 99.0% |" in card and "`last`" in card and "LLaVA's" in card
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llava_llama"
    assert sum(f.stat().st_size for f in (tmp_path / "out").rglob("*") if f.is_file()) < 30 << 20


def test_things_drawn_for_training_are_never_drawn_for_tests():
    trained = {(q.text, q.answer, t.picture.tobytes()) for _k, s, _c in [draw(2, 0, scenes_only=True)] for t, (q,) in s}
    for seed in range(3):
        thing, question = SUBJECTS["json"].sample("json", random.Random(seed))
        assert (question.text, question.answer, thing.picture.tobytes()) not in trained
