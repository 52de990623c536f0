"""Pictures in tiles: LLaVA-NeXT's own rule written plainly, what pruners see of tiles, and what cannot be served."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_checkpoints
import numpy as np
import pytest
import torch
from llada_checkpoints import Sighted, edit, image, load, processor_json
from PIL import Image
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    SiglipImageProcessorPil,
)

from mmserve.core.request import Amount
from mmserve.errors import ConfigError
from mmserve.models.anyres import Anyres
from mmserve.models.picture import Picture
from mmserve.models.vision import LlavaVision
from mmserve.prune import PRUNERS
from mmserve.prune.base import Evidence, GridView, Part

SIDE, PATCHES = 24, 4  # pixels and patches of a tile's side
#: Widths and heights up to 3 x 3 tiles, as LLaDA-V lists its own, and as LLaVA-OneVision's text has them.
LISTED = [[x * SIDE, y * SIDE] for x in (1, 2, 3) for y in (1, 2, 3)]
TILES: dict[str, Any] = {"mm_patch_merge_type": "spatial_unpad", "image_grid_pinpoints": LISTED}
SIZES = [
    (31, 45),
    (24, 24),
    (72, 72),
    (70, 9),
    (9, 70),
    (100, 61),
    (48, 23),
    (5, 5),
    (1, 3),
    (47, 71),
    (333, 500),
    (1, 500),
]


def best_shape(width: int, height: int) -> tuple[int, int]:
    """Of all shapes the one that shows most of the picture, then the one that wastes least, then the first."""
    scored = []
    for order, (across, down) in enumerate(LISTED):
        scale = min(across / width, down / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        scored.append((-shown, across * down - shown, order))
    found = LISTED[min(scored)[2]]
    return found[0], found[1]


def plain_tokens(made: Sighted, kind: str, picture: Image.Image, limit: int | None) -> Tensor:
    """``[n, D]`` of a picture by LLaDA-V's own tower of a ``kind``."""
    processor = (CLIPImageProcessorPil if kind == "clip" else SiglipImageProcessorPil)(**processor_json(kind))

    def see(tiles: list[Image.Image]) -> Tensor:
        pixels = torch.cat([processor(tile, return_tensors="pt")["pixel_values"] for tile in tiles])
        return made.visual_tokens(pixels, first=1 if kind == "clip" else 0)

    return in_tiles(see, made.newline, picture, limit)


