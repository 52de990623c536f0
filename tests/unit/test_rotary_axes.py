"""Positions with several axes: which frequency each turns, through canvas, prefix keys and decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding

from mmserve.core.canvas import Canvas
from mmserve.encode.places import axis_places
from mmserve.kv.prefix import page_keys
from mmserve.models.decoder import Decoder, DeepRows, dense_attention
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.rotary import Rotary, frequency_axes

PLACES = torch.tensor([[0, 1, 2, 2, 2, 2, 5], [0, 1, 2, 2, 3, 3, 5], [0, 1, 2, 3, 2, 3, 5]])


@pytest.mark.parametrize(("sections", "interleaved"), [([16, 24, 24], False), ([24, 20, 20], True)])
def test_tables_are_those_of_transformers(sections: list[int], interleaved: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128}
    theirs = (
        Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**sizes, rope_parameters=rope))
        if interleaved
        else Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**sizes, rope_parameters=rope))
    )
    axes = frequency_axes(sections, interleaved=interleaved)
    assert [axes.count(axis) for axis in range(3)] == sections
    ours = Rotary(128, 1e6, axes=axes).table(PLACES)
    for mine, other in zip(ours, theirs(torch.zeros(1), PLACES[:, None]), strict=True):
        assert (mine[:, 0] - other[0]).abs().max() < 1e-6
    text = torch.arange(7)
    one, several = Rotary(128, 1e6).table(text), Rotary(128, 1e6, axes=axes).table(text.expand(3, 7))
    assert torch.equal(one[0], several[0]) and torch.equal(one[1], several[1])


def test_interleaved_axes_take_turns() -> None:
    assert frequency_axes([4, 2, 2], interleaved=True) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert frequency_axes([4, 2, 2], interleaved=False) == (0, 0, 0, 0, 1, 1, 2, 2)


def test_places_of_text_and_pictures() -> None:
    """Two rows of three tokens, a text of two, then a column of two frames whose times are far apart."""
    coordinates = torch.tensor([[0] * 6 + [0, 0, 9, 9], [0, 0, 0, 1, 1, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 0, 0, 0, 0]])
    visual = torch.tensor([False] + [True] * 6 + [False] * 2 + [True] * 4 + [False])
    assert axis_places(visual, coordinates).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 6, 15, 15, 8, 9],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7, 6, 7, 8, 9],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 6, 6, 6, 8, 9],
    ], "time has no say in where text goes on"


def test_a_canvas_goes_on_on_every_axis() -> None:
    places = np.array([[0, 1, 1, 3], [0, 1, 2, 3]])
    canvas = Canvas.create(np.array([5, 6, 7]), new_tokens=2, block_length=1, mask_id=0, places=places)
    assert canvas.places is not None and canvas.places.tolist() == [[0, 1, 1, 3, 4], [0, 1, 2, 3, 4]]
    assert canvas.rotary_positions(np.array([2, 4])).tolist() == [[1, 4], [2, 4]]


def test_page_keys_tell_every_axis_and_share_text() -> None:
    ids, rows, features = np.zeros(8, np.int64), np.arange(4, 8), np.zeros((4, 4), np.uint8)

    def keys(*places: list[int]) -> tuple[bytes, ...]:
        return page_keys(ids, rows, features, np.array(places), page_size=4, block=1, logit_shift=0)

    text = [0, 1, 2, 3]
    square = keys([*text, 4, 4, 4, 4], [*text, 4, 4, 5, 5], [*text, 4, 5, 4, 5])
    column = keys([*text, 4, 4, 4, 4], [*text, 4, 5, 6, 7], [*text, 4, 4, 4, 4])
    assert square[0] == column[0] and square[1] != column[1]
    plain = page_keys(ids, rows, features, None, page_size=4, block=1, logit_shift=0)
    assert plain[0] == square[0] and plain[1] != square[1]
    swapped = keys([*text, 4, 4, 4, 4], [*text, 4, 5, 4, 5], [*text, 4, 4, 5, 5])
    assert swapped[1] != square[1], "rows are no columns"


def test_deep_features_are_added_behind_their_layer() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}
    config = DecoderConfig(**sizes, num_layers=3, head_dim=8, rope_axes=(0, 0, 1, 2), deep_layers=2)
    decoder = Decoder(config).eval()
    x, rows, features = torch.randn(7, 16), torch.tensor([2, 3, 5]), torch.randn(2, 3, 16)
    with torch.no_grad():
        ours = decoder(x, PLACES, dense_attention(), DeepRows(rows, features))
        cos, sin = decoder.rotary(PLACES)
        for index, layer in enumerate(decoder.layers):
            x = layer(x, cos, sin, index, dense_attention())
            if index < 2:
                x[rows] += features[index]
        assert torch.equal(ours, decoder.norm(x))


@pytest.mark.parametrize(
    ("values", "message"), [({"rope_axes": (0, 1)}, "do not fit heads of 8"), ({"deep_layers": 2}, "there are only 1")]
)
def test_dimensions_that_cannot_be(values: dict[str, object], message: str) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**sizes, "num_layers": 1, "head_dim": 8, **values})  # type: ignore[arg-type]
