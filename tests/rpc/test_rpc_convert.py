from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest
from echo_server import model_info
from helpers import sure_above
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config import MediaConfig
from mmserve.core.events import (
    Admitted,
    Alternative,
    CommittedToken,
    Delta,
    Failed,
    Finished,
    Prefilled,
    PromptToken,
    Snapshot,
    StageTimes,
    Usage,
)
from mmserve.core.info import ModelInfo
from mmserve.core.request import (
    Amount,
    Diffusion,
    ImagePart,
    Message,
    PixelRange,
    Policy,
    Request,
    Sampling,
    Streaming,
    TextPart,
    VideoPart,
    Vision,
)
from mmserve.core.tools import ToolCall
from mmserve.decode.commit import DIFFUSION_COMMIT
from mmserve.decode.policies import Offered, commit_policy, recompute_policy
from mmserve.decode.recompute import FULL_ATTENTION
from mmserve.encode.store import MediaStore
from mmserve.errors import Cancelled, Internal, InvalidArgument, NotFound, Unimplemented
from mmserve.prune import PRUNERS
from mmserve.rpc.request_messages import to_request
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.events import from_response, to_response
from mmserve.wire.models import from_model_info, to_model_info

USER = {"role": "ROLE_USER", "parts": [{"text": "hello"}]}
CALL = {"id": "1", "name": "f", "arguments": "{}"}
LIMITS = MediaConfig(max_item_bytes=100, max_images=2, max_videos=2)


def build(info: ModelInfo | None = None, store: MediaStore | None = None, **fields: Any) -> Request:
    message = pb.GenerateRequest(**{"messages": [USER], **fields})
    return to_request(
        message,
        request_id="id",
        info=info or model_info(),
        limits=LIMITS,
        media=(store or MediaStore(1000)).get,
        deadline=12.5,
    )


def wrong(**fields: Any) -> list[str]:
    with pytest.raises(InvalidArgument) as caught:
        build(**fields)
    return [v.field for v in caught.value.violations]


def test_defaults() -> None:
    assert build(model="echo") == Request(
        id="id", model="echo", messages=(Message("user", (TextPart("hello"),)),), deadline=12.5
    )


def test_defaults_are_the_models() -> None:
    info = model_info(max_new_tokens=7, recompute_policy="dkv_decode", commit_policy="threshold")
    request = build(info)
    assert request.sampling.max_new_tokens == 7
    assert request.diffusion.recompute == Policy(name="dkv_decode")  # its numbers have their own defaults
    assert request.diffusion.commit == Policy(name="threshold")


def test_policies_of_next_token_models() -> None:
    info = model_info(diffusion=False, recompute_policies=("last", "none"), recompute_policy="last", block_length=1)
    assert build(info).diffusion.recompute == Policy(name="last")
    assert build(info, diffusion={"last": {}, "block_length": 1}).diffusion == Diffusion(
        block_length=1, recompute=Policy(name="last")
    )
    assert build(info, diffusion={"no_cache": {}}).diffusion.recompute == Policy(name="none")
    with pytest.raises(Unimplemented, match="recompute policy 'dkv_decode'; it has last, none"):
        build(info, diffusion={"dkv_decode": {}})
    with pytest.raises(InvalidArgument, match=r"diffusion\.block_length: must be 1"):
        build(info, diffusion={"block_length": 2})
    with pytest.raises(Unimplemented, match="recompute policy 'last'; it has none, dkv_decode"):
        build(diffusion={"last": {}})


def test_a_policy_that_needs_a_filter_says_how_to_get_one() -> None:
    with pytest.raises(Unimplemented, match=r"no commit policy 'learned'; .*mmserve train-filter.*; it has low_conf"):
        build(diffusion={"learned": {}})


