"""What towers show to pruners, against the attentions that transformers' eager implementation returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clips import video_model
from llada_checkpoints import Sighted, image, load
from mmserve_kernels import dispatch

from mmserve.models import scores
from mmserve.models.evidence import OF_CLASS, OF_PATCHES, AttentionModules, class_row, column_means
from mmserve.models.picture import Tile
from mmserve.models.projectors import NewlineProjector, pool_grid
from mmserve.models.vision import LlavaVision, VideoSettings
from mmserve.prune.base import Evidence

EVERYTHING = OF_CLASS | OF_PATCHES


def tiles_of(vision: LlavaVision, pixels: torch.Tensor, wanted: frozenset[Evidence]) -> list[Tile]:
    """The one tile of each picture of ``pixels [B, 3, height, width]``."""
    seen = vision.encode([{"pixels": own[None]} for own in pixels], wanted, clip=False)
    return [Tile(picture.tokens, grid.patches, grid.view) for picture in seen for grid in picture.grids]


def vision_of(folder: Path) -> LlavaVision:
    vision = load(folder).vision
    assert isinstance(vision, LlavaVision)
    return vision


@pytest.mark.parametrize("select", [-2, -1, -4])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_evidence_is_what_eager_attention_says(tmp_path: Path, kind: str, select: int) -> None:
    changes: dict[str, Any] = {"mm_vision_select_layer": select} if kind == "clip" else {}
    made = Sighted(tmp_path, kind, **changes)
    vision = vision_of(tmp_path)
    wanted = EVERYTHING if kind == "clip" else OF_PATCHES
    assert vision.evidence == wanted
    pixels = torch.cat([vision.prepare(image(30, 30 + i))["pixels"] for i in range(3)])
    tower = made.tower
    tower.set_attn_implementation("eager")
    keys: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(tower.encoder.layers):
        layer.self_attn.k_proj.register_forward_hook(lambda _m, _a, out, i=i: keys.__setitem__(i, out))
    with torch.no_grad():
        out = tower(pixels, output_attentions=True, output_hidden_states=True)
        tiles = tiles_of(vision, pixels, wanted)
    at = {-4: 0}.get(select if kind == "clip" else -2, 3 + (select if kind == "clip" else -2))
    first = 1 if kind == "clip" else 0
    for i, tile in enumerate(tiles):
        assert (tile.view.rows, tile.view.columns) == (4, 4)
        expected = {
            Evidence.CLS_ROW: out.attentions[at][i, :, 0].mean(0)[first:],
            Evidence.FIRST_CLS_ROW: out.attentions[0][i, :, 0].mean(0)[first:],
            Evidence.LAST_CLS_ROW: out.attentions[-1][i, :, 0].mean(0)[first:],
            Evidence.COLUMN_MEANS: out.attentions[at][i].mean((0, 1))[first:],
            Evidence.KEYS: keys[at][i, first:].unflatten(-1, (made.tower.config.num_attention_heads, -1)).mean(1),
            Evidence.FIRST_FEATURES: out.hidden_states[1][i, first:],
        }
        for one in wanted:
            assert tile.view[one].dtype == torch.float32
            close = 1e-7 if expected[one].dim() == 1 else 1e-5
            assert (tile.view[one] - expected[one]).abs().max() < close, one


@pytest.mark.parametrize("scale", [0.25, 0.5])
def test_towers_ask_the_dispatcher_for_their_scores(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def picked(*of: object) -> Any:
        asked.append(of)
        return dispatch.pick(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(scores, "pick", picked)
    scores._op.cache_clear()
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, 21, 32, generator=draw) for _ in range(2))
    nothing = torch.nn.Identity()
    layer = AttentionModules(nothing, nothing, heads=2, scale=scale)
    weights = (
        torch.einsum("brhk,bnhk->bhrn", q.view(3, 21, 2, 16), k.view(3, 21, 2, 16)).mul(scale).double().softmax(-1)
    )
    for made, wanted in (
        (column_means(layer, q, k), weights.mean((1, 2))),
        (class_row(layer, q, k), weights[:, :, 0].mean(1)),
    ):
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-7)
    q_THK, k_THK = (x.view(63, 2, 16) for x in (q, k))
    uneven = scores.mean_attention(q_THK, k_THK, [1, 62], [40, 23])
    assert uneven[:40].sum().item() == pytest.approx(1) and uneven[40:].sum().item() == pytest.approx(1)
    assert asked == [("attention_scores", q.device, torch.float32, 16)], "once for all of them"
    scores._op.cache_clear()


def test_nothing_is_shown_that_is_not_asked_for(tmp_path: Path) -> None:
    Sighted(tmp_path, "clip")
    vision = vision_of(tmp_path)
    pixels = vision.prepare(image())["pixels"]
    with torch.no_grad():
        [tile] = tiles_of(vision, pixels, frozenset())
        assert tile.view.evidence == {} and torch.equal(tile.tokens, vision(pixels)[0])


def test_class_tokens_and_separators_are_no_patches(tmp_path: Path) -> None:
    made = Sighted(tmp_path, "clip", mm_vision_select_feature="cls_patch", mm_patch_merge_type="spatial_unpad")
    vision = vision_of(tmp_path)
    pixels = vision.prepare(image())["pixels"]
    with torch.no_grad():
        [tile] = tiles_of(vision, pixels, frozenset({Evidence.CLS_ROW}))
    assert tile.patches.tolist() == list(range(1, 17)) and len(tile.tokens) == 18
    assert torch.equal(tile.tokens[17], made.newline) and len(tile.view[Evidence.CLS_ROW]) == 16


@pytest.mark.parametrize("newline", ["grid", "frame", "one_token", "no_token"])
def test_what_is_seen_of_a_clip_is_pooled_as_its_tokens_are(newline: str) -> None:
    vision = video_model(stride=1).vision
    assert isinstance(vision, LlavaVision)
    vision.projector = NewlineProjector(vision.projector, torch.full((64,), 7.0))
    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = tiles_of(vision, pixels, EVERYTHING)
        for stride in (1, 2):
            vision.video = VideoSettings(frames=3, stride=stride, mode="average", newline=newline)
            clip = {"pixels": pixels, "seconds": torch.zeros(3, dtype=torch.float64)}
            [seen] = vision.encode([clip], EVERYTHING, clip=True)
            [bare] = vision.encode([clip], frozenset(), clip=True)
            assert torch.equal(seen.tokens, bare.tokens)
            for tile, image_tile in zip(seen.grids, alone, strict=True):
                assert tile.view.size == (2 // stride) ** 2
                patches = image_tile.tokens[image_tile.patches]
                assert torch.allclose(
                    seen.tokens[tile.patches], pool_grid(patches[None], stride, "average").flatten(0, 2)
                )
                for kind, values in tile.view.evidence.items():
                    whole = image_tile.view[kind].view(1, 4, -1)
                    pooled = pool_grid(whole, stride, "average").reshape(values.shape)
                    assert torch.allclose(values, pooled), kind
