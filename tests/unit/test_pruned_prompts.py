"""Pruned prompts: full attention with the dropped keys masked says the same, and what is encoded is never mixed up."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llada_checkpoints as llada
import llama_checkpoints as llava
import llava_checkpoints as tiled
import numpy as np
import pytest
import shuffled_checkpoints as shuffled
import torch
from clips import clip, video_model
from foreseen import check_foreseen
from gemma3_checkpoints import gemma3
from helpers import ask, looked, picture, tiny_model
from PIL import Image
from tokenizers import AddedToken

from mmserve.config import EncoderCacheConfig, MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, ImagePart, Message, Part, Request, TextPart, VideoPart, Vision
from mmserve.decode.forward import forward
from mmserve.decode.loop import DiffusionDecoder
from mmserve.decode.parts import Parts
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError, InvalidArgument
from mmserve.kv.prefix import page_keys
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.models.attended import shown_by
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.chat import VIDEO
from mmserve.models.family import check_vocabulary
from mmserve.models.picture import CannotPrepare
from mmserve.models.projectors import NewlineProjector
from mmserve.models.towers import PaddedProcessor
from mmserve.models.vision import LlavaVision
from mmserve.prune import pruners_for
from mmserve.tiers.caches import Caches

FILE = clip(frames=12, rate=4)


def pruned(request: Request, pruner: str, amount: Amount | None = None) -> Request:
    return replace(request, vision=Vision(pruner=pruner, amount=amount or Amount("keep_ratio", 0.5)))


def show(*parts: Part, name: str = "r") -> Request:
    return replace(ask(name, max_new_tokens=6), messages=(Message("user", (*parts, TextPart("what?"))),))


def encoder(model: LoadedModel, cache: Caches | None = None, **limits: Any) -> Encoder:
    return Encoder(model, MediaConfig(**limits), max_tokens=600, cache=cache)


@torch.inference_mode()
def served_logits(model: LoadedModel, request: Request, encoded: Encoded) -> tuple[torch.Tensor, np.ndarray]:
    """Logits of the first pass over paged K/V, and where their rows stood before pruning."""
    store = KVStore(model.decoder.config, pages=150, page_size=4, dtype=model.dtype, device=model.device)
    decoder = DiffusionDecoder(Parts.of(model, store))
    p = decoder.parts.passes.first(decoder.begin(request, encoded, PageTable(tuple(range(150)))))
    return forward(model, store, [p], decoder.parts.runner.floor)[0].whole(), p.canvas.rotary_positions(p.wanted)


@torch.inference_mode()
def masked_logits(model: LoadedModel, oracle: Any, full: Encoded, left: Encoded, new: int) -> torch.Tensor:
    """transformers' logits of the unpruned prompt and its canvas, where no position sees what was dropped."""
    assert left.places is not None
    ids = np.append(full.ids, np.full(new, model.spec.mask_id))
    ids[full.image_rows] = 0
    x = oracle.get_input_embeddings()(torch.from_numpy(ids))
    assert full.features is not None and left.features is not None
    x[torch.from_numpy(full.image_rows)] = full.features
    x[torch.from_numpy(left.places[left.image_rows])] = left.features  # averages, where some are
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool)
    if model.spec.attention is Attention.CAUSAL:
        seen = seen.tril()
    if model.spec.whole_images:
        runs = np.flatnonzero(np.diff(full.image_rows, prepend=-2) > 1)
        for run in np.split(full.image_rows, runs[1:]):
            seen[run[:, None], run] = True
    if model.spec.attention is Attention.BLOCK_CAUSAL:  # blocks are counted among what is left
        kept = torch.cat([torch.from_numpy(left.places[:-1]), torch.arange(len(full.ids), len(ids))])
        block = torch.arange(len(kept)) // model.spec.default_block_length
        seen[kept[:, None], kept] = block[:, None] >= block
    seen[:, np.setdiff1d(np.arange(len(full.ids)), left.places)] = False
    seen |= torch.eye(len(ids), dtype=torch.bool)  # a row that sees nothing is no row; nobody sees it
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return oracle(inputs_embeds=x[None], attention_mask=mask[None, None]).logits[0]


