"""Training an adapter of a bundled model: nothing else changes, and what is written is what was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ask
from safetensors.torch import load_file

from mmserve.config import ModelConfig
from mmserve.models.adapters import Adapters
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import dense_attention
from mmserve.models.lora import Adapted
from mmserve.models.lora_files import WEIGHTS
from mmserve.models.registry import load_model, model_folder
from mmserve.reference.batch import Batch
from mmserve.reference.data import collate, draw
from mmserve.reference.export import DECISIONS, export
from mmserve.reference.exported import read_exported
from mmserve.reference.low_rank import merge_adapter
from mmserve.reference.model import ReferenceModel
from mmserve.reference.recipe import Recipe
from mmserve.reference.train import Run

BUNDLED = model_folder(ModelConfig(path="bundled").path)
TEACHING = Recipe(
    tower_steps=0, scene_steps=0, packed_steps=0, steps=9, warmup=1, trained="adapter", rank=3, adam_lr=0.01
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def tokenizer() -> Iterator[Any]:
    """That of the exported model: training it anew would give the same one."""
    made = load_model(ModelConfig(path="bundled")).tokenizer
    with pytest.MonkeyPatch.context() as patch:
        for module in ("train", "export"):
            patch.setattr(f"mmserve.reference.{module}.train_tokenizer", lambda: made)
        yield made


def run_in(folder: Path, recipe: Recipe = TEACHING) -> Run:
    return Run(recipe, folder, torch.device("cpu"))


def logits(model: ReferenceModel, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        found: Any = model(None, batch.ids, batch.visual_at, batch.positions, batch.attention_mask(causal=False))[0]
    return found


@pytest.fixture(scope="module")
def batch(tokenizer: Any) -> Batch:
    samples, canvas = next((s[:2], c) for k, s, c in (draw(i, 0, scenes_only=False) for i in range(60)) if k == "text")
    return collate("text", samples, canvas, tokenizer)


def run_tokenizer() -> Any:
    return load_model(ModelConfig(path="bundled")).tokenizer


def test_steps_change_the_adapter_alone_and_resume_and_export_keep_it(tmp_path: Path, batch: Batch) -> None:
    run = run_in(tmp_path / "run")
    run.begin_from(BUNDLED)
    first = logits(run.model, batch)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    for _ in range(2):
        run.step(batch)
    changed = {name for name, value in run.model.state_dict().items() if not value.equal(before[name])}
    # the first step changes b alone, for a has no effect before
    assert changed == {n for n in before if n.endswith((".weight.0.a", ".weight.0.b"))}
    assert len(changed) == 2 * 7 * len(run.model.decoder.layers)

    run.save()
    again = run_in(tmp_path / "run")
    assert again.resume() and again.done == 2
    run.step(batch)
    again.step(batch)
    for name, value in run.average.state_dict().items():
        assert value.equal(again.average.state_dict()[name]), name

    run.save()
    row = {"measured": "accuracy", "task": "score", "n": 460, "accuracy": 0.875, "calibration_error": 0.0301}
    (tmp_path / "run" / DECISIONS).write_text(json.dumps({"rows": [row, {"measured": "picture"}]}))
    export(tmp_path / "run", tmp_path / "adapters" / "own", dtype=torch.float32)
    plain = ReferenceModel(first.shape[-1], causal=False)
    read_exported(BUNDLED, plain)
    assert logits(plain, batch).equal(first)
    merge_adapter(plain, load_file(tmp_path / "adapters" / "own" / WEIGHTS))
    trained = logits(run.average, batch)
    assert (logits(plain, batch) - trained).abs().max() < 1e-3 < (first - trained).abs().max()
    card = (tmp_path / "adapters" / "own" / "README.md").read_text()
    assert "rank 3" in card and "| score | 460 | 87.5% | 0.030 |" in card

    model = load_model(ModelConfig(path="bundled"))
    assert isinstance(model, LoadedModel)
    served = Adapters(replace(model, adapters=tmp_path / "adapters"), most=1 << 30)
    served.load_own()
    [info] = served.listed()
    assert (info.name, info.rank) == ("own", 3)


def test_an_adapter_of_the_output_layer_is_trained_written_and_served(tmp_path: Path, batch: Batch) -> None:
    recipe = replace(TEACHING, output=True, adapter_muon=True)
    run = run_in(tmp_path / "run", recipe)
    run.begin_from(BUNDLED)
    by_muon, by_adam = ({p.data_ptr() for g in o.param_groups for p in g["params"]} for o in run.optimizers.all)
    added = {n: p.data_ptr() for n, p in run.model.named_parameters() if n.endswith((".weight.0.a", ".weight.0.b"))}
    assert by_muon == {at for name, at in added.items() if ".layers." in name}
    assert by_adam >= {at for name, at in added.items() if ".head." in name} != set()
    head = run.model.decoder.head.weight.clone()
    for _ in range(2):
        run.step(batch)
    assert not run.model.decoder.head.weight.equal(head)
    run.save()
    for file in BUNDLED.iterdir():
        if file.name != "adapters":
            (tmp_path / file.name).symlink_to(file)
    export(tmp_path / "run", tmp_path / "adapters" / "own", dtype=torch.float32)
    further = run_in(tmp_path / "further", recipe)
    further.begin_from(tmp_path / "adapters" / "own")
    assert logits(further.model, batch).equal(logits(run.average, batch)) and "rank 3" in further.before["card"]
    further.step(batch)
    further.save()
    export(tmp_path / "further", tmp_path / "further" / "own")
    card, legs = ((tmp_path / of / "own" / "README.md").read_text() for of in ("further", "adapters"))
    assert card.endswith(legs.partition("\n## Training")[2]) and card.count("## Training") == 2
    assert "began with the weights of the run below" in card
    with pytest.raises(SystemExit, match="--rank and --output as they were"):
        run_in(tmp_path / "further", replace(recipe, rank=4)).begin_from(tmp_path / "adapters" / "own")
    plain = ReferenceModel(logits(run.model, batch).shape[-1], causal=False)
    read_exported(BUNDLED, plain)
    merge_adapter(plain, load_file(tmp_path / "adapters" / "own" / WEIGHTS))
    trained = logits(run.average, batch)
    assert (logits(plain, batch) - trained).abs().max() < 1e-3

    model = load_model(ModelConfig(path="bundled"))
    assert isinstance(model, LoadedModel)
    adapters = Adapters(replace(model, adapters=tmp_path / "adapters"), most=1 << 30)
    adapters.load_own()
    request = adapters.resolved(replace(ask("r", "a"), adapter="own"))
    adapter = adapters.of(request)
    assert adapter is not None and adapter.has_head
    counts = [int(n) for n in batch.unpadded.sum(1)]
    rows = torch.cat([row[:n] for row, n in zip(model.decoder.embed(batch.ids), counts, strict=True)])
    places = torch.cat([row[:n] for row, n in zip(batch.positions, counts, strict=True)])
    sees = torch.block_diag(*(torch.ones(n, n) for n in counts)).bool()[None]
    adapted = Adapted(counts, [adapter] * len(counts), model.device, adapters.stacks)
    with torch.no_grad():
        hidden = model.decoder(rows, places, dense_attention(sees), None, adapted)
        served = model.decoder.logits(hidden, adapted)
    expected = torch.cat([row[:n] for row, n in zip(trained, counts, strict=True)])
    assert (served - expected).abs().max() < 1e-3


@pytest.mark.parametrize("given", [{"rank": 0}, {"trained": "decoder"}])
def test_a_rank_is_that_of_an_adapter(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="--rank"):
        run_in(tmp_path, replace(TEACHING, **given))


def test_a_step_whose_gradients_are_not_finite_changes_nothing(
    tmp_path: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path)
    run.begin_from(BUNDLED)
    run.step(batch)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    loss_of = run._main_loss
    with monkeypatch.context() as patch:

        def broken(*given: Any) -> Any:
            loss, hidden = loss_of(*given)
            return loss * torch.nan, hidden

        patch.setattr(run, "_main_loss", broken)
        run.step(batch)
    assert run.skipped == 1 and run.done == 2
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    run.step(batch)
    assert run.skipped == 1 and any(
        not torch.equal(value, before[name]) for name, value in run.model.state_dict().items()
    )