def test_everything_set() -> None:
    store = MediaStore(1000)
    media_id = store.put(b"uploaded").media_id
    request = build(
        store=store,
        messages=[
            {"role": "ROLE_SYSTEM", "parts": [{"text": "s"}]},
            {"role": "ROLE_ASSISTANT", "parts": [{"text": "a"}]},
            {
                "role": "ROLE_USER",
                "parts": [{"image": {"data": b"inline"}}, {"text": "u"}, {"image": {"media_id": media_id}}],
            },
        ],
        sampling={"temperature": 1.5, "top_p": 1.0, "top_k": 4, "seed": 9, "max_new_tokens": 1024, "stop": ["x"] * 16},
        diffusion={"steps": 1, "block_length": 1, "dkv_decode": {"refresh": 1}, "threshold": {"confidence": 1.0}},
        stream={"deltas": False, "snapshots": True, "prefilled": True, "prompt": True},
    )
    assert [m.role for m in request.messages] == ["system", "assistant", "user"]
    assert request.messages[2].parts == (ImagePart(b"inline"), TextPart("u"), ImagePart(b"uploaded"))
    assert request.sampling == Sampling(
        temperature=1.5, top_p=1.0, top_k=4, seed=9, max_new_tokens=1024, stop=("x",) * 16
    )
    assert request.diffusion == Diffusion(
        steps=1,
        block_length=1,
        recompute=Policy(name="dkv_decode", options={"refresh": 1}),
        commit=Policy(name="threshold", options={"confidence": 1.0}),
    )
    assert request.streaming == Streaming(deltas=False, snapshots=True, prefilled=True, prompt=True)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("sampling.temperature", [-0.1, math.nan, math.inf, -math.inf]),
        ("sampling.top_p", [0.0, -1.0, 1.01, math.nan]),
        ("sampling.max_new_tokens", [0, 1025]),
        ("diffusion.steps", [0]),
        ("diffusion.block_length", [0]),
        ("diffusion.dkv_decode.refresh", [0]),
        ("diffusion.threshold.confidence", [0.0, -0.5, math.nan, math.inf, -math.inf]),
        ("diffusion.factor.factor", [0.0, -1.0, math.nan, math.inf, -math.inf]),
        ("diffusion.confident.confidence", [0.0, -0.5, 1.01, math.nan, math.inf, -math.inf]),
        ("diffusion.entropy_bound.bound", [-1e-9, -1.0, math.nan, math.inf, -math.inf]),
        ("diffusion.learned.threshold", [0.0, -0.5, math.nan, math.inf, -math.inf]),
        ("diffusion.early_commit.learned.threshold", [0.0, -0.5, math.nan, math.inf, -math.inf]),
        ("diffusion.dkv_greedy.refresh", [0]),
        ("diffusion.early_commit.early", [math.nan]),
        ("diffusion.early_commit.middle", [math.nan]),
        ("diffusion.early_commit.late", [math.nan]),
        ("diffusion.early_commit.threshold.confidence", [0.0, -0.5, math.nan, math.inf, -math.inf]),
        ("diffusion.early_commit.factor.factor", [0.0, -1.0, math.nan, math.inf, -math.inf]),
        ("diffusion.early_commit.confident.confidence", [0.0, -0.5, 1.01, math.nan, math.inf, -math.inf]),
        ("diffusion.early_commit.entropy_bound.bound", [-1e-9, math.nan, math.inf, -math.inf]),
        ("sampling.min_p", [-0.01, 1.01, math.nan, math.inf, -math.inf]),
        ("sampling.repetition_penalty", [0.0, -1.0, math.nan, math.inf, -math.inf]),
        ("diffusion.cfg_scale", [-0.01, 100.01, math.nan, math.inf, -math.inf]),
        ("sampling.stop", [["x"] * 17]),
        ("sampling.stop[0]", [["x" * 1025], [""]]),
    ],
)
def test_ranges(field: str, values: list[Any]) -> None:
    for value in values:
        nested: Any = value
        for name in reversed(field.partition("[")[0].split(".")):
            nested = {name: nested}
        assert wrong(**nested) == [field]


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([], ["messages"]),
        ([{"role": "ROLE_USER", "parts": [{}] * (1 << 14)}], ["messages"]),
        ([{}] * ((1 << 14) + 1), ["messages"]),
        ([{"role": "ROLE_ASSISTANT", "tool_calls": [CALL] * (1 << 12)}, USER], ["messages"]),
        ([{"parts": [{"text": "x"}]}], ["messages[0].role"]),
        ([{"role": 77, "parts": [{"text": "x"}]}], ["messages[0].role"]),
        ([{"role": "ROLE_USER"}], ["messages[0].parts"]),
        (
            [USER, {"role": "ROLE_ASSISTANT", "tool_calls": [CALL]}],
            ["messages[1].tool_calls"],
        ),
        ([USER, {"role": "ROLE_USER", "parts": [{"text": "x"}, {}]}], ["messages[1].parts[1]"]),
        ([{"role": "ROLE_USER", "parts": [{"text": "x"}, {"image": {}}]}], ["messages[0].parts[1].image"]),
        ([{"role": "ROLE_USER", "parts": [{"image": {"data": b""}}]}], ["messages[0].parts[0].image.data"]),
        ([{"role": "ROLE_USER", "parts": [{"image": {"data": b"1" * 101}}]}], ["messages[0].parts[0].image.data"]),
        ([{"role": "ROLE_USER", "parts": [{"image": {"media_id": "x"}}]}], ["messages[0].parts[0].image.media_id"]),
        ([{"role": "ROLE_USER", "parts": [{"image": {"data": b"1"}}] * 3}], ["messages"]),
        ([{"role": "ROLE_USER", "parts": [{"text": "x"}, {"video": {}}]}], ["messages[0].parts[1].video"]),
        ([{"role": "ROLE_USER", "parts": [{"video": {"data": b""}}]}], ["messages[0].parts[0].video.data"]),
        ([{"role": "ROLE_USER", "parts": [{"video": {"data": b"1" * 101}}]}], ["messages[0].parts[0].video.data"]),
        ([{"role": "ROLE_USER", "parts": [{"video": {"media_id": "x"}}]}], ["messages[0].parts[0].video.media_id"]),
        ([{"role": "ROLE_USER", "parts": [{"video": {"data": b"1"}}] * 3}], ["messages"]),
        (
            [{"role": "ROLE_USER", "parts": [{"video": {"data": b"1"}}] * 2 + [{"image": {"data": b"1"}}] * 2}, {}],
            ["messages[1].role", "messages[1].parts"],
        ),
    ],
)
def test_messages(messages: list[Any], fields: list[str]) -> None:
    assert wrong(messages=messages) == fields


