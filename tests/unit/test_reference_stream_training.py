"""Teaching streams to an exported model, and measuring what it knows of them."""

import json
import random
from dataclasses import replace
from pathlib import Path

import helpers
import pytest
import torch

from mmserve.config import ModelConfig
from mmserve.models.registry import model_folder
from mmserve.reference.data import collate
from mmserve.reference.export import STREAMS, export
from mmserve.reference.exported import read_exported
from mmserve.reference.heldout import answer_errors
from mmserve.reference.model import FRAME_TOKENS, ReferenceModel
from mmserve.reference.parallel import Processes
from mmserve.reference.recipe import Recipe
from mmserve.reference.stream_accuracy import (
    Outcome,
    Streams,
    held_out_clips,
    rows_of,
    stream_accuracy,
    window_accuracy,
)
from mmserve.reference.stream_frames import SeenFrames
from mmserve.reference.streams import ask, draw_rows
from mmserve.reference.train import Run, Steps

CAUSAL = model_folder(ModelConfig(path="bundled-causal").path)
TEACHING = Recipe(
    objective="causal",
    tower_steps=0,
    scene_steps=0,
    packed_steps=0,
    steps=1000,
    warmup=1,
    mix="streaming",
    trained="decoder",
    scale=0.15,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def tokenizer():
    with helpers.one_tokenizer():
        yield helpers.tokenizer()


@pytest.fixture(scope="module")
def model():
    model = ReferenceModel(640, causal=True).eval()
    read_exported(CAUSAL, model)
    return model


@pytest.fixture(scope="module")
def seen(model):
    return SeenFrames.compute(model, held_out_clips(12))


def run_in(folder: Path, recipe: Recipe = TEACHING) -> Run:
    return Run(recipe, folder, torch.device("cpu"))


def stream_batch(tokenizer, seen, *, causal=True):
    samples = draw_rows(random.Random(5), 0.15, 4 if causal else 1, seen.clips, carriers=causal)
    batch = collate("stream", samples, 0 if causal else 16, tokenizer)
    return replace(batch, visual=seen.of([window for window, _questions in samples]))


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_and_change_only_the_decoder(tmp_path, tokenizer, seen):
    run = run_in(tmp_path)
    run.begin_from(CAUSAL)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    batch = stream_batch(tokenizer, seen)
    losses = [float(run.step(batch)["loss"]) for _ in range(3)]
    assert losses[-1] < 0.6 * losses[0]
    changed = {
        name.partition(".")[0] for name, value in run.model.state_dict().items() if not value.equal(before[name])
    }
    assert changed == {"decoder"}


def test_what_began_with_an_exported_model_has_its_weights_and_its_history(tmp_path):
    run = run_in(tmp_path / "run")
    run.begin_from(CAUSAL)
    run.save()
    results = [{"task": "all", "n": 10, "accuracy": 0.9, "low": 0.6, "high": 0.98}]
    report = [{"whole": 16, "carriers": 0, "frames": 600, "result": result} for result in results]
    (tmp_path / "run" / STREAMS).write_text(json.dumps(report))
    export(tmp_path / "run", tmp_path / "out")
    same = (tmp_path / "out" / "model.safetensors").read_bytes() == (CAUSAL / "model.safetensors").read_bytes()
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    legs = (CAUSAL / "MODEL_CARD.md").read_text().partition("\n## Training")[2]
    assert same and card.endswith(legs) and "| 16 | 0 | 600 | 90.0% |" in card


def test_streams_need_a_frozen_tower_and_so_does_an_exported_model(tmp_path):
    with pytest.raises(SystemExit, match="--trained decoder"):
        run_in(tmp_path, replace(TEACHING, trained="all"))
    with pytest.raises(SystemExit, match="--trained decoder"):
        run_in(tmp_path, replace(TEACHING, trained="all", mix="broad")).begin_from(CAUSAL)
    with pytest.raises(SystemExit, match="'tower' is not known"):
        run_in(tmp_path, replace(TEACHING, trained="tower"))


def test_frames_are_computed_once_for_the_same_weights(tmp_path, model, seen, monkeypatch):
    path, clips = tmp_path / "frames.pt", seen.clips[:2]
    first = SeenFrames.kept(path, model, clips)
    with monkeypatch.context() as patch:
        patch.setattr(SeenFrames, "compute", None)
        again = SeenFrames.kept(path, model, clips)
    for clip in clips:
        assert first.frame(clip, 1).shape == (FRAME_TOKENS, 256)
        assert torch.equal(first.frame(clip, 1), again.frame(clip, 1))
    torch.manual_seed(0)
    other = SeenFrames.kept(path, ReferenceModel(640, causal=True), clips)
    assert not torch.equal(other.frame(clips[0], 1), first.frame(clips[0], 1))


def test_a_carrier_is_the_mean_of_its_frame(seen):
    window = next(w for w, _q in draw_rows(random.Random(0), 0.1, 1, seen.clips, carriers=True) if w.whole)
    window = replace(window, carriers=len(window.frames) - 1)
    tokens = seen.of([window])
    assert tokens.shape == (1, len(window.frames) - 1 + FRAME_TOKENS, 256)
    clip, frame = window.frames[0]
    mean = seen.frame(window.clips[clip], frame).float().mean(0)
    assert torch.allclose(tokens[0, 0].float(), mean, rtol=0.01, atol=0.1)


def test_the_loader_gives_stream_batches_their_frames(tokenizer, monkeypatch):
    monkeypatch.setattr("mmserve.reference.data.training_clips", lambda: held_out_clips(12))
    frames = SeenFrames(held_out_clips(12), [torch.zeros(c.seconds, FRAME_TOKENS, 256) for c in held_out_clips(12)])
    steps = Steps(TEACHING, tokenizer, Processes(), frames)
    batch = next(b for b in map(steps.__getitem__, range(50)) if b.kind == "stream")
    assert batch.visual is not None and batch.pixels is None
    assert batch.visual.shape[1] == int(batch.visual_at.sum())


def test_a_stream_without_eviction_answers_as_its_window_at_once(model, tokenizer, seen):
    running = Streams(model, tokenizer, seen, count=3, whole=20, carriers=0, seed=1)
    with torch.no_grad():
        for _ in range(11):
            running.advance()
        windows = list(running.windows())
        asked = [(i, q) for i, w in enumerate(windows) for q in ask(w, random.Random(0))]
        asked += [(i, replace(question, answer="a wrong answer")) for i, question in asked[:2]]
        mine = running.right(asked)
        assert running.right(asked) == mine  # nothing is kept of a question
        expected = []
        for stream, question in asked:
            batch = collate("stream", [(windows[stream], [question])], 0, tokenizer)
            expected.append(not answer_errors(model, tokenizer, seen.of([windows[stream]]), batch).any())
    assert mine == expected and True in mine and False in mine


def test_a_stream_keeps_no_more_than_its_budget(model, tokenizer, seen):
    running = Streams(model, tokenizer, seen, count=2, whole=10, carriers=12, seed=1)
    with torch.no_grad():
        for frame in range(1, 61):
            running.advance()
            assert running.whole <= 10 and running.carriers <= 12
            assert len(running.cache) == running.sinks + running.carriers + 12 * running.whole
            for window in running.windows():
                assert len(window.frames) == running.whole + running.carriers <= frame
                assert window.second == frame - 1 and window.carriers == running.carriers
    assert running.carriers == 12
    rows = stream_accuracy(model, tokenizer, seen, whole=10, carriers=12, moments=(20, 21), streams=2)
    asked = {row.task: row.n for row in rows}
    assert asked["all"] > asked["newest clip"] == sum(n for name, n in asked.items() if name.startswith("label ")) > 0


def test_windows_of_both_kinds_of_model_are_measured(tokenizer, seen):
    torch.manual_seed(0)
    for causal in (True, False):
        rows = window_accuracy(
            ReferenceModel(640, causal=causal).eval(), tokenizer, seen, whole=3, carriers=0, windows=8
        )
        everything = next(row for row in rows if row.task == "all")
        assert everything.n >= 8 and everything.accuracy < 0.5


def test_rows_count_each_outcome_in_its_groups():
    outcomes = [Outcome("order", True, 3, True), Outcome("when", False, 3, False), Outcome("now", True, 4, True)]
    rows = {row.task: (row.n, row.accuracy) for row in rows_of(outcomes)}
    assert rows == {
        "order": (1, 1.0),
        "when": (1, 0.0),
        "now": (1, 1.0),
        "all": (3, 0.6667),
        "newest clip": (2, 0.5),
        "whole clip": (1, 1.0),
        "part of a clip": (1, 0.0),
        "label 3": (2, 0.5),
    }
