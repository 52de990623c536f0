"""Images' K/V taken from where they stood alone: what that is, where it comes to lie, what is run again, its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llada_checkpoints as llada
import numpy as np
import pytest
import torch
from clips import clip
from dimple_checkpoints import Dimple
from helpers import ask, picture, tiny_model
from lavida_checkpoints import Lavida
from mmada_checkpoints import Mmada
from plain_reuse import blended_logits, kv_of_images_alone, with_three_layers
from qwen_vl_checkpoints import KINDS, Qwen

from mmserve.config import MediaConfig
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded, Span
from mmserve.core.request import Amount, ImagePart, Message, Part, Policy, Request, TextPart, VideoPart, Vision
from mmserve.decode.extensions.image_reuse.checks import reused
from mmserve.decode.extensions.image_reuse.reuse import ImageKVReuse, run_to_completion
from mmserve.decode.forward import Pass, forward
from mmserve.encode.embedding import embedded
from mmserve.encode.encoder import Encoder
from mmserve.errors import InvalidArgument
from mmserve.kv.pool import pages_for
from mmserve.kv.reuse import REUSES, Reuse, reuse_of
from mmserve.kv.reuse.blend import Blend
from mmserve.kv.reuse.kv_share import KvShare
from mmserve.kv.reuse.lego_link import LegoLink
from mmserve.kv.reuse.random_reuse import RandomReuse
from mmserve.kv.store import KVStore
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.rope_scaling import Llama3Scaling
from mmserve.tiers.memory import TensorCache

PAGE = 8
#: What is different from the tiny model's plain rotary embedding.
ROTARY: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {
        "rope_scaling": Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=16)
    },
    "partial": {"rotary_width": 8},
    "three axes": {"rope_axes": (0, 0, 1, 1, 1, 2, 2, 2)},
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return with_three_layers(tiny_model(vision=True))


def encode(model: LoadedModel, *parts: Part, **changes: Any) -> Encoded:
    request = dataclasses.replace(ask("r"), messages=(Message("user", parts),), **changes)
    [found] = Encoder(model, MediaConfig(), max_tokens=500).encode([request])
    return found


class Prompt:
    """A prompt, with an answer of a token behind it, and a store and pages of its own."""

    def __init__(self, model: LoadedModel, encoded: Encoded, reuse: ImageKVReuse | None = None) -> None:
        self.model, self.encoded = model, encoded
        self.canvas = Canvas.create(
            encoded.ids, new_tokens=1, block_length=1, mask_id=model.spec.mask_id, places=encoded.places
        )
        self.size = self.canvas.size - model.spec.causal  # all that a first pass may run
        count = pages_for(self.canvas.size, PAGE)
        self.pages = np.random.default_rng(0).permutation(count)
        self.store = KVStore(model.decoder.config, pages=count, page_size=PAGE, dtype=model.dtype, device=model.device)
        for tensor in (*self.store.keys, *self.store.values):
            tensor.fill_(torch.nan)
        self.embeddings, self.deep = embedded(model, self.canvas.tokens, encoded)
        self.reuse = reuse or ImageKVReuse(model, self.store, TensorCache(1 << 30))

    def take(self, policy: Reuse) -> np.ndarray:
        """Which positions of the prompt are not run."""
        encoded = dataclasses.replace(self.encoded, span_keys=self.reuse.keys(self.encoded))
        making = self.reuse.make(policy, encoded, self.canvas, self.embeddings, self.deep, self.pages)
        return run_to_completion(making).positions[: self.size]

    def run(self, rows: np.ndarray) -> torch.Tensor:
        """Logits of the last row."""
        last = np.array([self.size - 1])
        one = Pass(self.canvas, self.pages, self.embeddings, rows, last, last, self.size, self.deep)
        return forward(self.model, self.store, [one], 8)[0].whole()[0]

    def kv(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as they are stored, and values: ``[layers, rows, G, K]``."""
        at = torch.from_numpy(self.pages[rows // PAGE] * PAGE + rows % PAGE)
        keys, values = (torch.stack([t.flatten(0, 1)[at] for t in of]) for of in (self.store.keys, self.store.values))
        return keys, values


@pytest.mark.parametrize("rotary", ROTARY)
@torch.inference_mode()
def test_what_is_taken_is_what_the_image_has_alone_at_its_place(model: LoadedModel, rotary: str) -> None:
    """To the last digits as if its chat had begun so much further right; the first layer's to the last bit as here."""
    turned = with_three_layers(model, **ROTARY[rotary])
    found = encode(model, TextPart("far away, "), ImagePart(picture(1)), TextPart("what?"))
    [span] = found.spans
    if rotary == "three axes":
        grid = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
        before, behind = np.arange(span.start), span.start + 2 + np.arange(len(found.ids) + 1 - span.stop)
        parts = [
            np.broadcast_to(before, (3, len(before))),
            span.start + grid,
            np.broadcast_to(behind, (3, len(behind))),
        ]
        found = dataclasses.replace(found, places=np.concatenate(parts, axis=1))
    here = Prompt(turned, found)
    rows = np.arange(span.start, span.stop)
    assert here.take(Blend(recompute=0.0)).nonzero()[0].tolist() == rows.tolist()
    taken = here.kv(rows)
    here.run(np.arange(here.size))
    for mine, fresh in zip(taken, here.kv(rows), strict=True):
        assert torch.equal(mine[0], fresh[0]) and not torch.allclose(mine[2], fresh[2], atol=1e-2)

    context = encode(model, ImagePart(picture(1)), TextPart("?")).spans[0].start
    moved = span.start - context
    places = here.canvas.rotary_positions(np.arange(here.size + 1))[..., moved:]
    alone = Prompt(
        turned,
        Encoded(
            np.concatenate([found.ids[:context], found.ids[span.start :]]),
            found.image_rows - moved,
            found.features,
            places=places,
        ),
    )
    alone.run(np.arange(alone.size))
    for mine, there in zip(taken, alone.kv(rows - moved), strict=True):
        torch.testing.assert_close(mine, there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", ["blend", "kv_share", "lego_link", "random_reuse"])
@pytest.mark.parametrize(
    ("attention", "shift"), [(Attention.CAUSAL, 1), (Attention.FULL, 0), (Attention.FULL, 1), (Attention.PREFIX, 0)]
)
@torch.inference_mode()
def test_what_is_run_again_and_what_comes_of_it_against_the_rule_written_out(
    attention: Attention, shift: int, by: str
) -> None:
    model = with_three_layers(tiny_model(vision=True), attention, shift)
    found = encode(model, TextPart("first "), ImagePart(picture(1)), TextPart("then "), ImagePart(picture(2)))
    p = Prompt(model, found)
    policy = REUSES[by](recompute=0.4)
    at = torch.cat([torch.arange(s.start, s.stop) for s in found.spans])
    assert len(at) == 8 and reused(policy, found) == 4
    context = encode(model, ImagePart(picture(1)), TextPart("?")).spans[0].start
    both = kv_of_images_alone(model, p.embeddings, [slice(s.start, s.stop) for s in found.spans], context)
    chosen: dict[str, list[int]] = {
        "lego_link": [0, 1, 4, 5],
        "random_reuse": RandomReuse(recompute=0.4).choose((4, 4), np.zeros(0)).tolist(),
    }
    choose = (lambda _all: torch.tensor(chosen[by])) if by in chosen else None
    x, weighed = p.embeddings[: p.size], by == "kv_share"
    of_prompt = {"prompt": len(found.ids), "weighed": weighed}
    wanted, again = blended_logits(model, x, torch.arange(p.size), at, both, choose, 4, **of_prompt)
    held = p.take(policy)
    assert np.flatnonzero(~held[at.numpy()]).tolist() == (at[:, None] == again).any(1).nonzero().flatten().tolist()
    rows = np.flatnonzero(~held)
    torch.testing.assert_close(p.run(rows), wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_later_layer_decides_where_that_is_asked_for(model: LoadedModel) -> None:
    """As many layers as there are: their K/V are those of the prompt, and nothing is lost."""
    found = encode(model, TextPart("a "), ImagePart(picture(1)), TextPart("b "), ImagePart(picture(2)), TextPart("c"))
    p = Prompt(model, found)
    rows = np.flatnonzero(~p.take(Blend(recompute=0.25, layers=9)))
    assert len(rows) == p.size - 6
    torch.testing.assert_close(p.run(rows), Prompt(model, found).run(np.arange(p.size)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_an_image_that_begins_its_chat_loses_nothing(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With rows and columns of positions, and features for several layers; behind text its first layer is the same."""
    qwen = Qwen(tmp_path_factory.mktemp(kind), kind).load()
    image, text = ImagePart(picture(1, (40, 30))), TextPart("what is it?")
    half = Vision(pruner="fastv", amount=Amount("keep_ratio", 0.5))
    for found in (
        encode(qwen, image, text),
        encode(qwen, image, text, vision=half),
        encode(qwen, VideoPart(clip(frames=20, rate=4)), text),
    ):
        p = Prompt(qwen, found)
        held = p.take(Blend(recompute=0.0))
        assert held.sum() > 5 and set(found.image_rows) <= set(np.flatnonzero(held))
        blended = p.run(np.flatnonzero(~held))
        torch.testing.assert_close(blended, Prompt(qwen, found).run(np.arange(p.size)), rtol=1e-4, atol=1e-4)
    found = encode(qwen, TextPart("look: "), ImagePart(picture(1, (40, 30))), TextPart("what is it?"))
    p = Prompt(qwen, found)
    rows = np.flatnonzero(p.take(Blend(recompute=0.0)))
    taken = p.kv(rows)
    p.run(np.arange(p.size))
    assert all(torch.equal(mine[0], fresh[0]) for mine, fresh in zip(taken, p.kv(rows), strict=True))


#: Layouts of masked diffusion models, and whether their chats may have text in front of an image.
DIFFUSION: dict[str, tuple[Callable[[Path], object], bool]] = {
    "llada-v": (lambda folder: llada.Sighted(folder, "siglip"), True),
    "llada-v in tiles": (
        lambda folder: llada.Sighted(
            folder,
            "clip",
            mm_patch_merge_type="spatial_unpad",
            image_aspect_ratio="anyres_max_2",
            image_grid_pinpoints="(1x1),...,(3x3)",
        ),
        True,
    ),
    "lavida on llada": (lambda folder: Lavida(folder, "llada"), True),
    "lavida on dream": (lambda folder: Lavida(folder, "dream"), True),
    "dimple": (Dimple, True),
    "mmada": (Mmada, False),
}


@pytest.mark.parametrize("layout", DIFFUSION)
@torch.inference_mode()
def test_diffusion_layouts(layout: str, tmp_path: Path) -> None:
    """All of an image but the last row of a prompt is taken, each of its rows at its place: its first layer, which no
    other position has a say in, is that of the prompt to the last bit, and the last one is another."""
    make, anywhere = DIFFUSION[layout]
    make(tmp_path)
    seeing = llada.load(tmp_path)
    image, text = ImagePart(picture(1, (40, 30))), TextPart("what is it?")
    found = encode(seeing, *((TextPart("look: "),) if anywhere else ()), image, text)
    p = Prompt(seeing, found)
    rows = np.flatnonzero(p.take(Blend(recompute=0.0)))
    assert len(rows) > 3 and rows.tolist() == np.arange(found.spans[0].start, found.spans[0].stop).tolist()
    taken = p.kv(rows)
    p.run(np.arange(p.size))
    for mine, fresh in zip(taken, p.kv(rows), strict=True):
        assert torch.equal(mine[0], fresh[0])
        assert not torch.allclose(mine[-1], fresh[-1], atol=1e-4)


@torch.inference_mode()
def test_no_two_different_images_have_one_key(model: LoadedModel) -> None:
    reuse = Prompt(model, encode(model, ImagePart(picture(1)), TextPart("?"))).reuse

    def keys(*parts: Part, **changes: Any) -> tuple[bytes, ...]:
        return reuse.keys(encode(model, *parts, **changes))

    one, other = keys(ImagePart(picture(1)), TextPart("a"), ImagePart(picture(2)), TextPart("?"))
    assert keys(TextPart("far away"), ImagePart(picture(2)), ImagePart(picture(1))) == (other, one), "wherever they are"
    assert {len(one), len(other)} == {32}
    [tiny] = keys(ImagePart(changed_by_a_pixel()), TextPart("?"))
    half = Vision(pruner="random", amount=Amount("keep_ratio", 0.5))
    quarter = Vision(pruner="resize", amount=Amount("keep_ratio", 0.25))
    [pruned], [averaged] = (keys(ImagePart(picture(1)), TextPart("?"), vision=vision) for vision in (half, quarter))
    assert len({one, other, tiny, pruned, averaged}) == 5
    found = encode(model, ImagePart(picture(1)), TextPart("?"))
    twin = Prompt(model, found).reuse.keys(found)
    assert twin != (one,), "whoever computed K/V uses them alone"
    [span] = found.spans
    for changes in (
        {"spans": (dataclasses.replace(span, place=span.place - 1),)},  # its rows lie elsewhere in it
        {"spans": (dataclasses.replace(span, stop=span.stop + 1),)},  # text is part of it
        {"image_rows": found.image_rows[1:], "features": feature(found)[1:]},
        {"features": feature(found).double()},
    ):
        other_places = dataclasses.replace(found, places=np.arange(len(found.ids) + 1), **changes)
        assert reuse.keys(other_places) != (one,), changes


def feature(encoded: Encoded) -> torch.Tensor:
    assert encoded.features is not None
    return encoded.features


def changed_by_a_pixel() -> bytes:
    import io

    from PIL import Image

    image, out = Image.open(io.BytesIO(picture(1))).convert("RGB"), io.BytesIO()
    red, green, blue = image.getpixel((20, 15))  # type: ignore[misc]
    image.putpixel((20, 15), (red ^ 128, green, blue))
    image.save(out, "PNG")
    return out.getvalue()


@torch.inference_mode()
def test_a_value_of_another_shape_is_made_anew(model: LoadedModel) -> None:
    found = encode(model, TextPart("a "), ImagePart(picture(1)), TextPart("?"))
    cache, p = TensorCache(1 << 30), Prompt(model, found)
    reuse = ImageKVReuse(model, p.store, cache)
    bad = {"keys": torch.zeros(3, 3, 2, 16), "values": torch.zeros(3, 3, 2, 16)}
    with cache.lease(reuse.keys(found), lambda _which: [bad], lambda _i, _entry: True):
        pass
    p.reuse = reuse
    rows = np.flatnonzero(p.take(Blend(recompute=0.0)))
    again = Prompt(model, found)
    again.take(Blend(recompute=0.0))
    assert all(torch.equal(a, b) for a, b in zip(p.kv(rows), again.kv(rows), strict=True))
    assert (cache.stats().unfit, cache.stats().made) == (1, 2)


def test_the_last_row_of_a_prompt_is_always_run() -> None:
    found = Encoded(np.arange(9), np.arange(3, 9), torch.zeros(6, 2), spans=(Span(3, 9, 3, False),))
    assert reused(Blend(recompute=0.0), found) == 5
    assert reused(None, found) == reused(Blend(recompute=1.0), found) == 0


@pytest.mark.parametrize(
    ("policy", "sizes", "expected"),
    [
        (Blend(recompute=0.5), (3, 3), [1, 2, 4]),
        (Blend(recompute=0.0), (3, 3), []),
        (Blend(recompute=0.01), (3, 3), [4]),
        (KvShare(recompute=0.5), (3, 3), [1, 2, 4]),
        (KvShare(recompute=0.0), (3, 3), []),
        (LegoLink(recompute=0.5), (3, 4), [0, 1, 3, 4]),
        (LegoLink(recompute=1.0), (2, 1), [0, 1, 2]),
        (LegoLink(), (), []),
    ],
)
def test_rules(policy: Reuse, sizes: Sequence[int], expected: list[int]) -> None:
    deviation = np.array([1, 2, 2, 0, 5, 2.0])
    assert policy.choose(sizes, deviation).tolist() == expected
    assert policy.count(sizes) == len(expected)


def test_a_random_choice_is_the_seeds() -> None:
    chosen = [RandomReuse(recompute=0.3, seed=s).choose((40, 60), np.zeros(0)) for s in (1, 1, 2)]
    assert chosen[0].tolist() == chosen[1].tolist() != chosen[2].tolist()
    assert len(set(chosen[0])) == RandomReuse(recompute=0.3).count((40, 60)) == 30 and (np.diff(chosen[0]) > 0).all()


def test_shares_are_whole_where_only_rounding_says_otherwise() -> None:
    assert [Blend(recompute=r).count((n,)) for r, n in ((0.1, 30), (0.15, 100), (0.07, 100), (0.15, 81))] == [
        3,
        15,
        7,
        13,
    ]


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Policy(name="no_such"), "image_reuse"),
        (Policy(name="blend", options={"recompute": 1.5}), "image_reuse.blend"),
        (Policy(name="blend", options={"layers": 1}), "image_reuse.blend"),
        (Policy(name="kv_share", options={"layers": 1}), "image_reuse.kv_share"),
        (Policy(name="kv_share", options={"each_step": -1}), "image_reuse.kv_share"),
        (Policy(name="kv_share", options={"each_step": 65}), "image_reuse.kv_share"),
        (Policy(name="lego_link", options={"recompute": -0.1}), "image_reuse.lego_link"),
        (Policy(name="random_reuse", options={"recompute": float("nan")}), "image_reuse.random_reuse"),
        (Policy(name="lego_link", options={"layers": 3}), "image_reuse.lego_link"),
    ],
)
def test_wrong_rules_are_refused(policy: Policy, field: str) -> None:
    request: Request = dataclasses.replace(ask("r"), image_reuse=policy)
    with pytest.raises(InvalidArgument) as error:
        reuse_of(request)
    assert error.value.violations[0].field == field