def test_all_violations_at_once() -> None:
    assert wrong(
        messages=[{"parts": [{}]}, USER],
        sampling={"temperature": -1.0, "top_p": 2.0, "stop": ["ok", ""]},
        diffusion={"steps": 0, "threshold": {"confidence": 0.0}},
    ) == [
        "messages[0].role",
        "messages[0].parts[0]",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.stop[1]",
        "diffusion.steps",
        "diffusion.threshold.confidence",
    ]


def test_all_violations_of_policies_and_of_the_base_at_once() -> None:
    assert wrong(
        sampling={"min_p": 2.0, "repetition_penalty": 0.0},
        diffusion={
            "block_length": 0,
            "dkv_greedy": {"refresh": 0, "window": 0},
            "early_commit": {"early": math.nan, "late": math.nan, "threshold": {"confidence": 0.0}},
        },
    ) == [
        "sampling.min_p",
        "sampling.repetition_penalty",
        "diffusion.block_length",
        "diffusion.dkv_greedy.refresh",
        "diffusion.early_commit.early",
        "diffusion.early_commit.late",
        "diffusion.early_commit.threshold.confidence",
    ]


EVERYTHING = model_info(recompute_policies=FULL_ATTENTION, commit_policies=DIFFUSION_COMMIT)
BASES: list[tuple[dict[str, Any], Policy]] = [
    ({"low_confidence": {}}, Policy(name="low_confidence")),
    ({"random": {}}, Policy(name="random")),
    ({"threshold": {}}, Policy(name="threshold")),
    ({"threshold": {"confidence": 1.5}}, Policy(name="threshold", options={"confidence": 1.5})),
    ({"factor": {"factor": 0.5}}, Policy(name="factor", options={"factor": 0.5})),
    ({"confident": {"confidence": 1.0}}, Policy(name="confident", options={"confidence": 1.0})),
    ({"entropy_bound": {"bound": 0.0}}, Policy(name="entropy_bound", options={"bound": 0.0})),
    ({"learned": {}}, Policy(name="learned")),
    ({"learned": {"end_of_text": False}}, Policy(name="learned", options={"end_of_text": False})),
]


@pytest.mark.parametrize(
    ("message", "policy"),
    [
        ({"no_cache": {}}, Policy(name="none")),
        ({"prefix": {}}, Policy(name="prefix")),
        ({"dual": {}}, Policy(name="dual")),
        ({"dkv_decode": {"refresh": 4}}, Policy(name="dkv_decode", options={"refresh": 4})),
        ({"dkv_greedy": {}}, Policy(name="dkv_greedy")),
        ({"dkv_greedy": {"window": 0}}, Policy(name="dkv_greedy", options={"window": 0})),
        (
            {"dkv_greedy": {"refresh": 2**32 - 1, "window": 9}},
            Policy(name="dkv_greedy", options={"refresh": 2**32 - 1, "window": 9}),
        ),
        ({"free_cache": {}}, Policy(name="free_cache")),
    ],
)
def test_recompute_policies(message: dict[str, Any], policy: Policy) -> None:
    diffusion = build(EVERYTHING, diffusion=message).diffusion
    assert diffusion == Diffusion(recompute=policy)
    recompute_policy(build(EVERYTHING, diffusion=message))


