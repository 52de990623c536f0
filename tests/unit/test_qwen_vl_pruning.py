"""Pruning for Qwen's vision models: what is judged, and full attention with the dropped keys masked says the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from clips import clip
from helpers import ask, picture
from qwen_vl_checkpoints import KINDS, THIRD, Qwen, served_rows
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, ImagePart, Message, Part, Request, TextPart, VideoPart, Vision
from mmserve.encode.encoder import Encoder
from mmserve.encode.media import decode_image
from mmserve.models.base import LoadedModel
from mmserve.models.qwen_vision import QwenVision
from mmserve.prune import pruners_for
from mmserve.prune.base import Evidence

MODELING: dict[str, Any] = {
    "qwen2_vl": modeling_qwen2_vl,
    "qwen2_5_vl": modeling_qwen2_5_vl,
    "qwen3_vl": modeling_qwen3_vl,
    "qwen3_vl_moe": modeling_qwen3_vl_moe,
}
PARTS: Sequence[Part] = (
    TextPart("a"),
    ImagePart(picture(1, (40, 30))),
    TextPart("b"),
    VideoPart(clip(frames=20, rate=4)),
    ImagePart(picture(2, (20, 48))),
    TextPart("what?"),
)


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen, LoadedModel]:
    made = Qwen(tmp_path_factory.mktemp(request.param), request.param)
    return made, made.load()


def pruned(request: Request, pruner: str) -> Request:
    return replace(request, vision=Vision(pruner=pruner, amount=Amount("keep_ratio", 0.5)))


def encoded(model: LoadedModel, request: Request) -> Encoded:
    [one] = Encoder(model, MediaConfig(), max_tokens=400).encode([request])
    return one


def rows_left(full: Encoded, left: Encoded) -> np.ndarray:
    """Which rows of the unpruned prompt are left: no two stand at the same place on all axes."""
    assert full.places is not None and left.places is not None
    where = {tuple(place): row for row, place in enumerate(full.places.T[:-1].tolist())}
    assert len(where) == len(full.ids)
    return np.array([where[tuple(place)] for place in left.places.T[:-1].tolist()])


@torch.inference_mode()
def masked_logits(made: Qwen, inputs: dict[str, Any], full: Encoded, left: Encoded, rows: np.ndarray) -> torch.Tensor:
    """transformers' logits of the unpruned prompt, where no position sees what was dropped."""
    oracle = made.oracle.model
    grids = {name: inputs[name] for name in inputs if name.endswith(("grid_thw", "grid_ts"))}
    positions, _delta = oracle.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], **grids
    )
    assert full.features is not None and left.features is not None
    features = torch.zeros(len(full.ids), full.features.shape[1])
    features[torch.from_numpy(full.image_rows)] = full.features
    features[torch.from_numpy(rows[left.image_rows])] = left.features  # averages, where some are
    visual = inputs["mm_token_type_ids"][0] > 0
    x = oracle.get_input_embeddings()(inputs["input_ids"])[0]
    x = torch.where(visual[:, None], features[:, :32], x)
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    seen[:, np.setdiff1d(np.arange(len(x)), rows)] = False
    seen |= torch.eye(len(x), dtype=torch.bool)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    deep = {}
    if made.kind in THIRD:
        layers = list(features[visual, 32:].split(32, dim=1))
        deep = {"visual_pos_masks": visual[None], "deepstack_visual_embeds": layers}
    hidden = oracle.language_model(inputs_embeds=x[None], position_ids=positions, attention_mask=mask, **deep)
    logits: torch.Tensor = made.oracle.lm_head(hidden.last_hidden_state)[0]
    return logits[torch.from_numpy(rows)]


def test_pruning_is_full_attention_with_the_dropped_keys_masked(both: tuple[Qwen, LoadedModel]) -> None:
    made, model = both
    assert model.vision is not None
    request = replace(ask("r", max_new_tokens=6), messages=(Message("user", tuple(PARTS)),))
    inputs, full = made.inputs(request, model.tokenizer), encoded(model, request)
    names = pruners_for(model.vision.evidence)[1:]
    assert names == ("random", "resize", "tome", "column_attention")
    for name in names:
        left = encoded(model, pruned(request, name))
        rows = rows_left(full, left)
        assert len(rows) < len(full.ids) and full.places is not None and left.places is not None
        assert left.pruned == len(full.ids) - len(rows)
        assert full.places[:, -1].tolist() == left.places[:, -1].tolist(), "the answer begins where it did"
        ours, theirs = served_rows(model, request, left), masked_logits(made, inputs, full, left, rows)
        assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), name
        renumbered = served_rows(model, request, replace(left, places=None))
        assert (renumbered - theirs).abs().max() > 1e-2, "positions do matter"