LAYOUTS: dict[str, Callable[[Path], tuple[LoadedModel, Any]]] = {
    "llada-v with clip": lambda folder: _llada(folder, "clip"),
    "llada-v with siglip": lambda folder: _llada(folder, "siglip"),
    "llada-v with separators": lambda folder: _llada(
        folder, "clip", mm_patch_merge_type="spatial_unpad", mm_video_frames=3, mm_newline_position="grid"
    ),
    "llada-v in tiles": lambda folder: _llada(
        folder,
        "clip",
        mm_patch_merge_type="spatial_unpad",
        image_aspect_ratio="anyres_max_2",
        image_grid_pinpoints="(1x1),...,(3x3)",
    ),
    "gemma3": lambda folder: _nested(gemma3(folder, window=500)),
    "llava-1.5": lambda folder: _llava(folder),
    "llava": lambda folder: _nested(tiled.llava(folder)),
    "llava-next": lambda folder: _nested(tiled.llava_next(folder)),
    "llava-onevision": lambda folder: _nested(tiled.llava_onevision(folder)),
    "sdar-vl": lambda folder: _nested(tiled.sdar_vl(folder)),
    "smolvlm": lambda folder: _nested(shuffled.smolvlm(folder)),
    "internvl": lambda folder: _nested(shuffled.internvl(folder)),
}


def _llada(folder: Path, kind: str, **changes: Any) -> tuple[LoadedModel, Any]:
    oracle = llada.Sighted(folder, kind, **changes).oracle
    return llada.load(folder), oracle


def _llava(folder: Path) -> tuple[LoadedModel, Any]:
    oracle = llava.Sighted(folder).oracle
    return llava.load(folder), oracle


def _nested(made: shuffled.Checkpoint) -> tuple[LoadedModel, Any]:
    return llava.load(made.folder), made.oracle


#: Towers without a class token.
CLASSLESS = {"gemma3", "llada-v with siglip", "llava-onevision", "sdar-vl", "smolvlm"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pruning_is_full_attention_with_the_dropped_keys_masked(tmp_path: Path, layout: str) -> None:
    model, oracle = LAYOUTS[layout](tmp_path)
    assert model.vision is not None
    parts: list[Part] = [TextPart("a"), ImagePart(picture(1)), TextPart("b"), ImagePart(picture(2))]
    if model.spec.video_id is not None:
        parts.append(VideoPart(FILE))
    request, encode = show(*parts), encoder(model)
    check_foreseen(model)
    names = pruners_for(model.vision.evidence | shown_by(model))[1:]
    judged_late = {Attention.CAUSAL: 1, Attention.FULL: 2}.get(model.spec.attention, 0)
    judged_late = judged_late if model.decoder.config.plain_attention else 0
    assert len(names) == (8 if layout not in CLASSLESS else 4) + judged_late
    for name in names:
        full, left = looked(encode, request, pruned(request, name))
        assert len(left.ids) < len(full.ids), name
        ours, rows = served_logits(model, request, left)
        theirs = masked_logits(model, oracle, full, left, request.sampling.max_new_tokens)[torch.from_numpy(rows)]
        assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), name
        renumbered, _ = served_logits(model, request, replace(left, places=None))
        assert (renumbered - theirs).abs().max() > 1e-3, "positions do matter"


