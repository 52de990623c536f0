"""K/V coded in few bits: within their error, whatever the cut, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.canvas import Canvas
from mmserve.core.payloads import CanvasPayload, KVChunk, KVState, PrefilledPayload, TextState
from mmserve.errors import TransferError
from mmserve.transfer.kv_coding import CodedTensor, bits_of, coded, decoded
from mmserve.transfer.payloads import PAYLOADS


def tensor(pages: int, size: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Neighbouring tokens are alike, channels are not."""
    generator = torch.Generator().manual_seed(seed)
    walk = torch.randn(pages, size, 2, 16, generator=generator).cumsum(1) * 0.2
    return (walk + 4 * torch.randn(1, 1, 2, 16, generator=generator)).to(dtype)


def over(payload: object, bits: int, layers: int = 3) -> object:
    return decoded(PAYLOADS.decode(PAYLOADS.encode(coded(payload, bits, layers))))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([4, 5, 6, 7, 8]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_errors_are_within_half_a_step_of_each_head_and_page(
    pages: int, size: int, bits: int, dtype: torch.dtype
) -> None:
    sent = {f"{name}.{layer}": tensor(pages, size, layer, dtype) for layer in range(3) for name in ("keys", "values")}
    found = over(KVChunk(0, size, sent, pages * size), bits)
    assert isinstance(found, KVChunk)
    for name, x in sent.items():
        own = bits_of(int(name.split(".")[1]), 3, bits)
        exact, y = x.float(), found.tensors[name]
        assert y.dtype == dtype and y.shape == x.shape
        first = exact[:, :1].abs().amax((1, 3), keepdim=True) / 127
        step = (exact[:, 1:] - exact[:, :1]).abs().amax((1, 3), keepdim=True) if size > 1 else first
        bound = 0.5 * first + 0.5 * (step + first) / ((1 << (own - 1)) - 1)
        room = 1e-5 + exact.abs() * torch.finfo(dtype).eps
        assert bool(((y.float() - exact).abs() <= bound + room).all())


def test_bits_fall_by_thirds_of_the_layers() -> None:
    assert [bits_of(layer, 6, 6) for layer in range(6)] == [6, 6, 5, 5, 4, 4]
    assert bits_of(2, 3, 4) == 2


def test_what_comes_out_does_not_depend_on_the_cut_nor_on_what_lies_beyond_the_prompt() -> None:
    x = tensor(4)
    dirty = x.clone()
    dirty[3, 5:] = torch.nan
    whole = decoded(coded(KVState(29, 8, {"keys.0": dirty}), 5, 3))
    parts = [over(KVChunk(i, 8, {"keys.0": dirty[i : i + 2]}, 29 - 8 * i), 5) for i in (0, 2)]
    joined = torch.cat([part.tensors["keys.0"] for part in parts])  # type: ignore[attr-defined]
    assert isinstance(whole, KVState)
    assert torch.equal(whole.tensors["keys.0"], joined) and bool(joined.isfinite().all())


def test_it_is_smaller_and_other_tensors_travel_as_they_are() -> None:
    codes = torch.randint(0, 255, (4, 8, 2, 16), dtype=torch.uint8)
    sent = {"keys.0": tensor(64), "keys.0.scale": torch.rand(4, 8, 2, 1), "keys.0.codes": codes}
    found = coded(KVState(512, 8, sent), 6, 1)
    assert isinstance(found.tensors["keys.0"], CodedTensor)
    assert found.tensors["keys.0"].data.nbytes < sent["keys.0"].nbytes / 5
    back = decoded(found)
    assert back.tensors["keys.0.scale"] is sent["keys.0.scale"] and back.tensors["keys.0.codes"] is codes


def test_a_canvas_in_the_middle_of_its_answer_is_never_coded() -> None:
    """An answer goes on from it elsewhere: its K/V must be those that the tokens before were made with."""
    canvas = Canvas.create(np.arange(5), new_tokens=3, block_length=2, mask_id=9)
    prefilled = PrefilledPayload(canvas, KVState(8, 8, {"keys.0": tensor(1)}), 8)
    moved = CanvasPayload(prefilled, TextState((), "", 0, False), np.zeros(8, np.float32), 1)
    assert coded(moved, 4, 1) is moved
    assert isinstance(coded(prefilled, 4, 1).kv.tensors["keys.0"], CodedTensor)


def test_damaged_numbers_are_refused() -> None:
    made = coded(KVState(16, 8, {"keys.0": tensor(2)}), 5, 1)
    one = made.tensors["keys.0"]
    for wrong in (
        replace(one, data=one.data[:-3]),
        replace(one, shape=(3, 8, 2, 16)),
        replace(one, dtype="torch.int64"),
        replace(one, scales=one.scales[:1]),
    ):
        with pytest.raises(TransferError, match="coded K/V"):
            decoded(KVState(16, 8, {"keys.0": wrong}))