def in_tiles(
    see: Callable[[list[Image.Image]], Tensor], newline: Tensor, picture: Image.Image, limit: int | None
) -> Tensor:
    """``[n, D]`` as ``process_anyres_image`` and ``prepare_inputs_labels_for_multimodal`` make them, patch by patch."""
    width, height = picture.size
    across, down = best_shape(width, height)
    if across / width < down / height:
        new = across, min(math.ceil(height * (across / width)), down)
    else:
        new = min(math.ceil(width * (down / height)), across), down
    canvas = Image.fromarray(np.zeros((down, across, 3), dtype=np.uint8))
    canvas.paste(picture.resize(new, Image.Resampling.BICUBIC), ((across - new[0]) // 2, (down - new[1]) // 2))
    tiles = [picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)]
    for y in range(down // SIDE):
        for x in range(across // SIDE):
            tiles.append(canvas.crop((x * SIDE, y * SIDE, (x + 1) * SIDE, (y + 1) * SIDE)))
    tokens = see(tiles)
    grid = []
    for row in range(down // SIDE * PATCHES):
        line = []
        for column in range(across // SIDE * PATCHES):
            tile = 1 + row // PATCHES * (across // SIDE) + column // PATCHES
            line.append(tokens[tile, row % PATCHES * PATCHES + column % PATCHES])
        grid.append(line)
    if width / height > len(grid[0]) / len(grid):
        over = (len(grid) - int(height * (len(grid[0]) / width))) // 2
        grid = grid[over : len(grid) - over]
    else:
        over = (len(grid[0]) - int(width * (len(grid) / height))) // 2
        grid = [line[over : len(line) - over] for line in grid]
    rows = [torch.stack(line) if line else torch.empty(0, len(newline)) for line in grid]
    times = math.sqrt(len(rows) * len(rows[0]) / (limit * PATCHES**2)) if limit and rows else 0.0
    if times > 1.1:
        size = [int(len(rows) // times), int(len(rows[0]) // times)]
        stacked = torch.stack(rows).permute(2, 0, 1)[None]
        rows = list(torch.nn.functional.interpolate(stacked, size, mode="bilinear")[0].permute(1, 2, 0))
    return torch.cat([tokens[0], *(torch.cat([row, newline[None]]) for row in rows)])


def vision_of(folder: Path) -> LlavaVision:
    vision = load(folder).vision
    assert isinstance(vision, LlavaVision)
    return vision


@torch.inference_mode()
def seen(vision: LlavaVision, picture: Image.Image) -> Picture:
    [found] = vision.encode([vision.prepare(picture)], frozenset(), clip=False)
    return found


@pytest.mark.parametrize(("ratio", "limit"), [("anyres", None), ("anyres_max_2", 2), ("anyres_max_4", 4)])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_llava_s_rule_by_loops(tmp_path: Path, kind: str, ratio: str, limit: int | None) -> None:
    made = Sighted(tmp_path, kind, image_aspect_ratio=ratio, **TILES)
    vision = vision_of(tmp_path)
    assert vision.tokens_per_image == 0
    counts = set()
    for width, height in SIZES:
        picture = image(width, height)
        ours, theirs = seen(vision, picture), plain_tokens(made, kind, picture, limit)
        assert ours.pieces == (len(theirs),) and ours.tokens.shape == theirs.shape, (width, height)
        assert (ours.tokens - theirs).abs().max() < 1e-5, (width, height)
        counts.add(len(theirs))
    assert len(counts) > 5, "the shapes of pictures make different numbers of tokens"
    assert max(counts) > 9 * PATCHES**2 if limit is None else max(counts) < (limit * 1.21 + 1) * PATCHES**2 + 20


@pytest.mark.parametrize(("ratio", "limit"), [("anyres", None), ("anyres_max_2", 2)])
def test_llava_llama_s_tiles(tmp_path: Path, ratio: str, limit: int | None) -> None:
    """LLaVA-1.6's own layout: the same rule before another decoder."""
    newline = torch.randn(llama_checkpoints.HIDDEN, generator=torch.Generator().manual_seed(3))
    made = llama_checkpoints.Sighted(tmp_path, newline=newline, image_aspect_ratio=ratio, **TILES)
    model = llama_checkpoints.load(tmp_path)
    assert isinstance(model.vision, LlavaVision) and model.spec.causal

    def view(tiles: list[Image.Image]) -> Tensor:
        return torch.stack([made.visual_tokens(tile) for tile in tiles])

    for size in SIZES:
        expected = in_tiles(view, newline, image(*size), limit)
        found = seen(model.vision, image(*size))
        assert found.tokens.shape == expected.shape and torch.allclose(found.tokens, expected, atol=1e-5), size
        assert model.vision.pieces(model.vision.prepare(image(*size)), clip=False) == (len(expected),)


@pytest.mark.parametrize("value", [str(LISTED), "(1x1),...,(3x3)"])
def test_shapes_as_text(tmp_path: Path, value: str) -> None:
    made = Sighted(tmp_path, "siglip", image_aspect_ratio="anyres_max_9", **TILES | {"image_grid_pinpoints": value})
    assert torch.allclose(
        seen(vision_of(tmp_path), image()).tokens, plain_tokens(made, "siglip", image(), 9), atol=1e-5
    )


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_one_of_several_pictures_is_one_padded_tile(tmp_path: Path, kind: str) -> None:
    """As in the training and evaluation code of LLaDA-V; that of LLaVA-1.6 makes tiles of each."""
    made = Sighted(tmp_path / "llada", kind, image_aspect_ratio="anyres_max_4", **TILES)
    vision = vision_of(tmp_path / "llada")
    settings = {**processor_json(kind), "resample": 3}
    processor = (CLIPImageProcessorPil if kind == "clip" else SiglipImageProcessorPil)(**settings)
    square = Image.new("RGB", (90, 90), tuple(int(255 * mean) for mean in processor.image_mean))
    square.paste(image(40, 90), (25, 0))
    pixels = processor(square, return_tensors="pt")["pixel_values"]
    expected = torch.cat([made.visual_tokens(pixels, first=1 if kind == "clip" else 0)[0], made.newline[None]])
    one = vision.prepare_among(image(40, 90))
    with torch.inference_mode():
        [found] = vision.encode([one], frozenset(), clip=False)
    assert vision.tells_several and vision.pieces(one, clip=False) == found.pieces == (len(expected),)
    assert torch.allclose(found.tokens, expected, atol=1e-5)
    newline = torch.zeros(llama_checkpoints.HIDDEN)
    llama_checkpoints.Sighted(tmp_path / "llama", newline=newline, image_aspect_ratio="anyres", **TILES)
    other = llama_checkpoints.load(tmp_path / "llama").vision
    assert other is not None and not other.tells_several


def test_frames_of_a_clip_are_one_tile(tmp_path: Path) -> None:
    Sighted(tmp_path, "siglip", image_aspect_ratio="anyres_max_4", mm_video_frames=2, **TILES)
    vision = vision_of(tmp_path)
    clip = vision.prepare_clip([image(), image(60, 20)], [0.0, 1.0])
    assert clip["pixels"].shape == (2, 3, SIDE, SIDE)
    with torch.inference_mode():
        [found] = vision.encode([clip], frozenset(), clip=True)
    assert [piece for piece in found.pieces if isinstance(piece, int)] == [4, 5]


def test_pictures_seen_together_are_those_seen_alone(tmp_path: Path) -> None:
    """Of one shape in tiles, and still not of one size."""
    Sighted(tmp_path, "clip", image_aspect_ratio="anyres", **TILES)
    vision = vision_of(tmp_path)
    pictures = [vision.prepare(image(*size)) for size in ((70, 61), (72, 72), (65, 71))]
    assert {len(one["pixels"]) for one in pictures} == {10}, "more than go through the tower at once"
    with torch.inference_mode():
        together = vision.encode(pictures, vision.evidence, clip=False)
        alone = [vision.encode([one], vision.evidence, clip=False)[0] for one in pictures]
    assert len({len(one.tokens) for one in together}) == 3
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(one.tokens, other.tokens, atol=1e-5) and one.pieces == other.pieces
        for mine, its in zip(one.grids, other.grids, strict=True):
            assert torch.equal(mine.patches, its.patches) and mine.view.part == its.view.part
            for kind in vision.evidence:
                assert torch.allclose(mine.view[kind], its.view[kind], atol=1e-5)


# --- what pruners see ---


def numbered(anyres: Anyres, height: int, width: int, side: int = PATCHES) -> Picture:
    """A picture whose patches are told apart by their tokens, and have the same numbers as evidence."""
    rows, columns = anyres.shape(height, width)
    count = (1 + rows * columns) * side * side
    numbers = torch.arange(1.0, count + 1).view(-1, side * side)
    seen = {Evidence.COLUMN_MEANS: numbers, Evidence.KEYS: numbers[..., None].expand(-1, -1, 3)}
    return anyres.picture(numbers[..., None], seen, torch.zeros(1), height, width)


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("size", SIZES)
def test_grids_are_tiles(size: tuple[int, int], limit: int | None) -> None:
    anyres = Anyres(pinpoints=tuple((y, x) for x, y in LISTED), tile=SIDE, max_tiles=limit)
    found = numbered(anyres, size[1], size[0])
    for grid in found.grids:
        assert grid.view.size == len(grid.patches) and bool((grid.patches.diff() > 0).all())
        assert torch.equal(found.tokens[grid.patches, 0], grid.view[Evidence.COLUMN_MEANS])
        assert torch.equal(found.tokens[grid.patches].expand(-1, 3), grid.view[Evidence.KEYS])
    places = torch.cat([grid.patches for grid in found.grids])
    assert len(places.unique()) == len(places)
    assert torch.equal(found.tokens[:, 0].nonzero().flatten(), places.sort().values), "separators are in none"
    whole, *tiles = (grid.view for grid in found.grids)
    assert (whole.rows, whole.columns, whole.part) == (PATCHES, PATCHES, None)
    parts = [tile.part for tile in tiles if tile.part is not None]
    assert len(parts) == len(tiles) <= math.prod(anyres.shape(size[1], size[0]))
    if tiles:
        assert sum((p.bottom - p.top) * (p.right - p.left) for p in parts) == pytest.approx(1)
    if limit is None:
        for grid in found.grids[1:]:  # unscaled, a grid's patches are of one tile
            assert len(((grid.view[Evidence.COLUMN_MEANS] - 1) // PATCHES**2).unique()) == 1


@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("size", SIZES)
def test_every_pruner_takes_tiles(name: str, size: tuple[int, int]) -> None:
    """However few patches a picture's padding leaves a tile, and however few tokens it is given."""
    anyres = Anyres(pinpoints=tuple((y, x) for x, y in LISTED), tile=SIDE)
    bare = numbered(anyres, size[1], size[0])
    generator = torch.Generator().manual_seed(0)
    views = []
    for grid in bare.grids:
        flat, n = grid.view, len(grid.patches)
        wide = {kind: torch.rand(n, 3, generator=generator) for kind in (Evidence.KEYS, Evidence.FIRST_FEATURES)}
        narrow = set(Evidence) - set(wide)
        rows = {kind: torch.rand(n, generator=generator).softmax(0) for kind in narrow}
        views.append(GridView(flat.rows, flat.columns, {**wide, **rows}, flat.part))
    total = sum(view.size for view in views)
    pruner = PRUNERS[name]()
    for share in (0.05, 0.25, 0.8):
        amount = Amount("keep_ratio", share)
        plans = pruner.plans(views, amount)
        kept = 0
        for view, plan in zip(views, plans, strict=True):
            assert plan.apply(torch.rand(view.size, 5)).shape == (len(plan.places), 5)
            assert bool((plan.places.diff() > 0).all()) and bool((plan.places < view.size).all())
            kept += len(plan.places)
        assert 0 < kept <= total
        if name in ("random", "cls_attention", "column_attention"):
            assert kept == max(1, int(total * share + 0.5))
        if name == "hired":  # rounds down, and gives no tile more than it has
            assert kept <= max(1, int(total * share))


def test_hired_gives_the_whole_view_half_and_tiles_what_it_sees_of_them() -> None:
    def view(rows: int, columns: int, first: Tensor, part: Part | None) -> GridView:
        row = torch.rand(rows * columns, generator=torch.Generator().manual_seed(rows))
        return GridView(rows, columns, {Evidence.CLS_ROW: row, Evidence.FIRST_CLS_ROW: first}, part)

    first = torch.zeros(4, 4)  # of its best eight patches, four are in the first quarter
    first[:2, :2], first[0, 2:], first[2, 0], first[3, 3] = 0.1, 0.1, 0.1, 0.1
    first = first.flatten()
    halves = [(0.0, 0.5), (0.5, 1.0)]
    tiles = [view(4, 4, torch.zeros(16), Part(*down, *across)) for down in halves for across in halves]
    views = [view(4, 4, first, None), *tiles]
    kept = [len(plan.places) for plan in PRUNERS["hired"]().plans(views, Amount("token_budget", 20))]
    assert kept == [10, 5, 2, 1, 1], "10 by 4, 2, 1 and 1 of 8, rounded down"
    best = PRUNERS["hired"]().plans(views, Amount("token_budget", 20))[1].places
    assert best.tolist() == sorted(tiles[0][Evidence.CLS_ROW].topk(5).indices.tolist())
    much = [len(plan.places) for plan in PRUNERS["hired"]().plans(views, Amount("token_budget", 75))]
    assert much == [16, 16, 14, 7, 7], "nothing gets more than it has"


# --- the sizes that are served ---


@pytest.mark.parametrize("kind", ["next", "onevision"])
def test_as_many_tokens_as_transformers_counts_at_real_sizes(kind: str) -> None:
    tile, patch = (336, 14) if kind == "next" else (384, 14)
    make, images = {
        "next": (LlavaNextProcessor, LlavaNextImageProcessorPil),
        "onevision": (LlavaOnevisionProcessor, LlavaOnevisionImageProcessorPil),
    }[kind]
    processor: Any = make.__new__(make)
    processor.image_processor, processor.patch_size, processor.num_additional_image_tokens = images(), patch, 0
    processor.num_image_tokens, processor.vision_aspect_ratio = 729, "anyres_max_9"
    side = tile // patch
    anyres = Anyres(
        pinpoints=tuple((y, x) for y, x in processor.image_processor.image_grid_pinpoints),
        tile=tile,
        max_tiles=None if kind == "next" else 9,
        rounded=True,
    )
    sizes = np.random.default_rng(0).integers(1, 4000, (40, 2)).tolist()
    for height, width in [*sizes, [4000, 1], [1, 4000], [336, 336], [2304, 2304], [1000, 1001]]:
        rows, columns = anyres.shape(height, width)
        tokens = torch.zeros(1 + rows * columns, side * side, 1)
        found = anyres.picture(tokens, {}, torch.zeros(1), height, width)
        assert len(found.tokens) == processor._get_number_of_features(height, width, tile, tile), (height, width)


# --- what cannot be served ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_aspect_ratio": "highres"}, "it can be 'square', 'pad', 'anyres' or 'anyres_max_N'"),
        ({"image_aspect_ratio": "anyres_max_0"}, "image_aspect_ratio = 'anyres_max_0' is not supported"),
        ({"mm_patch_merge_type": "spatial"}, "'anyres' needs mm_patch_merge_type = 'spatial_unpad'"),
        ({"image_grid_pinpoints": ...}, "image_grid_pinpoints must be a list of pairs of multiples of 24 pixels"),
        ({"image_grid_pinpoints": [[24, 25]]}, "image_grid_pinpoints must be a list of pairs"),
        ({"image_grid_pinpoints": "many"}, "image_grid_pinpoints must be a list of pairs"),
        ({"image_grid_pinpoints": "(1x1),(99999x99999)"}, "has more than 100 tiles a side"),
        ({"image_grid_pinpoints": "[" * 9999}, "image_grid_pinpoints must be a list of pairs"),
        ({"image_grid_pinpoints": []}, "image_grid_pinpoints must be a list of pairs"),
        ({"mm_vision_select_feature": "cls_patch"}, "tiles need mm_vision_select_feature = 'patch'"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Sighted(tmp_path, "clip", image_aspect_ratio="anyres", **TILES)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