@pytest.mark.parametrize("name", ["random", "redvtp"])
def test_separators_stay_and_places_are_those_of_before(tmp_path: Path, name: str) -> None:
    model, _oracle = LAYOUTS["llada-v with separators"](tmp_path)
    request = show(ImagePart(picture(1)), VideoPart(FILE))
    full, left = looked(encoder(model), request, pruned(request, name))
    assert left.places is not None and left.places[-1] == len(full.ids)
    assert np.array_equal(full.ids[left.places[:-1]], left.ids)
    assert full.features is not None and left.features is not None
    same = np.searchsorted(full.image_rows, left.places[left.image_rows])
    assert torch.equal(full.features[torch.from_numpy(same)], left.features)
    newline = full.features[16]
    count = [int((e.features == newline).all(1).sum()) for e in (full, left) if e.features is not None]
    assert count == [1 + 3 * 2, 1 + 3 * 2], "one an image, one a row of a frame"
    assert len(left.image_rows) == 8 + 1 + 3 * 2 + 6


def test_text_between_frames_stays() -> None:
    model = video_model(stride=1, time="{seconds}s:")
    request = show(VideoPart(FILE))
    [full], [left] = (encoder(model).encode([r]) for r in (request, pruned(request, "cls_attention")))
    assert left.places is not None and np.array_equal(full.ids[left.places[:-1]], left.ids)
    text = [np.delete(e.ids, e.image_rows).tolist() for e in (full, left)]
    assert text[0] == text[1] and len(left.image_rows) * 2 == len(full.image_rows)
    [few] = encoder(model).encode([pruned(request, "cls_attention", Amount("token_budget", 2))])
    assert len(few.image_rows) == 2, "fewer tokens than frames"


def test_the_canvas_goes_on_where_the_unpruned_prompt_ended() -> None:
    model = tiny_model(vision=True)
    request = pruned(show(ImagePart(picture(1))), "random")
    [left] = encoder(model).encode([request])
    assert left.places is not None
    store = KVStore(model.decoder.config, pages=100, page_size=4, dtype=model.dtype, device=model.device)
    canvas = DiffusionDecoder(Parts.of(model, store)).begin(request, left, PageTable(tuple(range(100)))).canvas
    answer = canvas.rotary_positions(np.arange(canvas.prompt_length, canvas.size))
    assert answer.tolist() == list(range(len(left.ids) + 2, len(left.ids) + 2 + 6))


def test_lengths_count_what_is_left_and_positions_what_was() -> None:
    model = tiny_model(vision=True)
    request = show(*[ImagePart(picture(i)) for i in range(4)])
    [full] = encoder(model).encode([request])
    tight = Encoder(model, MediaConfig(), max_tokens=len(full.ids) + 5)
    with pytest.raises(InvalidArgument, match="exceed the limit"):
        tight.encode([request])
    for name in ("random", "fastv"):
        assert len(looked(tight, pruned(request, name))[0].ids) == len(full.ids) - 8
        with pytest.raises(InvalidArgument, match="exceed the limit"):
            looked(tight, pruned(request, name, Amount("token_budget", 4)))
    short = replace(model, spec=replace(model.spec, max_tokens=len(full.ids) + 5))
    for name in ("random", "fastv"):
        with pytest.raises(InvalidArgument, match=r"\(before pruning\)"):
            encoder(short).encode([pruned(request, name)])


@pytest.mark.parametrize("cached", [False, True])
def test_prompts_too_long_are_refused_before_the_tower(cached: bool) -> None:
    """Also where only some of their pictures are new, and a picture comes twice; what fits is answered."""
    model = tiny_model(vision=True)
    tower = Tower(model)
    pictures = [ImagePart(picture(i)) for i in (0, 1, 2, 2)]
    [whole] = encoder(model).encode([show(*pictures)])
    tight = Encoder(model, MediaConfig(), max_tokens=len(whole.ids) + 5)
    if cached:
        tight.encode([show(pictures[0])])
    tower.pictures = 0
    with pytest.raises(InvalidArgument, match=f"a prompt of {len(whole.ids)} tokens and 6 new ones exceed"):
        tight.encode([show(*pictures)])
    short = replace(model, spec=replace(model.spec, max_tokens=len(whole.ids) + 5))
    for name in ("random", "fastv", "none"):
        asked = show(*pictures) if name == "none" else pruned(show(*pictures), name)
        with pytest.raises(InvalidArgument, match="exceed the limit"):
            encoder(short).encode([asked])
    assert tower.pictures == 0
    [found] = tight.encode([pruned(show(*pictures), "random")])
    assert tower.pictures > 0 and len(found.ids) == len(whole.ids) - 8


