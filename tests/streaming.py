"""A tiny model that keeps streams, streams of noise, and questions about them."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from clips import video_model
from harness import PATIENCE, Bench, Call
from helpers import ask
from PIL import Image
from plain_reuse import with_three_layers

from mmserve.core.request import Policy, Request
from mmserve.core.session import Asked, Memory
from mmserve.core.tenant import ANONYMOUS
from mmserve.models.base import Attention, LoadedModel
from mmserve.video.base import EncodedFrame, Frame, Scope
from mmserve.video.streams import EngineStream, EngineStreams

LAST = Policy(name="last")


def streaming_model(
    attention: Attention = Attention.CAUSAL, shift: int = 1, *, stride: int = 2, **spec: Any
) -> LoadedModel:
    """Three layers, one visual token a frame (four at a ``stride`` of 1) behind a label of two tokens or so."""
    model = with_three_layers(video_model(time="{seconds}s:", stride=stride), attention, shift)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, **spec))


def frame(number: int, seconds: float | None = None, *, seed: int = 0, **given: Any) -> Frame:
    """Noise, one a second."""
    pixels = np.random.default_rng([seed, number]).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    return Frame(float(number) if seconds is None else seconds, Image.fromarray(pixels), **given)


def put(stream: EngineStream, *frames: Frame) -> list[EncodedFrame]:
    """Append them, and wait until questions can see them."""
    waiting: list[Future[EncodedFrame]] = [stream.append(each) for each in frames]
    return [each.result(PATIENCE) for each in waiting]


def opened(streams: EngineStreams, **memory: Any) -> EngineStream:
    """A stream of that memory."""
    return streams.open(Memory(**memory), ANONYMOUS)


def asked(name: str, text: str = "what is it?", **options: Any) -> Request:
    """A question; its answer's tokens are told."""
    request = ask(name, text, **{"recompute": LAST, "max_new_tokens": 6, **options})
    return dataclasses.replace(request, streaming=dataclasses.replace(request.streaming, tokens=True))


def submit(stream: EngineStream, request: Request, scope: Scope | None = None) -> tuple[Call, Asked]:
    """Ask, and do not wait."""
    call = Call(request)
    return call, stream.ask(request, scope, call.sink)


def answer(stream: EngineStream, request: Request, scope: Scope | None = None) -> tuple[list[int], Asked]:
    """The answer's tokens, and what was asked about."""
    call, told = submit(stream, request, scope)
    return [token.id for token in call.finished().tokens], told


def kept(stream: EngineStream) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The table, the keys and the values of a stream now, copied."""
    assert stream.state is not None
    branch = stream.state.branch(None)
    assert branch.keys is not None and branch.values is not None
    return branch.table, branch.keys.clone(), branch.values.clone()


def reserved(streams: EngineStreams) -> int:
    """Bytes reserved for open streams."""
    return sum(stream.held for stream in streams._streams)


def gone(bench: Bench, streams: EngineStreams) -> None:
    """Nothing is left of streams and questions."""
    streams.stop()
    assert reserved(streams) == 0
    bench.await_nothing_left()
