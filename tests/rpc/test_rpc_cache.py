"""Warming a prompt: what of a request makes the entry, and what is of its answer alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import grpc
from echo_server import PATIENCE, EchoEngine, model_info, threaded

from mmserve.core.request import Diffusion, Policy, Sampling, Streaming
from mmserve.v1 import cache_pb2, cache_pb2_grpc
from mmserve.v1 import generation_pb2 as pb


def test_what_would_be_generated_neither_counts_nor_is_refused(engine: EchoEngine) -> None:
    engine.caches = SimpleNamespace(prefix_of=lambda _request: "entry")  # type: ignore[attr-defined]
    plain = pb.GenerateRequest(vision=pb.VisionParams(keep_ratio=0.5))
    plain.messages.add(role=pb.ROLE_USER).parts.add(text="What is left of it?")
    plain.image_reuse.lego_link.SetInParent()
    full = pb.GenerateRequest()
    full.CopyFrom(plain)
    full.sampling.max_new_tokens, full.sampling.temperature, full.sampling.n = 32, -1.0, 99
    full.diffusion.early_commit.answer_length = 8  # would not fit a canvas of one token
    full.constraint.regex = "("
    full.required_tool, full.parallel_tool_calls, full.slo_class = "nobody", False, "none"
    full.kv_reduction.SetInParent()
    full.stream.alternatives = 99
    with threaded(engine) as address, grpc.insecure_channel(address) as channel:
        warm = cache_pb2_grpc.CacheServiceStub(channel).Warm
        for each in (plain, full):
            assert warm(cache_pb2.WarmRequest(request=each), timeout=PATIENCE).id == "entry"
    first, second = (replace(request, id="", label="", deadline=None) for request in engine.requests)
    assert first == second
    assert second.image_reuse is not None and second.vision.amount is not None
    assert second.sampling == Sampling(max_new_tokens=1) and second.constraint is second.slo is second.tools is None
    assert second.diffusion == Diffusion(recompute=Policy(name="none"), commit=Policy(name="low_confidence"))
    assert second.streaming == Streaming(deltas=False)


def test_the_tools_of_a_prompt_are_warmed_unless_none_are_shown() -> None:
    engine = EchoEngine(model_info(tool_format="hermes"))
    engine.caches = SimpleNamespace(prefix_of=lambda _request: "entry")  # type: ignore[attr-defined]
    asked = pb.GenerateRequest(continue_final_message=True)
    asked.messages.add(role=pb.ROLE_USER).parts.add(text="Find it.")
    asked.messages.add(role=pb.ROLE_ASSISTANT).parts.add(text="It is")
    asked.tools.add(name="find", description="Finds it.")
    asked.tools.add(name="lose")
    with threaded(engine) as address, grpc.insecure_channel(address) as channel:
        warm = cache_pb2_grpc.CacheServiceStub(channel).Warm
        for choice in ({"required_tool": "find"}, {"tool_choice": pb.TOOL_CHOICE_NONE}):
            each = pb.GenerateRequest(**choice)  # type: ignore[arg-type]
            each.MergeFrom(asked)
            each.allowed_tools.append("find")
            warm(cache_pb2.WarmRequest(request=each), timeout=PATIENCE)
    with_tools, without = engine.requests
    assert with_tools.tools is not None and [tool.name for tool in with_tools.tools.tools] == ["find", "lose"]
    assert without.tools is None and with_tools.constraint is without.constraint is None
    assert with_tools.continues and without.continues