def test_a_keep_ratio_of_1_is_none(both: tuple[Qwen, LoadedModel]) -> None:
    _made, model = both
    request = replace(ask("r"), messages=(Message("user", tuple(PARTS)),))
    plain = encoded(model, request)
    asked = replace(request, vision=Vision(pruner="column_attention", amount=Amount("keep_ratio", 1.0)))
    whole = encoded(model, asked)
    assert whole.features is not None and plain.features is not None and torch.equal(whole.features, plain.features)
    assert whole.ids.tolist() == plain.ids.tolist() and whole.pruned == 0


@torch.inference_mode()
def test_scores_are_column_means_of_the_last_block(
    both: tuple[Qwen, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, model = both
    vision, tower = model.vision, made.oracle.model.visual
    assert isinstance(vision, QwenVision)
    prepared = vision.prepare(decode_image(picture(1, (40, 30)), MediaConfig()))
    module, weights = MODELING[made.kind], []
    plain = module.eager_attention_forward

    def recorded(*args: Any, **options: Any) -> Any:
        out, seen = plain(*args, **options)
        weights.append(seen)
        return out, seen

    monkeypatch.setattr(module, "eager_attention_forward", recorded)
    tower.config._attn_implementation = "eager"
    tower(prepared["pixels"], prepared["grid"])
    expected = weights[-1][0].mean((0, 1)).unflatten(0, (-1, 4)).mean(1)
    [seen] = vision.encode([prepared], frozenset({Evidence.COLUMN_MEANS}), clip=False)
    [grid] = seen.grids
    found = grid.view[Evidence.COLUMN_MEANS]
    assert (grid.view.rows, grid.view.columns) == (3, 4) and abs(float(found.sum()) - 0.25) < 1e-5
    if made.kind == "qwen2_5_vl":  # by windows; what is where, the next test tells
        expected, found = expected.sort().values, found.sort().values
    assert (found - expected).abs().max() < 1e-6


@torch.inference_mode()
def test_what_is_seen_of_a_token_is_of_its_own_pixels(
    both: tuple[Qwen, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of the first block know of no other patch."""
    _made, model = both
    vision = model.vision
    assert isinstance(vision, QwenVision)
    monkeypatch.setattr(type(vision), "_scored", 0)
    plain = vision.prepare(decode_image(picture(1, (40, 30)), MediaConfig()))
    keys = frozenset({Evidence.KEYS})
    [before] = vision.encode([plain], keys, clip=False)
    for unit in (1, 5, 10):
        pixels = plain["pixels"].clone()
        pixels[4 * unit : 4 * unit + 4] += 1
        [after] = vision.encode([{**plain, "pixels": pixels}], keys, clip=False)
        moved = (after.grids[0].view[Evidence.KEYS] != before.grids[0].view[Evidence.KEYS]).any(1)
        assert moved.nonzero().flatten().tolist() == [unit]


@torch.inference_mode()
def test_pictures_seen_together_are_those_seen_alone(both: tuple[Qwen, LoadedModel]) -> None:
    """As on a GPU: of one size in pixels, not of one shape."""
    _made, model = both
    vision = model.vision
    assert isinstance(vision, QwenVision)
    batch = [
        vision.prepare(decode_image(picture(i, size), MediaConfig())) for i, size in enumerate(((40, 24), (24, 40)))
    ]
    wanted = frozenset({Evidence.COLUMN_MEANS, Evidence.KEYS})
    for one, prepared in zip(vision.encode(batch, wanted, clip=False), batch, strict=True):
        [alone] = vision.encode([prepared], wanted, clip=False)
        assert (one.tokens - alone.tokens).abs().max() < 1e-4
        for kind in wanted:
            assert (one.grids[0].view[kind] - alone.grids[0].view[kind]).abs().max() < 1e-4


def test_evidence_is_of_its_own_run_whatever_other_threads_look_at(both: tuple[Qwen, LoadedModel]) -> None:
    vision = both[1].vision
    assert isinstance(vision, QwenVision)
    one, other = (
        vision.prepare(decode_image(picture(i, size), MediaConfig())) for i, size in ((1, (40, 30)), (2, (20, 48)))
    )
    wanted, own = frozenset({Evidence.COLUMN_MEANS}), threading.get_ident()

    @torch.inference_mode()
    def look(what: Any, kinds: frozenset[Evidence]) -> list[torch.Tensor]:
        [seen] = vision.encode([what], kinds, clip=False)
        return [grid.view.evidence[kind] for grid in seen.grids for kind in kinds]

    def meanwhile(_module: Any, _arguments: Any) -> None:
        if threading.get_ident() == own:
            thread = threading.Thread(target=look, args=(other, frozenset()))
            thread.start()
            thread.join()

    [alone] = look(one, wanted)
    hook = vision.tower.get_submodule("merger").register_forward_pre_hook(meanwhile)
    try:
        [beside] = look(one, wanted)
    finally:
        hook.remove()
    assert torch.equal(alone, beside)