@pytest.mark.parametrize(("message", "policy"), BASES)
def test_commit_policies_alone_and_as_a_base(message: dict[str, Any], policy: Policy) -> None:
    request = build(EVERYTHING, diffusion=message)
    assert request.diffusion == Diffusion(commit=policy)
    commit_policy(request, Offered(commit_filter=sure_above(0.5)))
    numbers = {"early": math.inf, "late": -math.inf, "answer_start": 3, "answer_length": 13}
    request = build(EVERYTHING, diffusion={"early_commit": {**numbers, **message}})
    assert request.diffusion == Diffusion(commit=Policy(name="early_commit", options=numbers, base=policy))
    commit_policy(request, Offered(commit_filter=sure_above(0.5)))
    assert build(EVERYTHING, diffusion={"early_commit": message}).diffusion.commit == Policy(
        name="early_commit", base=policy
    )


@pytest.mark.parametrize(("start", "length"), [(0, 65), (60, 5), (64, 1), (2**32 - 1, 2**32 - 1)])
def test_an_answer_that_is_not_on_the_canvas_is_refused(start: int, length: int) -> None:
    answer = {"answer_start": start, "answer_length": length}
    with pytest.raises(InvalidArgument) as caught:
        build(EVERYTHING, sampling={"max_new_tokens": 64}, diffusion={"early_commit": answer})
    assert [v.field for v in caught.value.violations] == ["diffusion.early_commit.answer_length"]


def test_early_commit_without_a_base_has_none() -> None:
    request = build(EVERYTHING, diffusion={"early_commit": {"middle": 0.0}})
    assert request.diffusion.commit == Policy(name="early_commit", options={"middle": 0.0})
    commit_policy(request, Offered())


def test_policies_that_no_engine_knows() -> None:
    for diffusion, field in (
        (Diffusion(recompute=Policy(name="sometimes")), "diffusion.recompute"),
        (Diffusion(commit=Policy(name="never")), "diffusion.commit"),
        (Diffusion(commit=Policy(name="early_commit", base=Policy(name="never"))), "diffusion.early_commit.base"),
        (Diffusion(commit=Policy(name="threshold", options={"bound": 1.0})), "diffusion.threshold"),
    ):
        request = dataclasses.replace(build(EVERYTHING), diffusion=diffusion)
        with pytest.raises(InvalidArgument) as caught:
            recompute_policy(request)
            commit_policy(request, Offered())
        assert [v.field for v in caught.value.violations] == [field]


def test_the_sampling_fields_and_tokens() -> None:
    request = build(sampling={"min_p": 0.25, "repetition_penalty": 1.5}, stream={"tokens": True})
    assert request.sampling == Sampling(min_p=0.25, repetition_penalty=1.5)
    changed = build(sampling={"frequency_penalty": -0.5, "presence_penalty": 2.0, "logit_bias": {7: 1.5}})
    assert changed.sampling == Sampling(frequency_penalty=-0.5, presence_penalty=2.0, logit_bias={7: 1.5})
    assert wrong(sampling={"frequency_penalty": 2.5, "logit_bias": {7: 101.0}}) == [
        "sampling.frequency_penalty",
        "sampling.logit_bias",
    ]
    assert wrong(sampling={"logit_bias": dict.fromkeys(range(1025), 0.5)}) == ["sampling.logit_bias"]
    assert request.streaming == Streaming(tokens=True)
    for edge in ({"min_p": 0.0}, {"min_p": 1.0}, {"repetition_penalty": 0.01}, {"repetition_penalty": 100.0}):
        assert build(sampling=edge).sampling == Sampling(**edge)
    assert not build().streaming.tokens