@pytest.mark.parametrize("settings", [{}, {"newline": "frame"}, {"newline": "grid", "time": "{seconds}s:"}])
def test_rows_of_clips_are_known_before_the_tower(settings: dict[str, Any]) -> None:
    model = video_model(stride=1, **settings)
    assert isinstance(model.vision, LlavaVision)
    check_foreseen(model)
    model.vision.projector = NewlineProjector(model.vision.projector, torch.ones(64))
    model.vision.tokens_per_image += 1
    check_foreseen(model)


def test_pages_are_shared_only_by_prompts_pruned_alike() -> None:
    ids, rows, features = np.zeros(8, np.int64), np.arange(2, 6), np.zeros((4, 4), np.uint8)
    numbers = {"page_size": 4, "block": 1, "logit_shift": 0}
    shifted = np.array([0, 1, 2, 4, 5, 6, 8, 9])
    plain = page_keys(ids, rows, features, **numbers)
    assert plain == page_keys(ids, rows, features, np.arange(8), **numbers)
    assert not set(plain) & set(page_keys(ids, rows, features, shifted, **numbers))


# --- the cache ---


class Tower:
    """Counts what goes through a model's tower."""

    def __init__(self, model: LoadedModel) -> None:
        self.pictures = 0
        assert model.vision is not None
        model.vision.get_submodule("tower").register_forward_hook(self._count)

    def _count(self, _module: Any, arguments: Any, _out: Any) -> None:
        self.pictures += len(arguments[0])


def features(encoded: Encoded) -> torch.Tensor:
    assert encoded.features is not None
    return encoded.features


def as_bmp(png: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).save(out, "BMP")
    return out.getvalue()


def with_one_other_pixel(png: bytes) -> bytes:
    image = Image.open(io.BytesIO(png))
    red, green, blue = image.getpixel((20, 15))
    image.putpixel((20, 15), (red ^ 1, green, blue))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_a_second_request_runs_no_tower() -> None:
    model = tiny_model(vision=True)
    tower, encode = Tower(model), encoder(model).encode
    [first] = encode([show(ImagePart(picture(1)), ImagePart(picture(2)))])
    assert tower.pictures == 2
    [again, other] = encode([show(ImagePart(picture(2)), ImagePart(picture(1))), show(ImagePart(picture(1)))])
    assert tower.pictures == 2
    assert torch.equal(features(again), features(first).roll(4, 0)) and torch.equal(
        features(other), features(first)[:4]
    )


