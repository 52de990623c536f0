"""Payloads as bytes: they come back as they were, and what is damaged, cut short or of another version is refused."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from mmserve.core.candidates import Candidates
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack, Encoded, Span
from mmserve.core.payloads import EncodedPayload, KVState, PrefilledPayload
from mmserve.errors import TransferError
from mmserve.transfer.codec import Kinds
from mmserve.transfer.local import LocalTransport
from mmserve.transfer.payloads import PAYLOADS
from mmserve.transfer.pipe import PipeTransport


def encoded() -> Encoded:
    features = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    grids = ((np.array([1, 2]), np.array([3])),)
    return Encoded(np.arange(6), np.array([1, 2, 3]), features, spans=(Span(1, 4, 1, False),), grids=grids)


def prefilled() -> PrefilledPayload:
    canvas = Canvas.create(np.arange(5), new_tokens=3, block_length=2, mask_id=9)
    canvas.commit(np.array([5]), np.array([7]))
    held = {"keys.0": torch.randn(2, 4, 1, 3), "values.0": torch.randn(2, 4, 1, 3)}
    candidates = Candidates(np.array([6]), np.array([1]), np.array([0.5], np.float32), None, None)
    row = torch.randn(4, 6)
    return PrefilledPayload(
        canvas,
        KVState(8, 4, held),
        8,
        candidates,
        embeddings=row,
        deep=DeepStack(np.array([2]), row[1:2, None]),  # a view of the same memory
        extensions={"a": {"at": -math.inf, "list": [1, (2.5, None)], "flag": True, "empty": np.zeros(0, bool)}},
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("payload", [EncodedPayload(encoded()), prefilled()])
def test_a_payload_comes_back_as_it_was(payload: Any) -> None:
    back = PAYLOADS.decode(PAYLOADS.encode(payload))
    assert same(payload, back)
    assert not same(payload, dataclasses.replace(payload, **{dataclasses.fields(payload)[0].name: None}))


def test_what_comes_back_can_be_written_to() -> None:
    back = PAYLOADS.decode(PAYLOADS.encode(prefilled()))
    back.canvas.commit(np.array([6]), np.array([8]))
    back.embeddings[0] = 1.0
    assert back.canvas.known() == 7


@pytest.mark.parametrize("payload", [EncodedPayload(encoded()), prefilled()])
def test_any_damage_is_refused(payload: Any) -> None:
    data = PAYLOADS.encode(payload)
    for at in [*range(40), *range(40, len(data), 37), len(data) - 1]:
        for wrong in (0xFF, 0x01):
            with pytest.raises(TransferError):
                PAYLOADS.decode(data[:at] + bytes([data[at] ^ wrong]) + data[at + 1 :])
        with pytest.raises(TransferError):
            PAYLOADS.decode(data[:at])
    with pytest.raises(TransferError, match="came as"):
        PAYLOADS.decode(data + b"more")


@dataclass(frozen=True)
class Note:
    text: str
    part: Any = None


@dataclass(frozen=True)
class Part:
    number: int


def test_other_versions_and_kinds_are_refused() -> None:
    old = Kinds({Note: 1}, (Part,)).encode(Note("a", Part(2)))
    assert Kinds({Note: 1}, (Part,)).decode(old) == Note("a", Part(2))
    with pytest.raises(TransferError, match="version 1; this server knows version 2"):
        Kinds({Note: 2}, (Part,)).decode(old)
    with pytest.raises(TransferError, match="'Note', version 1; this server does not know it"):
        PAYLOADS.decode(old)
    with pytest.raises(TransferError, match="fields"):
        Kinds({Note: 1}, ()).decode(old)  # a part that is not known
    with pytest.raises(TransferError, match="layout version"):
        PAYLOADS.decode(old[:4] + b"\x01\x00" + old[6:])
    with pytest.raises(TransferError, match="not the bytes"):
        PAYLOADS.decode(b"PK" + old[2:])


def test_fields_that_are_not_known_are_refused() -> None:
    @dataclass(frozen=True)
    class Renamed:
        words: str

    Renamed.__name__ = "Note"
    with pytest.raises(TransferError, match="fields"):
        Kinds({Note: 1}, ()).decode(Kinds({Renamed: 1}, ()).encode(Renamed("a")))


@pytest.mark.parametrize("live", [object(), len, {1, 2}, Part(3), np.float32(1.0)])
def test_what_is_no_plain_data_does_not_travel(live: object) -> None:
    with pytest.raises(TypeError):
        Kinds({Note: 1}, ()).encode(Note("a", live))
    with pytest.raises(TypeError):
        PAYLOADS.encode(live)


def test_within_a_process_nothing_is_copied() -> None:
    transport, payload = LocalTransport(), prefilled()
    transport.send("r", payload)
    assert transport.in_process and transport.waiting == 1
    assert transport.receive("r") is payload and transport.waiting == 0


def test_a_pipe_keeps_what_came_until_it_is_asked_for() -> None:
    out, into = Pipe(duplex=False)
    sender, receiver = PipeTransport(into, receives=False), PipeTransport(out, receives=True)
    large = dataclasses.replace(prefilled(), embeddings=torch.randn(1000, 1000))  # more than a pipe holds
    for name in ("a", "b", "c"):
        sender.send(name, large)
    assert same(receiver.receive("b"), large)
    assert same(receiver.receive("a"), large)
    receiver.drop("c")
    assert receiver.waiting == 0
    into.close()
    with pytest.raises(TransferError, match="sender of payloads is gone"):
        receiver.receive("d")
    out.close()
    with pytest.raises(TransferError, match="receiver of payloads is gone"):
        sender.send("e", large)


def test_what_never_comes_is_not_waited_for_without_end() -> None:
    out, _into = Pipe(duplex=False)
    with pytest.raises(KeyError):
        PipeTransport(out, receives=True, seconds=0.05).receive("a")