def test_samples_of_a_request_and_of_its_events() -> None:
    assert build().sampling.n == 1
    assert build(sampling={"n": 7}).sampling.n == 7
    assert wrong(sampling={"n": 0}) == ["sampling.n"]
    done = Finished("end", "t", Usage(1, 0, 1), 1, 1, StageTimes(), sample=3)
    for event in (Delta("x", 2), Snapshot("▒", 0, 1, 1, 0, 5), done):
        message = to_response(event, "id")
        assert message.sample == event.sample
        assert from_response(message) == event
    assert to_response(Admitted(4), "id").sample == 0


def test_the_models_own_image_limit_counts_too() -> None:
    images = [{"role": "ROLE_USER", "parts": [{"image": {"data": b"1"}}] * 2}]
    assert len(build(messages=images).messages[0].parts) == 2
    with pytest.raises(InvalidArgument, match="at most 1 images"):
        build(model_info(max_images=1), messages=images)


def test_the_models_own_video_limit_counts_too() -> None:
    videos = [{"role": "ROLE_USER", "parts": [{"video": {"data": b"1"}}] * 2}]
    assert build(messages=videos).messages[0].parts == (VideoPart(b"1"), VideoPart(b"1"))
    with pytest.raises(InvalidArgument, match="at most 1 videos, not 2"):
        build(model_info(max_videos=1), messages=videos)


def test_videos_by_media_id_in_order_with_other_parts() -> None:
    store = MediaStore(1000)
    media_id = store.put(b"uploaded").media_id
    parts = [{"video": {"media_id": media_id}}, {"image": {"data": b"i"}}, {"text": "t"}, {"video": {"data": b"v"}}]
    found = build(store=store, messages=[{"role": "ROLE_USER", "parts": parts}]).messages[0].parts
    assert found == (VideoPart(b"uploaded"), ImagePart(b"i"), TextPart("t"), VideoPart(b"v"))


def test_missing_media_and_capabilities() -> None:
    lost = [{"role": "ROLE_USER", "parts": [{"image": {"media_id": "sha256:" + "0" * 64}}]}]
    with pytest.raises(NotFound, match="sha256:000"):
        build(messages=lost)
    text_only = model_info(images=False, max_images=0, recompute_policies=("none",), commit_policies=())
    with pytest.raises(Unimplemented, match="images"):
        build(text_only, messages=lost)
    clip = [{"role": "ROLE_USER", "parts": [{"video": {"data": b"1"}}]}]
    with pytest.raises(Unimplemented, match="model 'echo' takes no videos"):
        build(model_info(videos=False, max_videos=0, frames_per_video=0), messages=clip)
    with pytest.raises(Unimplemented, match="recompute policy 'dkv_decode'; it has none"):
        build(text_only, diffusion={"dkv_decode": {}})
    with pytest.raises(Unimplemented, match="commit policy 'low_confidence'"):
        build(text_only, diffusion={"no_cache": {}, "low_confidence": {}})


def test_pruners_and_their_amounts() -> None:
    assert build().vision == Vision()
    assert build(vision={"none": {}}).vision == Vision()
    for name in (f.name for f in pb.VisionParams.DESCRIPTOR.oneofs_by_name["pruner"].fields if f.name != "none"):
        found = build(vision={name: {}, "token_budget": 7}).vision
        assert found == Vision(pruner=name, amount=Amount("token_budget", 7)) and name in PRUNERS
    assert build(vision={"column_attention": {}, "attention_mass": 1.0}).vision.amount == Amount("attention_mass", 1.0)
    for amount in ({"keep_ratio": 0.0}, {"keep_ratio": 1.5}, {"attention_mass": float("nan")}, {"token_budget": 0}):
        assert wrong(vision={"random": {}, **amount}) == [f"vision.{next(iter(amount))}"]


def test_pixels_of_images_and_videos() -> None:
    named = {"min_pixels": 3, "max_pixels": 9, "video_max_pixels": 1 << 40}
    assert build(vision=named).vision == Vision(images=PixelRange(3, 9), videos=PixelRange(None, 1 << 40))
    for name in ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels"):
        assert wrong(vision={name: 0}) == [f"vision.{name}"] == wrong(vision={name: (1 << 64) - 1})
    assert wrong(vision={"min_pixels": 4, "max_pixels": 3}) == ["vision.min_pixels"]
    assert wrong(vision={"video_min_pixels": 4, "video_max_pixels": 3}) == ["vision.video_min_pixels"]
    assert build(vision={"min_pixels": 4, "video_max_pixels": 3}).vision.videos == PixelRange(None, 3)