def test_what_differs_in_anything_has_an_entry_of_its_own() -> None:
    """Same pixels in two files, one pixel, another pruner, amount or seed, other processor settings: all shared by one
    cache, each right."""
    cache = Caches.of(EncoderCacheConfig())
    one = picture(1)
    model = tiny_model(vision=True)
    other_settings = tiny_model(vision=True)
    assert isinstance(other_settings.vision, LlavaVision)
    other_settings.vision.processor.image_mean = [0.1, 0.2, 0.3]
    other_weights = tiny_model(vision=True, seed=1)
    asked: list[tuple[LoadedModel, Request]] = [
        (model, show(ImagePart(one))),
        (model, show(ImagePart(as_bmp(one)))),
        (model, show(ImagePart(with_one_other_pixel(one)))),
        (other_settings, show(ImagePart(one))),
        (other_weights, show(ImagePart(one))),
        (model, pruned(show(ImagePart(one)), "cls_attention")),
        (model, pruned(show(ImagePart(one)), "cls_attention", Amount("keep_ratio", 0.75))),
        (model, pruned(show(ImagePart(one)), "cls_attention", Amount("token_budget", 3))),
        (model, pruned(show(ImagePart(one)), "tome")),
        (model, pruned(replace(show(ImagePart(one)), sampling=replace(ask("r").sampling, seed=5)), "random")),
        (model, pruned(show(ImagePart(one)), "random")),
    ]
    alone = [encoder(m).encode([r])[0] for m, r in asked]
    for _ in range(2):
        for (m, r), expected in zip(asked, alone, strict=True):
            [found] = encoder(m, cache).encode([r])
            assert torch.equal(features(found), features(expected)) and np.array_equal(found.ids, expected.ids)
    stats = cache.tokens.stats()
    assert (stats.made, stats.hits) == (len(asked), len(asked))
    assert torch.equal(features(alone[0]), features(alone[1])), "the same pixels"
    assert len({tuple(features(e).flatten().tolist()) for e in alone[2:5]}) == 3
    pixels = cache.pixels.stats()
    assert pixels.made == 4, "files under each processor: pruners and weights have no say in pixels"


def test_other_limits_are_not_slipped_past() -> None:
    cache = Caches.of(EncoderCacheConfig())
    model = tiny_model(vision=True)
    encoder(model, cache).encode([show(ImagePart(picture(1)))])
    with pytest.raises(InvalidArgument, match="the limit is 1000 in all"):
        encoder(model, cache, max_pixels=1000).encode([show(ImagePart(picture(1)))])


@pytest.mark.parametrize(
    "poison",
    [
        lambda e: {**e, "tokens": e["tokens"][:, :-1]},
        lambda e: {**e, "tokens": e["tokens"].double()},
        lambda e: {**e, "places": e["places"].flip(0)},
        lambda e: {**e, "places": e["places"] + 1},
        lambda e: {**e, "ids": e["ids"].clamp(min=0)},
        lambda e: {**e, "ids": e["ids"] - 1},
        lambda e: {"tokens": e["tokens"]},
        lambda e: {**e, "beside": e["tokens"]},
    ],
)
def test_poisoned_entries_are_made_anew(poison: Callable[[Any], Any]) -> None:
    model = tiny_model(vision=True)
    made = encoder(model)
    [first] = made.encode([show(ImagePart(picture(1)))])
    [kept] = made.cache.tokens._kept.values()
    kept.entry = poison(kept.entry)
    [again] = made.encode([show(ImagePart(picture(1)))])
    assert torch.equal(features(first), features(again)) and made.cache.tokens.stats().unfit == 1


def test_a_bad_image_beside_good_ones_leaves_nothing_behind() -> None:
    made = encoder(tiny_model(vision=True))
    with pytest.raises(InvalidArgument):
        made.encode([show(ImagePart(picture(1))), show(ImagePart(b"no image"))])
    assert not made.cache.tokens._making and not made.cache.pixels._making
    assert all(not kept.references for kept in made.cache.tokens._kept.values())
    made.encode([show(ImagePart(picture(1)))])
    assert made.cache.pixels.stats().hits == 1, "its pixels were decoded already"


def test_clips_come_from_disk_after_a_restart(tmp_path: Path) -> None:
    settings = EncoderCacheConfig(disk_folder=str(tmp_path))
    model = video_model(stride=1, time="{seconds}s:")
    tower, request = Tower(model), pruned(show(VideoPart(FILE), ImagePart(picture(1))), "visionzip")
    [first] = encoder(model, Caches.of(settings)).encode([request])
    seen = tower.pictures
    after = Caches.of(settings)
    [again] = encoder(model, after).encode([request])
    assert seen == 4 + 1 == tower.pictures and after.tokens.stats().disk_hits == 2
    assert np.array_equal(first.ids, again.ids) and torch.equal(features(first), features(again))
    assert first.places is not None and again.places is not None and np.array_equal(first.places, again.places)


