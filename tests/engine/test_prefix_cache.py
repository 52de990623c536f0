"""Prompts that begin alike share K/V pages: the same answers to the last bit, and nothing is written or left behind."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench, Call, eventually
from helpers import ask, dkv, picture, threshold
from llama_checkpoints import SHAPES, Sighted, llama, load, save
from qwen_checkpoints import MASK_ID, qwen, save_sdar

from mmserve.core.request import Policy, Request, Stage
from mmserve.errors import Cancelled, Internal
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
NONE, LAST, BLOCK = Policy(name="none"), Policy(name="last"), Policy(name="block")
NGRAM = Policy(name="ngram")
PAGE = 8
LONG = "what is left of the red circle, and what is right of it? " * 2


def endless(model: LoadedModel) -> LoadedModel:
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return endless(load(Sighted(tmp_path_factory.mktemp("llava"), image_aspect_ratio="square").folder))


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], LoadedModel]:
    """Makes block-diffusion models of a given block."""
    with torch.no_grad():
        oracle = qwen("qwen3")
        oracle.get_input_embeddings().weight[MASK_ID] *= 0.2

    def make(block: int) -> LoadedModel:
        folder: Path = tmp_path_factory.mktemp("sdar")
        return endless(load(save_sdar(oracle, folder, block_size=block)))

    return make


class Watched:
    """An engine under watch: its pages' contents, and each request's answer and K/V, bit for bit.

    A pass that writes to a page that is published, or a published page whose contents have changed, fails the test.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench, self.engine = bench, bench.engine
        self.ended: dict[str, tuple[Any, ...]] = {}
        self.evicted = 0
        self.most_shared = 0  # references to one page
        self._contents: dict[int, bytes] = {}
        self._problems: list[str] = []
        pool, store, stages = self.engine._pool, self.engine.stages.store, self.engine.stages
        for tensor in (*store.keys, *store.values):
            tensor.fill_(torch.nan)
        publish, evict, attend, finished = pool.publish, pool._evict, store.attend, stages.decoding.finished

        def published(page: int, key: bytes) -> None:
            publish(page, key)
            if page in pool._key_of:
                self._contents.setdefault(page, self._bits([page]))

        def evicted() -> int:
            page = evict()
            self._check(page)
            del self._contents[page]
            self.evicted += 1
            return page

        def attended(ragged: Any, *others: Any) -> Any:
            written = set((ragged.slots // store.page_size).tolist())
            if written & set(pool._key_of):
                self._problems.append(f"pages {written & set(pool._key_of)} are written")
            self.most_shared = max([self.most_shared, *list(pool._references.values())])
            return attend(ragged, *others)

        def ended(name: str) -> Any:
            d = stages.decoding.live[name]
            n = d.canvas.size - 1  # the last token is never run
            rest = (d.canvas.tokens.tolist(), d.canvas.committed_at.tolist(), d.log_probabilities.tobytes())
            self.ended[name] = (*rest, self._bits(d.prefilled.pages, n))
            return finished(name)

        pool.publish, pool._evict = published, evicted  # type: ignore[method-assign]
        store.attend, stages.decoding.finished = attended, ended  # type: ignore[method-assign]

    def _bits(self, pages: Any, positions: int | None = None) -> bytes:
        store = self.engine.stages.store
        rows = [t[list(pages)].flatten(0, 1)[:positions] for t in (*store.keys, *store.values)]
        assert not any(r.isnan().any() for r in rows)
        return torch.stack(rows).view(torch.uint8).numpy().tobytes()

    def _check(self, page: int) -> None:
        if self._bits([page]) != self._contents[page]:
            self._problems.append(f"page {page} has changed")

    def one(self, request: Request) -> Call:
        """One request, alone, to its end."""
        [call] = self.bench.submit(request)
        call.finished()
        return call

    def outcome(self, call: Call) -> tuple[Any, ...]:
        """All that must not depend on the cache; what was run and what was found add up to what is run without it."""
        f = call.finished()
        run = f.recomputed_tokens + f.usage.cached_tokens
        usage = dataclasses.replace(f.usage, cached_tokens=0)
        return (f.text, f.reason, usage, f.forwards, run, *self.ended[call.request.id])

    def settle(self) -> None:
        self.bench.await_nothing_left()
        for page in self._contents:
            self._check(page)
        assert not self._problems, self._problems

    def cached(self, call: Call) -> int:
        return call.finished().usage.cached_tokens


@pytest.fixture
def watch(bench: Make) -> Callable[..., Watched]:
    return lambda *args, **options: Watched(bench(*args, **options))


_ALONE: list[tuple[LoadedModel, list[Request], dict[str, Any], dict[str, Any]]] = []


def alone(watch: Callable[..., Watched], model: LoadedModel, requests: list[Request], **config: Any) -> dict[str, Any]:
    """Outcomes without a cache, one request after another; made once for all tests with the same requests."""
    for known, asked, how, found in _ALONE:
        if known is model and asked == requests and how == config:
            return found
    w = watch(model, prefix_cache=False, stages="inline", **config)
    found = {r.id: w.outcome(w.one(r)) for r in requests}
    stats = w.engine.stats()
    assert (stats.cached_pages, stats.prefix_lookups, stats.prefix_hits) == (0, 0, 0)
    _ALONE.append((model, list(requests), config, found))
    return found


def related(recompute: Policy = LAST, *, count: int = 16, images: bool = True) -> list[Request]:
    """Requests of which many begin alike: by a page, by several, wholly, and with the same or another picture."""
    beginnings = [LONG, LONG[:40], LONG[:60] + "blue", "two squares " * 6]
    return [
        ask(
            f"r{i}",
            beginnings[i % 4] + ["", "green?", " and a triangle"][i % 3] * (i % 2),
            images=tuple(picture(j) for j in range(i % 3)) if images else (),
            max_new_tokens=[1, 6, 11][i % 3],
            recompute=recompute,
            commit=threshold(0.3) if i % 5 == 2 else None,
            temperature=[0.0, 1.1][i // 4 % 2],
            seed=i,
        )
        for i in range(count)
    ]


# --- the same answers ---


@pytest.mark.parametrize("chunk", [0, 8, 20, 10_000])
def test_the_second_of_two_equal_prompts_runs_its_end_only(watch, causal: LoadedModel, chunk: int) -> None:
    requests = [ask(f"r{i}", LONG, max_new_tokens=9, recompute=LAST) for i in range(2)]
    expected = alone(watch, causal, requests, prefill_tokens=chunk)
    w: Watched = watch(causal, stages="inline", prefill_tokens=chunk)
    calls = [w.one(r) for r in requests]
    assert [w.outcome(call) for call in calls] == list(expected.values())
    prompt = calls[0].finished().usage.prompt_tokens
    assert [w.cached(call) for call in calls] == [0, (prompt - 1) // PAGE * PAGE]
    assert calls[1].finished().recomputed_tokens == prompt - (prompt - 1) // PAGE * PAGE + 8
    pages = (prompt - 1) // PAGE
    stats = w.engine.stats()
    assert (stats.cached_pages, stats.prefix_lookups, stats.prefix_hits) == (pages, 2 * pages, pages)
    w.settle()


def test_prompts_of_any_length_leave_a_row_to_run(watch, causal: LoadedModel) -> None:
    requests = [ask(f"r{i}", "x" * i, max_new_tokens=3, recompute=LAST) for i in range(1, 26)]
    expected = alone(watch, causal, requests)
    w: Watched = watch(causal, stages="inline")
    seen = set()
    for request in [*requests, *reversed(requests)]:
        again = dataclasses.replace(request, id=f"{request.id}-{len(w.ended)}")
        [call] = w.bench.submit(again)
        assert w.outcome(call) == expected[request.id]
        prompt = call.finished().usage.prompt_tokens
        assert w.cached(call) < prompt and w.cached(call) % PAGE == 0
        seen.add((prompt % PAGE, prompt - w.cached(call)))
    assert {left for _rest, left in seen} >= {1, 8}, "a page that ends with the prompt is run, one before that is not"
    w.settle()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_rows_of_a_prompt_have_the_same_bits_without_the_pages_before_them(
    watch, tmp_path: Path, dtype: str
) -> None:
    """Also one to three of them where no query heads share keys: those few are summed in another order beside others.

    So a page's rows are run by themselves, whoever runs more.
    """
    model = endless(load(save(llama(*SHAPES["mha"]), tmp_path), dtype=dtype))
    requests = [ask(f"r{i}", "x" * i, max_new_tokens=3, recompute=LAST) for i in range(2 * PAGE, 3 * PAGE)]
    expected = alone(watch, model, requests)
    w: Watched = watch(model, stages="inline")
    left = set()
    for request in requests:
        calls = [w.one(dataclasses.replace(request, id=f"{request.id}-{turn}")) for turn in range(2)]
        assert [w.outcome(call) for call in calls] == [expected[request.id]] * 2
        left.add(calls[1].finished().usage.prompt_tokens - w.cached(calls[1]))
    assert left == set(range(1, PAGE + 1))
    w.settle()


@pytest.mark.parametrize(
    ("seed", "config"),
    [
        (0, {"stages": "inline"}),
        (1, {}),
        (2, {"pages": 16}),
        (3, {"pages": 20, "prefill_tokens": 24, "stages": "inline"}),
        (4, {"pages": 24, "prefill_tokens": 16, "max_pending_per_stage": 4, "decode_tokens": 150}),
        (5, {"page_size": 1, "pages": 140}),
    ],
    ids=["inline", "threads", "pages for one", "small and in chunks", "threads, chunks, small", "pages of one"],
)
def test_answers_do_not_depend_on_the_cache_or_the_order(
    watch, causal: LoadedModel, seed: int, config: dict[str, Any]
) -> None:
    """Nor on how the prompts are cut into chunks."""
    requests = related()
    expected = alone(watch, causal, requests, page_size=config.get("page_size", PAGE))
    random.Random(seed).shuffle(requests)
    w: Watched = watch(causal, **config)
    calls = w.bench.submit(*requests[:10])
    calls += [w.one(r) for r in requests[10:]]
    assert sum(w.cached(call) for call in calls) > 0
    for call in calls:
        assert w.outcome(call) == expected[call.request.id]
    w.settle()
    stats = w.engine.stats()
    assert stats.cached_pages <= w.engine.config.pages and stats.prefix_hits <= stats.prefix_lookups
    if "pages" in config and "page_size" not in config:
        assert w.evicted > 5


def test_many_share_the_same_pages_at_the_same_time(watch, causal: LoadedModel) -> None:
    requests = [ask(f"r{i}", LONG + f" {i}", max_new_tokens=12, recompute=LAST, seed=i) for i in range(12)]
    expected = alone(watch, causal, requests)
    w: Watched = watch(causal)
    assert w.outcome(w.bench.submit(requests[0])[0]) == expected["r0"]
    gate = w.bench.gate("decode")
    calls = w.bench.submit(*requests[1:])
    eventually(lambda: all(w.bench.stage(r.id) in (Stage.PREFILLED, Stage.STEPPING) for r in requests[1:]), "prefilled")
    pages = w.engine.stats().pages_in_use
    gate.open()
    for call in calls:
        assert w.outcome(call) == expected[call.request.id]
    shared = w.cached(calls[0]) // PAGE
    assert w.most_shared == 11 and shared >= 3
    total = sum(-(-(c.finished().usage.prompt_tokens + 12) // PAGE) for c in calls)
    assert pages == total - 10 * shared, "one copy of what they have in common"
    w.settle()


def test_drafts_take_part(watch, causal: LoadedModel) -> None:
    texts = ("a b c d a b c d a b", "red circle, red circle, red circle, red")
    requests = [ask(f"{t[0]}{i}", t, max_new_tokens=20, recompute=LAST, commit=NGRAM) for t in texts for i in range(2)]
    for chunk in (0, 8, 19, 27):
        expected = alone(watch, causal, requests, prefill_tokens=chunk)
        w: Watched = watch(causal, stages="inline", prefill_tokens=chunk)
        calls = [w.one(r) for r in requests]
        assert [w.outcome(call) for call in calls] == list(expected.values())
        assert all(w.cached(call) >= PAGE for call in calls[1::2])
    w.settle()


# --- pictures ---


def test_different_pictures_in_the_same_place_never_share(watch, causal: LoadedModel) -> None:
    """Their rows have the same ids: only their features tell them apart."""
    pictures = [picture(i, (40, 40)) for i in range(6)]
    requests = [
        ask(f"p{i}-{turn}", "what is it?", images=(data,), max_new_tokens=8, recompute=LAST)
        for turn in range(2)
        for i, data in enumerate(pictures)
    ]
    expected = alone(watch, causal, requests)
    assert len({outcome[-1] for outcome in expected.values()}) == len(pictures)
    w: Watched = watch(causal, stages="inline")
    encoded = w.engine.stages.encoder.encode(requests[:2])
    assert encoded[0].ids.tolist() == encoded[1].ids.tolist()
    before = int(encoded[0].image_rows[0]) // PAGE * PAGE  # whole pages of text in front of the picture
    calls = [w.one(r) for r in requests]
    for call in calls:
        assert w.outcome(call) == expected[call.request.id]
    prompt = calls[0].finished().usage.prompt_tokens
    assert [w.cached(call) for call in calls] == [0, *[before] * 5, *[(prompt - 1) // PAGE * PAGE] * 6]
    assert before < (prompt - 1) // PAGE * PAGE
    w.settle()


def test_a_second_picture_of_two_tells_prompts_apart(watch, causal: LoadedModel) -> None:
    one, two, three = (picture(i, (40, 40)) for i in range(3))
    requests = [
        ask(f"r{i}", "which?", images=images, max_new_tokens=5, recompute=LAST)
        for i, images in enumerate([(one, two), (one, three), (three, two), (two, one), (one, two), (one,)])
    ]
    expected = alone(watch, causal, requests)
    w: Watched = watch(causal, stages="inline")
    [first] = w.engine.stages.encoder.encode(requests[:1])
    calls = [w.one(r) for r in requests]
    for call in calls:
        assert w.outcome(call) == expected[call.request.id]
    begin, second = int(first.image_rows[0]) // PAGE * PAGE, int(first.image_rows[16]) // PAGE * PAGE
    found = [w.cached(call) for call in calls]
    assert found[:4] == [0, second, begin, begin] and begin < second
    assert found[4] == (len(first.ids) - 1) // PAGE * PAGE and found[5] <= second
    w.settle()


# --- block diffusion ---


@pytest.mark.parametrize(
    ("block", "page", "unit"), [(4, 8, 8), (8, 8, 8), (8, 4, 8), (3, 4, 12), (4, 16, 16)], ids=lambda n: str(n)
)
def test_block_diffusion_shares_finished_blocks(watch, sdar, block: int, page: int, unit: int) -> None:
    model = sdar(block)
    requests = related(BLOCK, images=False)
    expected = alone(watch, model, requests, page_size=page)
    w: Watched = watch(model, stages="inline", page_size=page)
    for turn in range(2):
        for request in requests:
            [call] = w.bench.submit(dataclasses.replace(request, id=f"{request.id}-{turn}"))
            assert w.outcome(call) == expected[request.id]
            prompt = call.finished().usage.prompt_tokens
            assert w.cached(call) % unit == 0 and w.cached(call) <= prompt // block * block
            assert turn == 0 or w.cached(call) == prompt // block * block // unit * unit
    w.settle()


def test_block_diffusion_in_a_crowd_and_a_small_pool(watch, sdar) -> None:
    model = sdar(4)
    requests = related(BLOCK, images=False)
    expected = alone(watch, model, requests)
    w: Watched = watch(model, pages=20)
    calls = w.bench.submit(*requests)
    assert [w.outcome(call) for call in calls] == [expected[r.id] for r in requests]
    assert w.evicted > 2 and sum(w.cached(call) for call in calls)  # how many depends on who comes first
    w.settle()


# --- who takes no part ---


def test_what_runs_the_prompt_again_takes_no_part(watch, causal: LoadedModel, sdar) -> None:
    for model, keeps in ((causal, LAST), (sdar(4), BLOCK)):
        w: Watched = watch(model, stages="inline")
        for i in range(2):
            assert w.cached(w.one(ask(f"n{i}", LONG, max_new_tokens=4, recompute=NONE))) == 0
        assert w.engine.stats().cached_pages == 0
        kept = [w.one(ask(f"k{i}", LONG, max_new_tokens=4, recompute=keeps)) for i in range(2)]
        assert w.cached(kept[0]) == 0 < w.cached(kept[1])
        again = w.one(ask("n2", LONG, max_new_tokens=4, recompute=NONE))
        assert w.cached(again) == 0 and again.finished().text == kept[0].finished().text
        w.settle()


def test_full_attention_takes_no_part(watch, model: LoadedModel) -> None:
    """There every position's K/V depend on the answer too."""
    w: Watched = watch(model, stages="inline")
    for i, policy in enumerate((NONE, NONE, dkv(), dkv())):
        assert w.cached(w.one(ask(f"r{i}", LONG, recompute=policy))) == 0
    assert w.engine.stats().cached_pages == w.engine.stats().prefix_lookups == 0


def test_chunks_shorter_than_a_page_switch_it_off(watch, causal: LoadedModel) -> None:
    w: Watched = watch(causal, stages="inline", prefill_tokens=PAGE - 1)
    for i in range(2):
        assert w.cached(w.one(ask(f"r{i}", LONG, max_new_tokens=2, recompute=LAST))) == 0


# --- failures ---


@pytest.mark.parametrize("chunk", [0, 8])
def test_a_prompt_that_failed_in_prefill_leaves_only_what_was_computed(
    watch, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    requests = [ask(f"r{i}", LONG, max_new_tokens=5, recompute=LAST) for i in range(3)]
    expected = alone(watch, causal, requests, prefill_tokens=chunk)
    w: Watched = watch(causal, stages="inline", prefill_tokens=chunk)
    from mmserve.decode import runner

    real, passes = runner.forward, []

    def poisoned(model: Any, store: Any, batch: Any, floor: int, **options: Any) -> Any:
        passes.append(len(batch))
        if len(passes) == 3 or not chunk:
            for tensor in (*store.keys, *store.values):
                tensor[
                    torch.from_numpy(batch[0].pages[batch[0].rows // PAGE]), torch.from_numpy(batch[0].rows % PAGE)
                ] = 7
            raise RuntimeError("broken in the middle of a pass")
        return real(model, store, batch, floor, **options)

    monkeypatch.setattr(runner, "forward", poisoned)
    assert isinstance(w.bench.submit(requests[0])[0].error(), Internal)
    w.bench.await_nothing_left()
    assert w.engine.stats().cached_pages == (2 if chunk else 0)
    monkeypatch.setattr(runner, "forward", real)
    calls = [w.one(r) for r in requests[1:]]
    assert w.cached(calls[0]) == (16 if chunk else 0)
    assert [w.outcome(call) for call in calls] == [expected["r1"], expected["r2"]]
    w.settle()


def test_one_poisoned_request_of_a_batch_publishes_nothing_and_the_others_are_served(
    watch, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(f"r{i}", LONG + f"{i % 2}", max_new_tokens=5, recompute=LAST) for i in range(6)]
    expected = alone(watch, causal, requests)
    w: Watched = watch(causal)
    from mmserve.decode import propose

    real = propose.candidates

    def poisoned(logits: Any, positions: Any, canvas: Any, sampling: Any, *rest: Any, **named: Any) -> Any:
        if sampling.seed == 99:
            raise RuntimeError("poisoned")
        return real(logits, positions, canvas, sampling, *rest, **named)

    monkeypatch.setattr(propose, "candidates", poisoned)
    bad = [ask(f"bad{i}", LONG + f"{i % 2}", max_new_tokens=5, recompute=LAST, seed=99) for i in range(4)]
    [first] = w.bench.submit(bad[0])
    assert isinstance(first.error(), Internal) and w.engine.stats().cached_pages == 0
    mixed = [r for pair in zip(bad[1:], requests[:3], strict=True) for r in pair] + requests[3:]
    for call in w.bench.submit(*mixed):
        if call.request.id.startswith("bad"):
            assert isinstance(call.error(), Internal)
        else:
            assert w.outcome(call) == expected[call.request.id]
    w.settle()


def test_who_is_cancelled_in_prefill_publishes_nothing(watch, causal: LoadedModel) -> None:
    w: Watched = watch(causal)
    gate = w.bench.gate("prefill")
    [call] = w.bench.submit(ask("x", LONG, max_new_tokens=4, recompute=LAST))
    gate.wait()
    w.engine.cancel("x")
    assert isinstance(call.error(), Cancelled)
    gate.open()
    w.bench.await_nothing_left()
    assert w.engine.stats().cached_pages == 0
    calls = [w.one(ask(f"y{i}", LONG, max_new_tokens=4, recompute=LAST)) for i in range(2) if not w.settle()]
    assert w.cached(calls[0]) == 0 < w.cached(calls[1])
    w.settle()


def test_who_is_cancelled_in_decode_leaves_its_prompt_and_no_reference(watch, causal: LoadedModel) -> None:
    requests = [ask(f"r{i}", LONG, max_new_tokens=6, recompute=LAST) for i in range(2)]
    expected = alone(watch, causal, requests)
    w: Watched = watch(causal)
    for i in range(6):  # some share with one that is cancelled later, some with one that was
        gate = w.bench.gate("decode")
        calls = w.bench.submit(*(ask(f"x{i}{j}", LONG, max_new_tokens=40, recompute=LAST) for j in range(3)))
        gate.wait()
        for call in calls:
            w.engine.cancel(call.request.id)
        gate.open()
        assert all(isinstance(call.error(), Cancelled) for call in calls)
    w.settle()
    [call] = w.bench.submit(requests[1])
    assert w.cached(call) > 0 and w.outcome(call) == expected["r1"]
    w.settle()
