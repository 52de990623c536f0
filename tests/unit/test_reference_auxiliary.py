"""Auxiliary labels that agree with the pictures, and pieces that do not attend to their own answer."""

import random
from dataclasses import replace

import helpers
import numpy as np
import pytest
import torch

from mmserve.models.decoder import dense_attention
from mmserve.reference.auxiliary import (
    APPEARED,
    GONE,
    IGNORED,
    OTHER,
    RECOLORED,
    SAME,
    ChangeHead,
    change_labels,
    name_of,
)
from mmserve.reference.clips import draw_clip
from mmserve.reference.data import collate, draw, frame_times
from mmserve.reference.losses import piecewise
from mmserve.reference.model import FRAME_TOKENS, FRAMES, VISUAL_TOKENS, ReferenceModel
from mmserve.reference.scenes import CELL
from mmserve.reference.tokenizer import MASK, token_id

#: Background, lines and dots stay below this in every channel, noise included; every shape passes it in one.
BRIGHT = 150


@pytest.fixture(scope="module")
def tokenizer():
    return helpers.tokenizer()


def batch_of(kind, tokenizer, rows=3):
    samples, canvas = next((s, c) for k, s, c in (draw(i, 0, scenes_only=False) for i in range(100)) if k == kind)
    return collate(kind, samples[:rows], canvas, tokenizer)


def test_a_clip_holds_what_is_to_be_seen_in_its_pictures():
    rng = random.Random(3)
    seen = 0
    for clip in (draw_clip(rng) for _ in range(30)):
        times = frame_times(clip.seconds)
        for time, picture in zip(times, clip.frames(times).pictures, strict=True):
            bright = (np.asarray(picture).max(-1) > BRIGHT).reshape(3, CELL, 3, CELL).sum((1, 3))
            cells = set(clip.held(time))
            if clip.kind == "moves":  # a shape between two cells is seen in both
                assert all(bright[cell] for cell in cells)
            else:
                assert {tuple(map(int, cell)) for cell in np.argwhere(bright > 20)} == cells
            seen += len(cells)
    assert seen > 200


def test_labels_say_what_a_cell_holds_what_it_held_what_happened_and_when():
    red, blue, square = ("circle", "red"), ("circle", "blue"), ("square", "blue")
    held = [{(0, 0): red, (1, 1): red}, {(0, 0): red, (1, 1): blue, (2, 0): red}, {(0, 0): red, (1, 1): square}]
    labels = change_labels(held, [0, 3, 5], pooled=True).unflatten(0, (3, 3, 3))
    assert labels[0, 0, 0].tolist() == [name_of(*red), IGNORED, IGNORED, 0]
    assert labels[1, 0, 0].tolist() == [name_of(*red), name_of(*red), SAME, 3]
    assert labels[1, 1, 1].tolist() == [name_of(*blue), name_of(*red), RECOLORED, 3]
    assert labels[1, 2, 0].tolist() == [name_of(*red), 0, APPEARED, 3]
    assert labels[2, 2, 0].tolist() == [0, name_of(*red), GONE, 5]
    assert labels[2, 1, 1].tolist() == [name_of(*square), name_of(*blue), OTHER, 5]
    assert labels[2, 0, 2].tolist() == [0, 0, SAME, 5]
    still = change_labels(held[:1], None, pooled=False)
    assert still.shape == (VISUAL_TOKENS, 4) and (still[:, 1:] == IGNORED).all()
    assert still[:, 0].unflatten(0, (9, 9))[:3, :3].eq(name_of(*red)).all()


@pytest.mark.parametrize("kind", ["image", "video", "pair", "cells"])
def test_every_visual_token_of_a_batch_has_its_labels(kind, tokenizer):
    batch = batch_of(kind, tokenizer)
    assert batch.changes.shape == (int(batch.visual_at.sum()), 4)
    assert (batch.changes[:, 3] != IGNORED).all() == (kind == "video")
    if kind == "video":
        times = batch.changes[:, 3].unflatten(0, (3, FRAMES, FRAME_TOKENS))
        assert (times == times[..., :1]).all() and (times[:, 1:] >= times[:, :-1]).all()


def test_a_read_out_learns_its_labels():
    torch.manual_seed(0)
    hidden = torch.randn(60, 16)
    labels = torch.stack([torch.randint(0, size, (60,)) for size in ChangeHead.CLASSES], 1)
    labels[:20, 3] = IGNORED
    head = ChangeHead(16)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        loss = head(hidden, labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_piece_sees_the_answer_left_of_it_and_none_of_itself(kind, tokenizer):
    torch.manual_seed(0)
    mask = token_id(tokenizer, MASK)
    model = ReferenceModel(640, causal=False).eval()
    batch = batch_of(kind, tokenizer)
    visual = (
        None if batch.pixels is None else model.visual(model.image_features(batch.pixels)[0], pooled=False).detach()
    )
    doubled, ids, weight = piecewise(batch, mask, torch.Generator().manual_seed(1))
    assert torch.allclose(weight.sum(1), torch.ones(3)) and (ids[weight > 0] == mask).all()
    assert doubled.ids[weight > 0].tolist() == batch.ids[batch.share > 0].tolist()

    def logits(ids):
        with torch.no_grad():
            return model(visual, ids, doubled.visual_at, doubled.positions, doubled.attention_mask(causal=False))[0]

    clean = logits(ids)
    row, length = 1, batch.ids.shape[1]
    pieces = doubled.question[row].unique()[1:]
    assert len(pieces) > 5
    for piece in pieces[1:4].tolist():
        mine = (doubled.question[row] == piece).nonzero().flatten()
        places = doubled.positions[row, mine]
        changed = ids.clone()
        changed[row, places[0] : length] = 7  # the first copy, from the piece on
        assert torch.equal(logits(changed)[row, mine], clean[row, mine])
        changed = ids.clone()
        changed[row, places[0] - 1] = 7  # the token in front of it
        assert not torch.equal(logits(changed)[row, mine], clean[row, mine])


def test_a_piece_gets_the_logits_of_the_canvas_it_stands_for(tokenizer):
    """With one layer, nothing on the left can pass on what is right of it."""
    torch.manual_seed(0)
    mask = token_id(tokenizer, MASK)
    model = ReferenceModel(640, causal=False).eval()
    model.decoder.layers = model.decoder.layers[:1]
    batch = batch_of("text", tokenizer, rows=1)
    doubled, ids, _weight = piecewise(batch, mask, torch.Generator().manual_seed(2))
    with torch.no_grad():
        together = _logits(model, doubled, ids)
        for piece in (2, 4):
            mine = (doubled.question[0] == piece).nonzero().flatten()
            places = doubled.positions[0, mine]
            alone = batch.ids[:, : int(places[-1]) + 1].clone()
            alone[0, places] = mask
            size = alone.shape[1]
            short = replace(batch, unpadded=batch.unpadded[:, :size], question=batch.question[:, :size], packed=False)
            short = replace(short, visual_at=batch.visual_at[:, :size], positions=batch.positions[:, :size])
            assert (_logits(model, short, alone)[0, places] - together[0, mine]).abs().max() < 1e-3


def _logits(model, batch, ids):
    x = model.decoder.embed(ids)
    cos, sin = model.decoder.rotary(batch.positions)
    x = model.decoder.layers[0](x, cos, sin, 0, dense_attention(batch.attention_mask(causal=False)))
    return model.decoder.logits(model.decoder.norm(x))
