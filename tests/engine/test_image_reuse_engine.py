"""Requests that reuse images' K/V: one answer, whatever is kept, shared or run beside them; refusals."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import PATIENCE, Bench, Call, eventually
from helpers import ask, picture, tiny_model
from plain_reuse import with_three_layers
from reusing import ONE, PARTS, TWO, requests, rule, say, told

from mmserve.config import EncoderCacheConfig
from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.events import Finished
from mmserve.core.request import ImagePart, Policy, Stage, TextPart
from mmserve.decode import runner
from mmserve.decode.extensions.base import extension_of
from mmserve.decode.extensions.image_reuse import image_kv, reuse
from mmserve.decode.extensions.image_reuse.reuse import ImageKVReuse
from mmserve.errors import Cancelled, FailedPrecondition, InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel
from mmserve.tiers.caches import Caches

Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    return with_three_layers(tiny_model(vision=True))


def test_answers_do_not_depend_on_what_is_kept_nor_on_company(bench: Make, causal: LoadedModel) -> None:
    """Cold and warm, without room to keep anything, in chunks, with shared pages, alone and together."""
    nothing = Caches.of(EncoderCacheConfig(kv_bytes=0))
    cold = bench(causal, cache=nothing, prefix_cache=False, stages="inline")
    expected = {r.id: told(cold.ask(r)) for r in requests()}
    assert len({e[-1] for e in expected.values()}) > 10, "rules differ"
    assert (cold.engine.stats().kv_cache.entries, cold.engine.stats().kv_cache.hits > 0) == (0, True), (
        "one twice in one"
    )
    together = bench(causal)
    for _round in range(2):
        calls = together.submit_together(*requests())
        assert {call.request.id: told(call.finished()) for call in calls} == expected
    assert max(map(len, together.batches)) > 4
    assert together.engine.stats().kv_cache.made == 3, "each image once"
    chunked = bench(causal, prefill_tokens=8, stages="inline")
    assert {r.id: told(chunked.ask(r)) for r in reversed(requests())} == expected
    for b in (together, chunked):
        b.await_nothing_left()


@pytest.mark.parametrize("prefill_tokens", [1, 24, 4096])
def test_many_at_once_with_the_same_new_images_make_the_kv_of_each_once(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch, prefill_tokens: int
) -> None:
    """However much prefill takes at a time: less than a prompt, some of them, all of them."""
    b = bench(causal, prefill_tokens=prefill_tokens, prefix_cache=False)
    layers: list[int] = []
    real = image_kv.kv_alone

    def watched(*given: Any, **named: Any) -> Any:
        for of_layer in real(*given, **named):
            layers.append(len(of_layer[0]))
            yield of_layer

    monkeypatch.setattr(image_kv, "kv_alone", watched)
    gate = b.gate("encode")
    by = rule("lego_link", 0.3)
    calls = b.submit(*(say(f"{i} {j}", parts, by) for i in range(2) for j, parts in enumerate(PARTS)))
    gate.open()
    assert all(call.finished().usage.reused_tokens for call in calls)
    assert len(layers) == 3 * 3, "three images of three layers, for sixteen that are shown"
    b.await_nothing_left()


def test_usage_tells_what_was_not_run(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal, prefix_cache=False)
    for i, (parts, images) in enumerate(zip(PARTS, (1, 2, 3, 2), strict=True)):
        plain, half = (b.ask(say(f"{i} {by}", parts, by)) for by in (None, rule("blend", 0.5)))
        assert (plain.usage.reused_tokens, half.usage.reused_tokens) == (0, 2 * images)
        assert plain.recomputed_tokens - half.recomputed_tokens == 2 * images
        assert plain.usage.prompt_tokens == half.usage.prompt_tokens


def test_running_everything_again_is_plain_prefill_to_the_last_bit(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal)
    rest = ((1, "kv_share"), (1, "lego_link"), (2, "random_reuse"))
    for i, name in (*((i, "blend") for i in range(4)), *rest):
        plain, again = (b.ask(say(f"{i} {name} {by}", PARTS[i], by)) for by in (None, rule(name, 1.0)))
        assert told(plain) == told(again)
    assert b.engine.stats().kv_cache.lookups == 0
    assert b.engine.stats().prefix_hits > 0, "its pages are shared as any other's"


@pytest.mark.parametrize(("first", "by"), [("plain", "blend"), ("blended", "blend"), ("blended", "kv_share")])
def test_no_page_behind_an_image_is_shared_with_exact_ones(
    bench: Make, causal: LoadedModel, first: str, by: str
) -> None:
    """What stands in front of the first image is: that is the same either way."""
    text, images = TextPart("a long line of text stands in front of both of them, page after page. "), (ONE, TWO)
    asked = {
        "plain": say("plain", (text, *images, TextPart("what is left of the circle?")), None),
        "blended": say("blended", (text, *images, TextPart("what is left of the circle?")), rule(by, 0.2)),
    }
    alone = bench(causal, prefix_cache=False)
    expected = {name: told(alone.ask(r)) for name, r in asked.items()}
    assert expected["plain"][0] != expected["blended"][0] or expected["plain"][-1] != expected["blended"][-1]
    b = bench(causal)
    [second] = {"plain", "blended"} - {first}
    done = {name: b.ask(asked[name]) for name in (first, second)}
    assert {name: told(d) for name, d in done.items()} == expected
    before = b.ask(say("text", (text,), None)).usage
    assert 0 < done[second].usage.cached_tokens <= before.prompt_tokens
    twice = b.ask(dataclasses.replace(asked["blended"], id="again"))
    assert twice.usage.cached_tokens == done[second].usage.cached_tokens and told(twice) == expected["blended"]
    whole = b.ask(dataclasses.replace(asked["plain"], id="whole"))
    assert whole.usage.cached_tokens > twice.usage.cached_tokens and told(whole) == expected["plain"]


def test_what_is_kept_stays_within_its_bytes(bench: Make, causal: LoadedModel) -> None:
    size = 2 * 3 * 4 * 2 * 16 * 4  # keys and values: layers, positions, heads, head size, fp32
    cache = Caches.of(EncoderCacheConfig(kv_bytes=2 * size + 100))
    b = bench(causal, cache=cache, stages="inline")
    first = [told(b.ask(say(f"{i}", (ImagePart(picture(i)), TextPart("?")), rule("blend", 0.0)))) for i in range(5)]
    stats = b.engine.stats().kv_cache
    assert (stats.made, stats.entries, stats.used_bytes, stats.evicted) == (5, 2, 2 * size, 3)
    again = [told(b.ask(say(f"{i}", (ImagePart(picture(i)), TextPart("?")), rule("blend", 0.0)))) for i in range(5)]
    assert first == again and cache.kv.stats().used_bytes == 2 * size


def test_two_models_over_one_cache_never_meet(bench: Make, causal: LoadedModel) -> None:
    """The same image, the same tower: what other decoders made of it is not theirs."""
    other = dataclasses.replace(causal, decoder=copy.deepcopy(causal.decoder))
    other.decoder.layers[1].v_proj.weight.neg_()
    request, cache = say("r", PARTS[1], rule("lego_link", 0.0)), Caches.of(EncoderCacheConfig())
    expected = [told(bench(m).ask(request)) for m in (causal, other)]
    shared = [bench(m, cache=cache) for m in (causal, other)]
    assert [told(b.ask(request)) for b in shared] == expected and expected[0][0] != expected[1][0]
    assert cache.kv.stats().made == 4


def test_samples_constraints_and_drafts(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal, max_samples=4)
    request = say("n", PARTS[1], rule("blend", 0.3), n=3, temperature=1.0, seed=4)
    [call] = b.submit(request)
    eventually(lambda: len([e for e in call.events if isinstance(e, Finished)]) == 3, "three samples")
    ended = [e for e in call.events if isinstance(e, Finished)]
    assert {e.usage.reused_tokens for e in ended} == {5} and len({e.text for e in ended}) > 1
    greedy = say("g", PARTS[2], rule("blend", 0.3), max_new_tokens=16)
    drafted = dataclasses.replace(greedy, diffusion=dataclasses.replace(greedy.diffusion, commit=Policy(name="ngram")))
    assert b.ask(greedy).text == b.ask(drafted).text
    ending = dataclasses.replace(
        causal, spec=dataclasses.replace(causal.spec, end_ids=tiny_model(vision=False).spec.end_ids)
    )
    done = bench(ending).ask(dataclasses.replace(greedy, constraint=ConstraintSpec(kind=Regex("[0-9]{3}"))))
    assert done.text.isdigit() and done.usage.reused_tokens == 8


def test_running_decodes_wait_for_a_chunk_of_what_comes_before_a_pass(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that are run alone, and the prompt that is looked at: no more than a chunk, and the layer it ends in."""
    b = bench(causal, stages="inline", prefill_tokens=8, prefix_cache=False)
    ran: list[tuple[str, int]] = []
    alone, load, decode = image_kv.kv_alone, b.engine.stages.encoding.load, b.engine.stages.decoding.decode
    loaded = threading.Event()

    def watched(decoder: Any, x: torch.Tensor, *given: Any, **named: Any) -> Any:
        for of_layer in alone(decoder, x, *given, **named):
            ran.append(("layer", len(x)))
            yield of_layer

    def watched_load(batch: Any, *given: Any) -> Any:
        try:
            return load(batch, *given)
        finally:
            loaded.set()

    def watched_decode(batch: Any) -> Any:
        assert loaded.wait(PATIENCE), "the short one decodes while the long one is prefilled"
        ran.append(("decode", 0))
        return decode(batch)

    for module in (image_kv, reuse):  # of images alone, and of the prompt that is looked at
        monkeypatch.setattr(module, "kv_alone", watched)
    monkeypatch.setattr(b.engine.stages.encoding, "load", watched_load)
    monkeypatch.setattr(b.engine.stages.decoding, "decode", watched_decode)
    parts = (TextPart("a line of text. " * 3), ONE, TWO, ONE, TextPart("what?"))
    calls = b.submit(
        say("short", (TextPart("?"),), None, max_new_tokens=40),
        say("long", parts, Policy(name="blend", options={"recompute": 0.3, "layers": 3})),
    )
    assert [call.finished().usage.reused_tokens for call in calls] == [0, 8]
    longest = max(rows for _name, rows in ran)
    begun = next(i for i, (name, _rows) in enumerate(ran) if name == "decode")
    between, most = 0, 0
    for name, rows in ran[begun:]:
        between = between + rows if name == "layer" else 0
        most = max(most, between)
    assert longest > 8 * 3, "a look by itself is more than a chunk"
    assert 0 < most < 8 * 3 + longest and sum(name == "layer" for name, _rows in ran) == 3 * 3
    b.await_nothing_left()


