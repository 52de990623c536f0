"""Guided attention: the column that a token is a copy of, and the loss on attention to other columns."""

import helpers
import pytest
import torch

from mmserve.reference.batch import NO_COLUMN
from mmserve.reference.copying import HEADS, NEIGHBOUR_LAYER, SOURCE_LAYER, Guide, source_columns
from mmserve.reference.data import collate, draw
from mmserve.reference.items import Question
from mmserve.reference.losses import mask_answers, piecewise
from mmserve.reference.recipe import Recipe
from mmserve.reference.tokenizer import MASK, token_id
from mmserve.reference.train import Run


@pytest.fixture(scope="module", autouse=True)
def tokenizer():
    with helpers.one_tokenizer():
        yield helpers.tokenizer()


def batch_of(tokenizer, *pairs):
    return collate("copies", [(None, [Question("copy", text, answer)]) for text, answer in pairs], 0, tokenizer)


def test_a_copied_token_has_the_column_after_the_same_tokens(tokenizer):
    batch = batch_of(tokenizer, ("aQzB xQyC", "xQyC aQzB"), ("7", "no"))
    sources = source_columns(batch)
    ids, answer = batch.ids[0].tolist(), (batch.share[0] > 0).nonzero().flatten().tolist()
    spelled = {tokenizer.decode([ids[c]]): tokenizer.decode([ids[s]]) for c in answer if (s := int(sources[0, c])) >= 0}
    assert {"z", "B", "y", "C"} <= set(spelled) and all(token == source for token, source in spelled.items())
    letter = {tokenizer.decode([ids[c]]): int(sources[0, c]) for c in answer}
    assert [ids[letter["z"] - 1], ids[letter["z"] + 1]] == tokenizer.convert_tokens_to_ids(["Q", "B"])
    assert (sources[0][batch.share[0] == 0] == NO_COLUMN).all()


def test_of_two_equal_columns_none_is_the_source(tokenizer):
    batch = batch_of(tokenizer, ("bZ bZ", "aZ"))
    _a, z = (batch.share[0] > 0).nonzero().flatten().tolist()[:2]
    assert tokenizer.decode([int(batch.ids[0, z])]) == "Z" and source_columns(batch)[0, z] == NO_COLUMN


def test_heads_that_look_where_they_should_have_no_loss_and_others_have(tokenizer):
    _kind, samples, canvas = draw(3, 0, scenes_only=False, scale=0.2, mix="dictated_and_copies")
    batch = collate("copies", samples, canvas, tokenizer)
    rows, length = batch.ids.shape
    for layer, wanted in ((NEIGHBOUR_LAYER, Guide.of(batch).neighbour), (SOURCE_LAYER, Guide.of(batch).source)):
        right = torch.zeros(rows, 8, length, length)
        right[:, :HEADS] = 50.0 * torch.nn.functional.one_hot(wanted.clamp(min=0), length)[:, None]
        losses = []
        for scores in (right, torch.zeros_like(right)):
            guide = Guide.of(batch)
            guide.add_scores(layer, scores)
            guide.add_scores(0, -scores)  # a layer that is not guided
            losses.append(float(guide.loss()))
        assert losses[0] < 1e-4 < 1 < losses[1]
    assert float(Guide.of(batch).loss()) == 0


def test_pieces_of_answers_have_the_columns_of_what_they_are_pieces_of(tokenizer):
    batch = batch_of(tokenizer, ("aQzB xQyC 41", "xQyC 41 aQzB"), ("41 ab", "ab 41"))
    mask, guide, plain = token_id(tokenizer, MASK), Guide.of(batch), Guide.of(batch)
    doubled, ids, weight = piecewise(batch, mask, torch.Generator().manual_seed(2), guide)
    assert guide.source.shape == guide.neighbour.shape == doubled.ids.shape
    pieces = weight > 0
    assert guide.source[pieces].tolist() == plain.source[batch.share > 0].tolist()
    guided = pieces & (guide.neighbour != NO_COLUMN)
    assert guided.any() and (guide.source[:, : batch.ids.shape[1]] == NO_COLUMN).all()
    for row, column in guided.nonzero().tolist():
        neighbour = int(guide.neighbour[row, column])
        assert doubled.positions[row, neighbour] == doubled.positions[row, column] - 1
        assert ids[row, neighbour] != mask and doubled.attention_mask(causal=False)[row, 0, column, neighbour]


def test_masked_answers_of_single_questions_are_guided_in_their_own_columns(tokenizer):
    batch = batch_of(tokenizer, ("aQzB xQyC", "xQyC aQzB"))
    ids, weight = mask_answers(batch, token_id(tokenizer, MASK), 0.08, torch.Generator().manual_seed(1))
    guide = Guide.of(batch)
    assert guide.source.shape == ids.shape == weight.shape
    assert (guide.neighbour[0, 1:] == torch.arange(ids.shape[1] - 1)).all()


def test_a_step_has_the_loss_of_the_guide_beside_its_own(tmp_path, tokenizer):
    batch = batch_of(tokenizer, ("aQzB xQyC", "xQyC aQzB"))
    losses = []
    for guide in (0.0, 1.0):
        recipe = Recipe(mix="copies_alone", tower_steps=0, steps=2, guide=guide)
        run = Run(recipe, tmp_path, torch.device("cpu"))
        losses.append(float(run.step(batch)["loss"]))
        assert run.skipped == 0
    assert losses[1] > losses[0] + 0.5  # untrained heads attend to any of some 30 columns


def test_a_causal_model_is_not_guided(tmp_path):
    with pytest.raises(SystemExit, match="--guide"):
        Run(Recipe(objective="causal", guide=1.0), tmp_path, torch.device("cpu"))


def test_rows_of_a_batch_have_about_one_length(tokenizer):
    filled = []
    for step in range(8):
        kind, samples, _canvas = draw(step, 0, scenes_only=False, mix="copies_alone")
        filled.append(float(collate(kind, samples, 0, tokenizer).unpadded.float().mean()))
    assert sum(filled) / len(filled) > 0.75  # rows of any length: 0.6


def test_padding_is_cut_after_each_answer(tokenizer):
    long, short = Question("copy", "aQzB xQyC", "xQyC aQzB"), Question("copy", "7", "7")
    batch = collate("copies", [(None, [long]), (None, [short])], 40, tokenizer)
    cut = batch.with_padding(3)
    for row, asked in enumerate((long, short)):
        answer = len(tokenizer.encode(asked.answer, add_special_tokens=False)) + 1  # and the end of the turn
        assert int((batch.share[row] > 0).sum()) == 40 and int((cut.share[row] > 0).sum()) == answer + 3
        seen = cut.ids[row][cut.unpadded[row]]
        assert seen.equal(batch.ids[row][: len(seen)]) and cut.unpadded[row, : len(seen)].all()
    assert cut.unpadded[0].all() and cut.ids.shape == cut.positions.shape == cut.unpadded.shape == cut.block.shape
