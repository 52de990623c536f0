"""Visual tokens judged by the decoder: the scores against attention written out, and the choice made by them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers import ask, looked, picture, tiny_model
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, Request, Vision
from mmserve.encode.embedding import embedded
from mmserve.encode.encoder import Encoder
from mmserve.models.attended import PromptAttention, shown_by
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import dense_attention
from mmserve.prune.base import Evidence

NEW = 6


@pytest.fixture(scope="module", params=["causal", "full"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    made = tiny_model(vision=True)
    if request.param == "full":
        return made
    return dataclasses.replace(
        made, spec=dataclasses.replace(made.spec, attention=Attention.CAUSAL, logit_shift=1, end_ids=frozenset({-1}))
    )


def encoder(model: LoadedModel) -> Encoder:
    return Encoder(model, MediaConfig(), max_tokens=200)


def plain_scores(model: LoadedModel, encoded: Encoded, kind: Evidence) -> Tensor:
    """All of the attention matrix at the second layer, masked, and the rows of it that count."""
    size, new = len(encoded.ids), 0 if model.spec.causal else NEW
    x, _deep = embedded(model, np.append(encoded.ids, np.full(new, model.spec.mask_id)), encoded)
    cos, sin = model.decoder.rotary(torch.arange(size + new))
    seen = torch.ones(size + new, size + new, dtype=torch.bool)
    seen = seen.tril() if model.spec.causal else seen
    x = model.decoder.layers[0](x[None], cos[None], sin[None], 0, dense_attention(seen[None, None]))[0]
    layer = model.decoder.layers[1]
    normed = layer.attn_norm(x)
    query, key = (rotate(p(normed).unflatten(-1, (-1, 16)), cos, sin) for p in (layer.q_proj, layer.k_proj))
    weights = torch.einsum("qhk,lhk->hql", query, key.repeat_interleave(2, 1)) / 4
    weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
    rows = weights[:, size - 1 : size] if kind is Evidence.LAST_ROW else weights[:, size:]
    return rows.mean((0, 1))[:size]


@torch.inference_mode()
def test_scores_are_rows_of_the_attention_matrix(model: LoadedModel) -> None:
    [encoded] = encoder(model).encode([ask("r", images=(picture(1), picture(2)), max_new_tokens=NEW)])
    new = 0 if model.spec.causal else NEW
    x, _deep = embedded(model, np.append(encoded.ids, np.full(new, model.spec.mask_id)), encoded)
    assert shown_by(model) == {Evidence.LAST_ROW} | (set() if model.spec.causal else {Evidence.MASK_ROWS})
    for kind in shown_by(model):
        found = PromptAttention(model).to_positions(kind, x, torch.arange(len(x)), len(encoded.ids))
        torch.testing.assert_close(found, plain_scores(model, encoded, kind), atol=1e-6, rtol=1e-5)
        assert found.std() > 1e-3, "positions differ"


def asked(pruner: str, value: float, text: str = "what?", name: str = "keep_ratio") -> Request:
    request = ask("r", text, images=(picture(1), picture(2), picture(3)), max_new_tokens=NEW)
    return dataclasses.replace(request, vision=Vision(pruner=pruner, amount=Amount(name, value)))


@torch.inference_mode()
def test_of_each_image_the_best_stay_in_their_places(model: LoadedModel) -> None:
    made = encoder(model)
    [full] = looked(made, asked("fastv", 1.0))
    for pruner, kind in (("fastv", Evidence.LAST_ROW), ("redvtp", Evidence.MASK_ROWS))[: 2 - model.spec.causal]:
        scores = plain_scores(model, full, kind)
        for keep in (1, 2, 3, 4):
            [left] = looked(made, asked(pruner, keep / 4))
            images = full.image_rows.reshape(3, 4)
            best = [sorted(rows, key=lambda row: -float(scores[row]))[:keep] for rows in images]
            places = np.arange(len(left.ids)) if left.places is None else left.places[:-1]
            assert sorted(np.concatenate(best)) == places[left.image_rows].tolist()
            assert np.array_equal(full.ids[places], left.ids)
            assert full.features is not None and left.features is not None
            same = np.searchsorted(full.image_rows, places[left.image_rows])
            assert torch.equal(full.features[torch.from_numpy(same)], left.features)
            assert (left.places is None) == (keep == 4)
            assert left.places is None or left.places[-1] == len(full.ids)


@torch.inference_mode()
def test_a_share_of_attention_is_the_fewest_that_draw_it(model: LoadedModel) -> None:
    made = encoder(model)
    [full] = looked(made, asked("fastv", 1.0))
    scores = plain_scores(model, full, Evidence.LAST_ROW)[torch.from_numpy(full.image_rows)].reshape(3, 4)
    for mass in (0.2, 0.5, 0.8):
        [left] = looked(made, asked("fastv", mass, name="attention_mass"))
        ordered = scores.sort(-1, descending=True).values.cumsum(-1)
        wanted = [next(n for n in range(4) if own[n] >= mass * own[-1]) + 1 for own in ordered]
        assert len(left.image_rows) == sum(wanted)


def test_the_question_chooses_and_the_tower_runs_once(model: LoadedModel) -> None:
    made = encoder(model)
    questions = [asked("fastv", 0.25, text) for text in ("what is left?", "is it red?", "7 + 5", "above the star")]
    places = [looked(made, request)[0].places for request in questions]
    assert len({tuple(p.tolist()) for p in places if p is not None}) > 1
    assert made.cache.tokens.stats().made == 3
    again = looked(made, asked("fastv", 1.0), *questions)  # in company, and with the cache
    assert again[0].places is None and made.cache.tokens.stats().made == 3
    for before, after in zip(places, again[1:], strict=True):
        assert before is not None and after.places is not None and np.array_equal(before, after.places)