def test_a_template_without_a_place_for_images_is_refused_with_a_typed_error(bench: Make, causal: LoadedModel) -> None:
    """The template may have a place for an image only beside a text, where the prompt itself is fine."""
    for template, why in (
        (
            "{% for m in messages %}{{ m.content[0].text }}{% if m.content[0].text %}<image>{% endif %}{% endfor %}",
            "takes no",
        ),
        ("{% if not messages[0].content[0].text %}{{ raise_exception('text first') }}{% endif %}<image>?", "takes no"),
    ):
        tokenizer = copy.deepcopy(causal.tokenizer)
        tokenizer.chat_template = template
        b = bench(dataclasses.replace(causal, tokenizer=tokenizer))
        parts = (TextPart("what is this: <image>?"), ONE)
        assert b.ask(say("plain", parts, None)).usage.visual_tokens == 4
        [call] = b.submit(say("r", parts, rule("blend", 0.3)))
        error = call.error()
        assert isinstance(error, FailedPrecondition) and why in str(error)
        b.await_nothing_left()


def test_a_pass_that_failed_is_repeated_with_the_same_answers(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, asked = bench(causal, stages="inline", prefix_cache=False, prefill_tokens=16), requests()[::3]
    expected = {r.id: told(b.ask(r)) for r in asked}
    real, failed = runner.forward, []

    def poisoned(model: LoadedModel, store: Any, batch: list[Any], floor: int, **options: Any) -> Any:
        found = real(model, store, batch, floor, **options)
        if len(batch) > 1:
            failed.append(len(batch))
            raise RuntimeError("only alone")
        return found

    monkeypatch.setattr(runner, "forward", poisoned)
    assert {call.request.id: told(call.finished()) for call in b.submit(*asked)} == expected and failed


def test_an_image_whose_kv_cannot_be_made_fails_its_own_request(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(causal)
    images = extension_of(b.engine.stages.decoder.parts.extensions, ImageKVReuse).images
    make = images._make
    monkeypatch.setattr(images, "_make", lambda encoded, span: 1 / 0 if len(encoded.spans) > 1 else make(encoded, span))
    calls: list[Call] = b.submit(*(say(f"{i}", PARTS[i], rule("blend", 0.3)) for i in (0, 1)))
    assert calls[0].finished().usage.reused_tokens == 2
    assert type(calls[1].error()).__name__ == "Internal"
    b.await_nothing_left()


def test_a_cancelled_request_leaves_nothing(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal)
    gate = b.gate("prefill")
    [call] = b.submit(say("x", PARTS[2], rule("blend", 0.3)))
    gate.wait()
    assert b.stage("x") is Stage.PREFILLING
    b.engine.cancel("x")
    gate.open()
    assert isinstance(call.error(), Cancelled)
    b.await_nothing_left()


def test_a_request_between_two_chunks_before_its_pass_holds_its_pages_and_gives_them_back(
    bench: Make, causal: LoadedModel
) -> None:
    """It goes on though there are too few pages for another like it, and it can be cancelled."""
    parts = (TextPart("a line of text. " * 3), *PARTS[2])
    for cancelled in (False, True):
        b = bench(causal, prefill_tokens=8, prefix_cache=False, pages=16)
        calls_before: list[int] = []

        def second(_ids: set[str], seen: list[int] = calls_before) -> bool:
            seen.append(len(seen))
            return len(seen) == 2

        gate = b.gate("prefill", second)
        [call] = b.submit(say("x", parts, rule("blend", 0.3)))
        gate.wait()
        assert b.engine.stats().pages_in_use > 8
        if cancelled:
            b.engine.cancel("x")
        gate.open()
        assert isinstance(call.error(), Cancelled) if cancelled else call.finished().usage.reused_tokens == 8
        b.await_nothing_left()


def test_what_cannot_be_is_refused_at_once(bench: Make, causal: LoadedModel) -> None:
    def refused(kind: type[Exception], why: str, model: LoadedModel | None = causal, **changes: Any) -> None:
        b = bench(model, **{k: v for k, v in changes.items() if k in ("kv_bits", "sparse_decode", "page_size")})
        assert (kind is Unimplemented) == (b.engine.info.image_reuses == ()), "what it says of itself"
        request = say("r", PARTS[1], rule("blend", 0.3))
        fields = {k: v for k, v in changes.items() if k in ("diffusion", "kv_reduction", "image_reuse")}
        with pytest.raises(kind, match=why):
            b.submit(dataclasses.replace(request, **fields))

    blocks = dataclasses.replace(causal.spec, attention=Attention.BLOCK_CAUSAL, logit_shift=0)
    by_blocks = say("b", PARTS[1], None, recompute=Policy(name="block"), block=8).diffusion
    refused(Unimplemented, "block-causal", dataclasses.replace(causal, spec=blocks), diffusion=by_blocks)
    blind = dataclasses.replace(causal, vision=None)
    refused(Unimplemented, "it takes no images", blind)
    refused(Unimplemented, r"the server has \[engine\] sparse_\* or kv_bits", kv_bits=8)
    refused(Unimplemented, r"sparse_\* or kv_bits", sparse_decode="quest", page_size=16)
    refused(InvalidArgument, "must be 'last' with image_reuse", diffusion=ask("r").diffusion)
    budget = Policy(name="sink_window", options={"budget": 20})
    refused(InvalidArgument, "must not be set with image_reuse", kv_reduction=budget)
    refused(InvalidArgument, "there is no policy 'merge'", image_reuse=Policy(name="merge"))
    accompanied = dataclasses.replace(causal, companion=causal)
    commit = dataclasses.replace(say("r", PARTS[1], None).diffusion, commit=Policy(name="draft_model"))
    refused(InvalidArgument, "must not be a policy with a companion model", accompanied, diffusion=commit)
