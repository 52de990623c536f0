"""Models with weights of 8 or 4 bits, loaded as a configuration names them: each request its own tokens, alone and
beside others, by every cache policy, and for every stage the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench
from helpers import ask, dkv, picture

from mmserve.config import ModelConfig
from mmserve.core.request import Policy
from mmserve.models.quantized import why_not
from mmserve.models.registry import load_model

NO_BYTES = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(bool(NO_BYTES), reason=f"no bytes are multiplied here: {NO_BYTES}")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("bundled", (None, dkv(1), Policy(name="dual"))),
        ("bundled-causal", (Policy(name="last"), Policy(name="last"), Policy(name="last"))),
    ],
)
def test_a_request_has_its_own_tokens_in_any_batch(
    bench: Callable[..., Bench], name: str, policies: tuple[Policy | None, ...], dtype: str
) -> None:
    b = bench(load_model(ModelConfig(path=name, dtype=dtype)), stages="inline")
    questions = ("what is left of the red circle?", "how many shapes are there?", "describe the picture")

    def requests(prefix: str) -> list[Any]:
        return [
            ask(f"{prefix}{i}", text, images=(picture(i),), max_new_tokens=12, recompute=policy)
            for i, (text, policy) in enumerate(zip(questions, policies, strict=True))
        ]

    alone = [b.ask(request).text for request in requests("alone")]
    together = [call.finished().text for call in b.submit(*requests("batch"))]
    assert alone == together and all(alone)
    assert b.engine.stages.describe().dtype == dtype