def test_reductions_and_their_numbers() -> None:
    assert build().kv_reduction is None
    found = build(kv_reduction={"heavy_hitters": {"budget": 9, "recent": 0.0}}).kv_reduction
    assert found == Policy(name="heavy_hitters", options={"budget": 9, "recent": 0.0})
    found = build(kv_reduction={"visual_cache": {"budget": 2}}).kv_reduction
    assert found == Policy(name="visual_cache", options={"budget": 2})
    assert wrong(kv_reduction={}) == ["kv_reduction"]
    for name, field, value in (
        ("heavy_hitters", "recent", 1.5),
        ("expected_attention", "future", 0),
        ("expected_attention", "future", 1 << 17),
        ("visual_cache", "outputs", 0),
    ):
        assert wrong(kv_reduction={name: {"budget": 9, field: value}}) == [f"kv_reduction.{name}.{field}"]


def test_reuses_and_their_numbers() -> None:
    assert build().image_reuse is None
    found = build(image_reuse={"blend": {"recompute": 0.0, "layers": 4}}).image_reuse
    assert found == Policy(name="blend", options={"recompute": 0.0, "layers": 4})
    assert build(image_reuse={"lego_link": {}}).image_reuse == Policy(name="lego_link")
    assert wrong(image_reuse={}) == ["image_reuse"]
    for name in ("blend", "kv_share", "lego_link", "random_reuse"):
        for value in (-0.1, 1.1, float("nan")):
            assert wrong(image_reuse={name: {"recompute": value}}) == [f"image_reuse.{name}.recompute"]
    assert wrong(image_reuse={"blend": {"layers": 1}}) == ["image_reuse.blend.layers"]
    found = build(image_reuse={"kv_share": {"each_step": 0}}).image_reuse
    assert found == Policy(name="kv_share", options={"each_step": 0})
    for field, value in (("layers", 1), ("each_step", 65)):
        assert wrong(image_reuse={"kv_share": {field: value}}) == [f"image_reuse.kv_share.{field}"]


EVENTS = [
    Admitted(3),
    Snapshot("a▒", 1, 2, 1),
    Delta("é"),
    Prefilled(Usage(5, 2, 0, 3, 9, 8, 6)),
    Prefilled(Usage(2, 0, 0), prompt_ids=(1, 2**32 - 1), prompt_text="é"),
    Prefilled(Usage(2, 0, 0), prompt_tokens=(PromptToken(1, "a"), PromptToken(2, "b", -0.5, 3, (), b"b"))),
    Finished("stop", "é", Usage(5, 2, 4, 3, 9, 8, 6), 2, 99, StageTimes(1, 2, 3, 4, 5, 6), ("w", "v"), stop="."),
    Finished("length", "", Usage(1, 0, 0), 0, 0, StageTimes()),
    Finished(
        "length",
        "",
        Usage(1, 0, 4),
        2,
        9,
        StageTimes(),
        tool_calls=(ToolCall("call_1", "f", '{"a": 1}'),),
        cut_call=ToolCall("call_2", "g", '{"b": "c'),
    ),
    Finished(
        "end",
        "aé",
        Usage(5, 0, 2),
        2,
        9,
        StageTimes(),
        tokens=(
            CommittedToken(7, "a", -0.25, 2, (Alternative(8, "b", -1.5, b"b"),), b"a"),
            CommittedToken(2**32 - 1, "\N{REPLACEMENT CHARACTER}", -87.5, 1, (), b"\xe2\x80"),
        ),
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events_there_and_back(event: Any) -> None:
    assert from_response(to_response(event, "r")) == event


def test_odd_events() -> None:
    assert to_response(Admitted(0), "r").admitted.request_id == "r"
    assert to_response(EVENTS[6], "r").finished.tokens_per_forward == 2.0
    with pytest.raises(TypeError):
        to_response(Failed(Cancelled("x")), "r")
    with pytest.raises(Internal, match="does not know"):
        from_response(pb.GenerateResponse())


def test_model_info_there_and_back() -> None:
    info = model_info()
    assert from_model_info(to_model_info(info)) == info


@given(st.binary(max_size=300))
def test_no_message_crashes_it(data: bytes) -> None:
    message = pb.GenerateRequest()
    try:
        message.MergeFromString(data)
    except Exception:  # noqa: BLE001 - not a message at all
        return
    with contextlib.suppress(InvalidArgument, NotFound, Unimplemented):
        to_request(message, request_id="i", info=model_info(), limits=LIMITS, media=MediaStore(1).get, deadline=None)