def test_a_placeholder_may_lie_past_the_embeddings_and_other_tokens_may_not() -> None:
    """InternVL's tokenizers hold ``<video>`` behind the last embedding."""
    model = tiny_model(vision=True)
    checkpoint: Any = SimpleNamespace(folder=Path("model"))
    bare: Any = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, VIDEO: 2})
    check_vocabulary(checkpoint, bare, replace(model.decoder.config, vocab_size=2))
    for vocab_size in (1, len(model.tokenizer) - 1):
        with pytest.raises(ConfigError, match="embeds only"):
            config = replace(model.decoder.config, vocab_size=vocab_size)
            check_vocabulary(checkpoint, model.tokenizer, config)


def test_a_placeholder_past_the_embeddings_is_text_in_a_text() -> None:
    model = tiny_model(vision=True)
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens([AddedToken("<clip>", special=True, normalized=False)], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<clip>") >= model.vocab_size
    [found] = encoder(replace(model, tokenizer=tokenizer)).encode([show(TextPart("a <clip>"))])
    assert found.ids.max() < model.vocab_size and "a <clip>" in tokenizer.decode(found.ids)


def test_a_picture_too_thin_to_be_scaled_is_refused() -> None:
    model = tiny_model(vision=True)
    for size, fits in (((640, 10), True), ((650, 10), False), ((10, 650), False)):
        file = io.BytesIO()
        Image.new("RGB", size).save(file, "PNG")
        request = show(ImagePart(file.getvalue()))
        if fits:
            assert len(encoder(model).encode([request])) == 1
        else:
            with pytest.raises(InvalidArgument, match="sides up to 64:1"):
                encoder(model).encode([request])


def test_a_picture_too_thin_to_be_padded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vision = tiny_model(vision=True).vision
    assert isinstance(vision, LlavaVision)
    monkeypatch.setattr(vision, "processor", PaddedProcessor(vision.processor))
    assert vision.prepare(Image.new("RGB", (64, 1)))["pixels"].shape[0] == 1
    with pytest.raises(CannotPrepare, match="sides up to 64:1"):
        vision.prepare(Image.new("RGB", (65, 1)))
    with pytest.raises(CannotPrepare, match="8193 x 200 pixels; this model pads pictures to a square"):
        vision.prepare(Image.new("RGB", (8193, 200)))


def test_pictures_are_not_padded_beyond_measure_by_transformers_class(tmp_path: Path) -> None:
    folder = tiled.llava(tmp_path).folder
    llava.edit(folder / "preprocessor_config.json", image_processor_type="LlavaImageProcessor", do_pad=True)
    vision = llava.load(folder).vision
    assert vision is not None and vision.prepare(Image.new("RGB", (200, 64)))["pixels"].shape[0] == 1
    with pytest.raises(CannotPrepare, match="pads pictures to a square"):
        vision.prepare(Image.new("RGB", (8193, 200)))


def test_one_of_several_pictures_is_not_padded_beyond_measure(tmp_path: Path) -> None:
    vision = llava.load(tiled.llava_onevision(tmp_path).folder).vision
    assert vision is not None
    large = Image.new("RGB", (8193, 200))
    assert vision.prepare(large)["pixels"].shape[0] > 1, "by itself it is cut in tiles"
    with pytest.raises(CannotPrepare, match="pads pictures to a square"):
        vision.prepare_among(large)


def test_frames_too_thin_to_be_scaled_are_refused() -> None:
    model = video_model(stride=1)
    for size, fits in (((384, 6), True), ((512, 6), False), ((6, 512), False)):
        request = show(VideoPart(clip(frames=2, size=size)))
        if fits:
            assert len(encoder(model).encode([request])) == 1
        else:
            with pytest.raises(InvalidArgument, match=r"video: is \d+ x \d+ pixels; this model takes sides up to 64:1"):
                encoder(model).encode([request])
