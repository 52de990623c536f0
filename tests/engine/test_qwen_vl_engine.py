"""Qwen's vision models through the engine: transformers' own tokens, whoever else is there and whatever is shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from clips import clip
from harness import Bench, Call
from helpers import ask, picture
from qwen_vl_checkpoints import KINDS, Qwen

from mmserve.core.request import Amount, ImagePart, Message, Part, Policy, Request, TextPart, VideoPart, Vision
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.models.companion import accompany

Make = Callable[..., Bench]
NONE, LAST = Policy(name="none"), Policy(name="last")
FILE = clip(frames=20, rate=4)
WIDE, TALL, SMALL = (picture(i, size) for i, size in enumerate(((40, 30), (20, 48), (9, 11))))
ASKED: dict[str, tuple[Part, ...]] = {
    "none": (TextPart("a red circle"),),
    "one": (ImagePart(WIDE), TextPart("what?")),
    "several": (ImagePart(WIDE), TextPart("and"), ImagePart(TALL), ImagePart(SMALL), TextPart("what?")),
    "video": (VideoPart(FILE), TextPart("when?")),
    "long": (VideoPart(clip(frames=20, rate=1)), TextPart("when?")),
    "both": (ImagePart(TALL), VideoPart(FILE), TextPart("when?")),
}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Qwen:
    return Qwen(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(made: Qwen) -> LoadedModel:
    """With an end of text that no answer meets: answers run to their full length."""
    loaded = made.load()
    return dataclasses.replace(loaded, spec=dataclasses.replace(loaded.spec, end_ids=frozenset({-1})))


def say(name: str, parts: tuple[Part, ...], *, new: int = 8, recompute: Policy = LAST) -> Request:
    asked = ask(name, max_new_tokens=new, recompute=recompute)
    return dataclasses.replace(asked, messages=(Message("user", parts),))


def pruned(request: Request, ratio: float) -> Request:
    return dataclasses.replace(request, vision=Vision(pruner="column_attention", amount=Amount("keep_ratio", ratio)))


def answer(bench: Bench, call: Call) -> list[int]:
    done = call.finished()
    tokens, _committed = bench.canvases[call.request.id]
    return tokens[done.usage.prompt_tokens :].tolist()


def test_greedy_tokens_are_those_of_generate(made: Qwen, model: LoadedModel, bench: Make) -> None:
    b = bench(model, stages="inline")
    said: set[int] = set()
    for name, parts in ASKED.items():
        inputs = made.inputs(say(name, parts), model.tokenizer)
        expected = made.greedy(inputs, 8, model.spec.banned_ids)
        for policy in (LAST, NONE) if name == "both" else (LAST,):
            [call] = b.submit(say(f"{name} {policy.name}", parts, recompute=policy))
            assert answer(b, call) == expected, (name, policy.name)
        said |= set(expected)
    assert len(said) > 15


def test_an_answer_goes_on_behind_the_text(made: Qwen, model: LoadedModel, bench: Make) -> None:
    encoder = bench(model, stages="inline").engine.stages.encoder
    [seen] = encoder.encode([say("long", ASKED["long"])])
    assert seen.places is not None
    last, begins = seen.places[:, -2].tolist(), seen.places[:, -1].tolist()
    latest = int(seen.places[:, :-1].max())
    assert begins == [place + 1 for place in last] and len(set(last)) == 1
    assert (latest > last[0]) == (made.kind == "qwen2_5_vl"), "whose time is in seconds"


def test_a_companion_sees_with_rows_and_columns(model: LoadedModel, bench: Make) -> None:
    """A model that drafts for itself is always right."""
    paired = accompany(model, model)
    b = bench(paired, stages="inline")
    for name in ("several", "both"):
        plain = b.submit(say(name, ASKED[name]))[0]
        asked = say(f"{name} drafted", ASKED[name])
        drafting = dataclasses.replace(asked.diffusion, commit=Policy(name="draft_model", options={"length": 4}))
        drafted = b.submit(dataclasses.replace(asked, diffusion=drafting))[0]
        assert answer(b, drafted) == answer(b, plain)
        assert drafted.finished().forwards <= 3 < plain.finished().forwards


def test_a_batch_equals_alone_and_chunks_and_pages_change_nothing(model: LoadedModel, bench: Make) -> None:
    requests = [say(name, ASKED[name]) for name in ("none", "one", "several", "both")]
    requests += [pruned(say(f"{name} pruned", ASKED[name]), 0.5) for name in ("several", "both")]
    one = bench(model, stages="inline", prefix_cache=False)
    alone = {request.id: answer(one, one.submit(request)[0]) for request in requests}
    assert max(map(len, one.batches)) == 1
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    together, chunked = bench(model), bench(model, stages="inline", prefill_tokens=8)
    for b in (together, chunked):
        calls = (b.submit_together if b is together else b.submit)(*requests)
        assert {call.request.id: answer(b, call) for call in calls} == alone
        b.await_nothing_left()
    assert max(map(len, together.batches)) > 1
    calls = chunked.submit(*(dataclasses.replace(r, id=f"{r.id} again") for r in requests))
    assert {call.request.id.removesuffix(" again"): answer(chunked, call) for call in calls} == alone
    assert all(call.finished().usage.cached_tokens > 0 for call in calls)
    chunked.await_nothing_left()


def test_positions_run_again_beside_tokens_get_what_they_had(model: LoadedModel, bench: Make) -> None:
    """Rows and columns of positions, and features for several layers: where K/V are exact, they stay so."""
    b = bench(model, prefix_cache=False)
    exact = Policy(name="kv_share", options={"recompute": 0.0, "layers": 99, "each_step": 4})
    for name in ("several", "both"):
        asked = say(name, ASKED[name])
        asked = dataclasses.replace(asked, streaming=dataclasses.replace(asked.streaming, tokens=True))
        plain, shared = (b.ask(dataclasses.replace(asked, image_reuse=by)) for by in (None, exact))
        again = shared.recomputed_tokens - (plain.recomputed_tokens - shared.usage.reused_tokens)
        assert again == min(4 * 7, shared.usage.reused_tokens) > 20
        assert [t.id for t in shared.tokens] == [t.id for t in plain.tokens]
        found, expected = ([t.log_probability for t in done.tokens] for done in (shared, plain))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_prefix_with_images_is_shared_by_another_question(model: LoadedModel, bench: Make) -> None:
    seen = (ImagePart(WIDE), TextPart("and"), ImagePart(TALL))
    first, other = (say(name, (*seen, TextPart(name))) for name in ("what is left?", "where is it?"))
    fresh, shared = bench(model, stages="inline"), bench(model, stages="inline")
    expected = answer(fresh, fresh.submit(other)[0])
    shared.submit(first)[0].finished()
    [call] = shared.submit(other)
    assert answer(shared, call) == expected
    assert call.finished().usage.cached_tokens >= 24, "pages of text and of visual tokens"


def test_what_is_told_of_visual_tokens(model: LoadedModel, bench: Make) -> None:
    b = bench(model, stages="inline")
    full = b.ask(say("full", ASKED["both"])).usage
    half = b.ask(pruned(say("half", ASKED["both"]), 0.5)).usage
    whole = b.ask(pruned(say("whole", ASKED["both"]), 1.0)).usage
    assert full.visual_tokens == full.visual_tokens_before == whole.visual_tokens == half.visual_tokens_before
    assert half.visual_tokens == full.visual_tokens // 2
    assert b.canvases["whole"][0].tolist() == b.canvases["full"][0].tolist()


def test_a_picture_of_extreme_shape_is_refused_and_harms_nobody(model: LoadedModel, bench: Make) -> None:
    b = bench(model, stages="inline")
    line = say("line", (ImagePart(picture(1, (402, 2))), TextPart("what?")))
    good, bad = b.submit(say("good", ASKED["one"]), line)
    error = bad.error()
    assert isinstance(error, InvalidArgument) and "200 times the short one" in str(error)
    assert len(answer(b, good)) == 8
    b.await_nothing_left()
