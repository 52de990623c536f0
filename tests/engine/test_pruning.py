"""Pruned requests through the engine: the same answer in any company, with and without caches, and nothing left."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest
from clips import clip, video_model
from harness import Bench
from helpers import ask, dkv, picture, tiny_model

from mmserve.config import EncoderCacheConfig
from mmserve.core.events import Finished
from mmserve.core.request import Amount, Message, Policy, Request, TextPart, VideoPart, Vision
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel
from mmserve.prune import PRUNERS
from mmserve.tiers.caches import Caches

Make = Callable[..., Bench]


def pruned(request: Request, pruner: str, share: float = 0.5) -> Request:
    return dataclasses.replace(request, vision=Vision(pruner=pruner, amount=Amount("keep_ratio", share)))


def told(done: Finished) -> tuple[object, ...]:
    return done.text, done.reason, done.usage, done.forwards, done.recomputed_tokens


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    """A next-token model beside another one, which drafts for it."""
    made, other = tiny_model(vision=True), tiny_model(vision=True, seed=1)
    made, other = (
        dataclasses.replace(
            m, spec=dataclasses.replace(m.spec, attention=Attention.CAUSAL, logit_shift=1, end_ids=frozenset({-1}))
        )
        for m in (made, other)
    )
    return dataclasses.replace(made, companion=other)


def test_to_keep_all_is_to_prune_nothing(bench: Make) -> None:
    b = bench()
    plain = b.ask(ask("plain", images=(picture(1), picture(2))))
    assert (plain.usage.visual_tokens, plain.usage.visual_tokens_before) == (8, 8)
    for name in PRUNERS:
        assert told(b.ask(pruned(ask(name, images=(picture(1), picture(2))), name, 1.0))) == told(plain)
    budget = Vision(pruner="tome", amount=Amount("token_budget", 4))
    assert told(b.ask(dataclasses.replace(ask("r", images=(picture(1), picture(2))), vision=budget))) == told(plain)


def test_pruned_answers_are_the_same_alone_and_together(bench: Make, model: LoadedModel) -> None:
    requests = [
        pruned(
            ask(
                f"{name} {i}",
                images=(picture(i), picture(i + 1)),
                seed=i,
                temperature=0.7 * i,
                recompute=[None, dkv(4), Policy(name="dual"), Policy(name="adaptive")][i],
            ),
            name,
        )
        for name in PRUNERS
        for i in range(4)
    ]
    alone = bench(encode_batch=1, max_running=1)
    expected = [told(alone.ask(r)) for r in requests]
    together = bench()
    calls = together.submit(*requests)
    assert [told(call.finished()) for call in calls] == expected
    for (_text, _reason, usage, _forwards, _rows), request in zip(expected, requests, strict=True):
        assert usage.visual_tokens_before == 8
        assert usage.visual_tokens == 4 or request.vision.pruner in ("mustdrop", "resize")
    assert len({text for text, *_ in expected}) > 4
    together.await_nothing_left()


def test_fewer_tokens_take_fewer_pages(bench: Make) -> None:
    b = bench(page_size=2)
    whole = b.ask(ask("whole", images=tuple(map(picture, range(4)))))
    taken, b.most_pages = b.most_pages, 0
    less = b.ask(pruned(ask("less", images=tuple(map(picture, range(4)))), "random"))
    assert taken - b.most_pages == 4
    assert whole.usage.prompt_tokens - less.usage.prompt_tokens == 8


def test_prefix_pages_are_shared_by_those_pruned_alike(bench: Make, causal: LoadedModel) -> None:
    images, last = tuple(map(picture, range(6))), Policy(name="last")
    long = {"images": images, "recompute": last, "max_new_tokens": 8}
    requests = [ask("plain", **long), *[pruned(ask(n, **long), n) for n in ("cls_attention", "random", "fastv")]]
    cold = bench(causal, prefix_cache=False)
    expected = [(d := cold.ask(r)).text for r in requests]
    assert d.usage.cached_tokens == 0
    warm = bench(causal)
    for again in (False, True):
        for request, text in zip(requests, expected, strict=True):
            done = warm.ask(dataclasses.replace(request, id=f"{request.id} {again}"))
            assert done.text == text
            assert (done.usage.cached_tokens > 20) is again or not again
    assert len(set(expected)) > 2


@pytest.mark.parametrize("chunk", [3, 8])
def test_a_pruned_prompt_may_come_in_chunks(bench: Make, causal: LoadedModel, chunk: int) -> None:
    request = pruned(ask("r", images=tuple(map(picture, range(4))), recompute=Policy(name="last")), "fastv")
    whole = bench(causal).ask(request)
    assert told(bench(causal, prefill_tokens=chunk).ask(request))[:3] == told(whole)[:3]


@pytest.mark.parametrize("name", ["cls_attention", "tome", "resize", "fastv"])
def test_a_companion_sees_the_same_places(bench: Make, causal: LoadedModel, name: str) -> None:
    """Greedy speculation says what the model says alone, pruned or not."""
    b = bench(causal)
    options = {"images": (picture(1), picture(2)), "recompute": Policy(name="last")}
    plain = b.ask(pruned(ask("plain", **options), name))
    drafted = b.ask(pruned(ask("drafted", **options, commit=Policy(name="draft_model")), name))
    assert (drafted.text, drafted.usage.visual_tokens) == (plain.text, plain.usage.visual_tokens)


def test_a_clip_is_pruned_frame_by_frame(bench: Make) -> None:
    b = bench(video_model(stride=1, time="{seconds}s:"))
    request = dataclasses.replace(ask("v"), messages=(Message("user", (VideoPart(clip()), TextPart("when?"))),))
    whole = b.ask(request)
    for name in PRUNERS:
        less = b.ask(dataclasses.replace(pruned(request, name), id=name))
        assert less.usage.visual_tokens_before == whole.usage.visual_tokens == 16
        assert 0 < less.usage.visual_tokens < 16
        assert whole.usage.prompt_tokens - less.usage.prompt_tokens == 16 - less.usage.visual_tokens


def test_what_cannot_be_asked_of_a_model_is_refused_at_once(
    bench: Make, text_model: LoadedModel, causal: LoadedModel
) -> None:
    b = bench()
    with pytest.raises(InvalidArgument, match="there is no pruner 'x'"):
        b.submit(pruned(ask("r"), "x"))
    with pytest.raises(Unimplemented, match="has no pruner 'redvtp'; it has none, random"):
        bench(causal).submit(pruned(ask("r", recompute=Policy(name="last")), "redvtp"))
    with pytest.raises(Unimplemented, match="model 'tiny' has no pruner 'random'; it takes no images"):
        bench(text_model).submit(pruned(ask("r"), "random"))
    blind = tiny_model(vision=True)
    assert blind.vision is not None
    blind.vision.get_submodule("tower.embeddings").class_embedding = None  # as a tower that has none
    del blind.vision.get_submodule("tower.embeddings").class_embedding
    made = bench(blind)
    served = ("none", "random", "resize", "tome", "column_attention", "fastv", "redvtp")
    assert made.engine.info.pruners == served
    with pytest.raises(Unimplemented, match="has no pruner 'cls_attention'; it has none, random"):
        made.submit(pruned(ask("r"), "cls_attention"))


@pytest.fixture
def shared() -> Iterator[Callable[[int], Caches]]:
    yield lambda tokens: Caches.of(EncoderCacheConfig(token_bytes=tokens))


def test_two_engines_with_one_cache_encode_an_image_once(
    bench: Make, model: LoadedModel, shared: Callable[[int], Caches]
) -> None:
    """Their encode workers are two threads: one of them encodes, the other waits for it."""
    cache = shared(1 << 20)
    engines = [bench(cache=cache), bench(cache=cache)]
    gates = [b.gate("encode") for b in engines]
    calls = [b.submit(ask("r", images=(picture(1),)))[0] for b in engines]
    for gate in gates:
        gate.wait()
    for gate in gates:
        threading.Thread(target=gate.open).start()
    first, second = (told(call.finished()) for call in calls)
    stats = engines[0].engine.stats().token_cache
    assert first == second and (stats.made, stats.lookups) == (1, 2)
    assert stats == engines[1].engine.stats().token_cache and stats.hits + stats.joined == 1


@pytest.mark.parametrize("images", [0, 1, 3, 50])
def test_a_small_cache_answers_as_a_large_one(bench: Make, shared: Callable[[int], Caches], images: int) -> None:
    large, size = bench(), 4 * 64 * 4 + 4 * 8 + 4 * 8 + 4 * 8
    cache = shared(images * size)
    small = bench(cache=cache)
    requests = [ask(f"r{i}", images=(picture(i % 5), picture(i % 7)), max_new_tokens=4) for i in range(20)]
    expected = [told(call.finished()) for call in large.submit(*requests)]
    assert [told(call.finished()) for call in small.submit(*requests)] == expected
    stats = cache.tokens.stats()
    assert stats.used_bytes <= images * size and stats.entries <= images
    assert large.engine.stats().token_cache.made == 7
    assert images < 7 or stats.made == 7
