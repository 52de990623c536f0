"""Pages of prompts beyond the page pool: equal tokens, fewer positions run, and nothing left behind."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Bench, eventually
from helpers import ask, picture
from llama_checkpoints import Sighted, llama, load, save
from qwen_checkpoints import MASK_ID, qwen, save_sdar

from mmserve.config import EncoderCacheConfig, KVCacheConfig
from mmserve.core.cached import Label, listing
from mmserve.core.events import Finished
from mmserve.core.request import Policy, Request, Stage
from mmserve.engine import prefixes
from mmserve.errors import Cancelled, FailedPrecondition
from mmserve.kv.pool import PagePool
from mmserve.models.base import LoadedModel
from mmserve.tiers.caches import Caches

Make = Callable[..., Bench]
PAGE = 8
LONG = "what is left of the red circle, and what is right of it? " * 4
HOST = KVCacheConfig(host_bytes=64 << 20)


def on_disk(folder: Path, host: int = 0) -> KVCacheConfig:
    return KVCacheConfig(host_bytes=host, disk_folder=str(folder))


def caches(kv: KVCacheConfig) -> Caches:
    return Caches.of(EncoderCacheConfig(), kv)


def endless(model: LoadedModel) -> LoadedModel:
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return endless(load(Sighted(tmp_path_factory.mktemp("llava"), image_aspect_ratio="square").folder))


@pytest.fixture(scope="module")
def blocks_of_16(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with torch.no_grad():
        oracle = qwen("qwen3")
        oracle.get_input_embeddings().weight[MASK_ID] *= 0.2
    return endless(load(save_sdar(oracle, tmp_path_factory.mktemp("sdar"), block_size=16)))


def prompts(*, images: bool = True) -> list[Request]:
    """Several of which no two fit into the small pool of these tests."""
    shown = (picture(1),) if images else ()
    return [
        ask(f"r{i}", f"{i} {LONG}", images=shown if i % 2 else (), max_new_tokens=6, recompute=LAST) for i in range(4)
    ]


LAST = Policy(name="last")


def told(finished: Finished) -> tuple[Any, ...]:
    """All that must not depend on what is kept."""
    run = finished.recomputed_tokens + finished.usage.cached_tokens
    return finished.text, finished.tokens, finished.forwards, run


def again(request: Request, name: str) -> Request:
    return dataclasses.replace(request, id=f"{request.id}-{name}")


@pytest.mark.parametrize("kind", ["causal", "blocks", "8 bits", "chunks"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_pages_that_the_pool_gave_up_come_back_with_the_same_tokens(
    bench: Make, request: pytest.FixtureRequest, tmp_path: Path, kind: str, tier: str
) -> None:
    model = request.getfixturevalue("blocks_of_16" if kind == "blocks" else "causal")
    policy = Policy(name="block") if kind == "blocks" else LAST
    asked = [
        dataclasses.replace(r, diffusion=dataclasses.replace(r.diffusion, recompute=policy))
        for r in prompts(images=kind != "blocks")
    ]
    how: dict[str, Any] = {"8 bits": {"kv_bits": 8, "kv_kept": 0.25}, "chunks": {"prefill_tokens": 16}}.get(kind, {})
    expected = [told(bench(model, prefix_cache=False, **how).ask(r)) for r in asked]
    kept = caches(HOST if tier == "host" else on_disk(tmp_path))
    b = bench(model, pages=16, cache=kept, **how)
    first = [b.ask(r) for r in asked]
    kept.prefix.flush()
    second = [b.ask(again(r, "2")) for r in asked]
    assert [told(f) for f in first] == [told(f) for f in second] == expected
    assert all(f.usage.cached_tokens >= PAGE for f in second), [f.usage.cached_tokens for f in second]
    stats = b.engine.stats().prefix_cache
    assert (stats.hits if tier == "host" else stats.disk_hits) > 0
    b.await_nothing_left()


def test_many_at_once_with_a_small_pool(bench: Make, causal: LoadedModel, tmp_path: Path) -> None:
    asked = [again(r, str(n)) for n in range(3) for r in prompts()]
    alone = bench(causal, prefix_cache=False)
    expected = {r.id: told(alone.ask(r)) for r in asked[:4]}
    b = bench(causal, pages=20, cache=caches(on_disk(tmp_path, host=1 << 20)))
    for _ in range(2):
        calls = b.submit(*[again(r, f"{_}") for r in asked])
        for call in calls:
            first = call.request.id.split("-")[0] + "-0"
            assert told(call.finished()) == expected[first]
    b.await_nothing_left()


def test_another_engine_answers_from_disk(bench: Make, causal: LoadedModel, tmp_path: Path) -> None:
    """What the pool held goes to disk when the engine stops; other settings and weights find nothing there."""
    [request, *_rest] = prompts()
    b = bench(causal, cache=caches(on_disk(tmp_path)))
    first = b.ask(request)
    b.engine.stop()
    assert list(tmp_path.iterdir())
    second = bench(causal, cache=caches(on_disk(tmp_path))).ask(request)
    assert told(second) == told(first) and second.usage.cached_tokens > first.usage.cached_tokens == 0
    other = bench(causal, cache=caches(on_disk(tmp_path)), page_size=4).ask(request)
    assert told(other)[:2] == told(first)[:2] and other.usage.cached_tokens == 0
    tenant = dataclasses.replace(request, tenant=dataclasses.replace(request.tenant, cache="somebody"))
    assert bench(causal, cache=caches(on_disk(tmp_path))).ask(tenant).usage.cached_tokens == 0


def test_pages_of_another_rotary_embedding_are_not_taken(bench: Make, tmp_path: Path) -> None:
    """Two models of one checkpoint, whose weights are equal, share a cache."""
    folder = save(llama(max_position_embeddings=256), tmp_path)
    plain, longer = endless(load(folder)), endless(load(folder, positions=1024, rope_scaling="ntk"))
    asked = prompts(images=False)
    expected = [told(bench(longer, prefix_cache=False).ask(r)) for r in asked]
    kept = caches(HOST)
    first = bench(plain, pages=16, cache=kept)
    for request in asked:
        first.ask(request)
    b = bench(longer, cache=kept)
    assert [told(b.ask(again(r, "longer"))) for r in asked] == expected


def test_a_poisoned_page_is_computed_instead(bench: Make, causal: LoadedModel, tmp_path: Path) -> None:
    [request, *_rest] = prompts()
    b = bench(causal, cache=caches(on_disk(tmp_path)))
    first = b.ask(request)
    b.engine.stop()
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    second = bench(causal, cache=caches(on_disk(tmp_path))).ask(request)
    assert told(second) == told(first) and second.usage.cached_tokens == 0


def test_entries_are_listed_pinned_and_dropped(bench: Make, causal: LoadedModel, tmp_path: Path) -> None:
    asked = prompts(images=False)
    kept = caches(KVCacheConfig(host_bytes=1 << 20, disk_folder=str(tmp_path)))
    b = bench(causal, pages=16, cache=kept)
    prefixes = b.engine.caches
    first = b.ask(asked[0])
    [entry] = listing(prefixes.blocks()).entries
    shared = (first.usage.prompt_tokens - 1) // PAGE
    assert (entry.kind, entry.tokens, set(entry.sizes)) == ("prefix", shared * PAGE, {"pages"})
    assert prefixes.pin([entry.id], pinned=True) == shared
    for n, request in enumerate(asked[1:] * 2):
        b.ask(again(request, str(n)))
    found = {each.id: each for each in listing(prefixes.blocks()).entries}
    assert found[entry.id].pinned and found[entry.id].tokens == entry.tokens
    assert b.ask(again(asked[0], "pinned")).usage.cached_tokens == entry.tokens
    assert prefixes.drop([entry.id]) == shared
    assert entry.id not in {each.id for each in listing(prefixes.blocks()).entries}
    assert b.ask(again(asked[0], "dropped")).usage.cached_tokens == 0
    b.await_nothing_left()


def test_pinned_files_of_other_settings_are_listed_unpinned_and_dropped(
    bench: Make, causal: LoadedModel, tmp_path: Path
) -> None:
    asked = ask("first", LONG, max_new_tokens=2, recompute=LAST)
    for chunk in (16, 32):
        made = bench(causal, cache=caches(on_disk(tmp_path)), prefill_tokens=chunk)
        made.ask(asked)
        [name] = {entry.id for entry in listing(made.engine.caches.blocks()).entries}
        pages = made.engine.caches.pin([name], pinned=True)
        [entry] = listing(made.engine.caches.blocks()).entries
        assert (entry.pinned, entry.stale) == (True, False) and pages > 0
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert entry.sizes["disk"] == files, "of both"
    other = bench(causal, cache=caches(on_disk(tmp_path)), prefill_tokens=48).engine.caches
    [stale] = listing(other.blocks()).entries
    assert (stale.id, stale.pinned, stale.stale, stale.sizes) == (name, True, True, {"disk": files})
    assert other.pin([name], pinned=True) == 0, "no request can use it"
    assert other.pin([name], pinned=False) == 2 * pages and not listing(other.blocks()).entries[0].pinned
    other.drop([name])
    assert other.blocks() == [] == list(tmp_path.iterdir())


def test_what_the_next_engine_of_a_model_can_use_stays_pinned_in_memory(bench: Make, causal: LoadedModel) -> None:
    both, asked = caches(HOST), ask("first", LONG, max_new_tokens=2, recompute=LAST)
    old, same, other = (bench(causal, cache=both, prefill_tokens=tokens) for tokens in (16, 16, 32))
    old.ask(asked)
    [name] = {entry.id for entry in listing(old.engine.caches.blocks()).entries}
    assert old.engine.caches.pin([name], pinned=True) > 0
    old.engine.stop()

    def pinned() -> set[bool]:
        return {block.pinned for block in same.engine.caches.blocks() if block.label.kind == "prefix"}

    assert pinned() == {True}
    old.engine.caches.unpin_in_memory(same.engine.caches)
    assert pinned() == {True}
    old.engine.caches.unpin_in_memory(other.engine.caches)
    assert pinned() == {False}, "no request to the other one finds them"


def test_what_others_begin_with_is_not_dropped(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal)
    for i, end in enumerate(("red", "blue and a triangle")):
        b.ask(ask(f"r{i}", f"{LONG} {end}", max_new_tokens=2, recompute=LAST))
    blocks = b.engine.caches.blocks()
    one, other = listing(blocks).entries
    same = [dataclasses.replace(each, label=dataclasses.replace(each.label, model="another")) for each in blocks]
    by_model = {(each.model, each.id): each for each in listing([*blocks, *same]).entries}
    assert len(by_model) == 4 and by_model[one.model, one.id] == one, "each model has its own"
    assert by_model["another", one.id] == dataclasses.replace(one, model="another")
    b.engine.caches.drop([one.id])
    [left] = listing(b.engine.caches.blocks()).entries
    assert left == other
    with pytest.raises(FailedPrecondition, match="kv_cache"):
        b.engine.caches.pin([left.id], pinned=True)


def test_pages_that_are_published_again_are_pinned(bench: Make, causal: LoadedModel) -> None:
    """The first page of two prompts goes and comes back while the last of one stays."""
    b = bench(causal, pages=40, cache=caches(HOST), max_tokens=320)
    same = "what is left of the red circle, and what is right of it? " * 2

    def asked(name: str, text: str, new: int = 6) -> Request:
        return ask(name, text, max_new_tokens=new, recompute=LAST)

    late = f"{same}but not below, nor anywhere else in the picture that you see"
    gate = b.gate("prefill")
    first = b.submit(asked("first", "q", 2))
    gate.wait()
    calls = b.submit(asked("a", f"{same}and above"), asked("b", late))  # prefilled together: neither finds the other
    for name in ("a", "b"):
        b.await_stage(name, Stage.ENCODED)
    gate.open()
    for call in (*first, *calls):
        call.finished()
    pool = b.engine._pool
    short = b.ask(asked("short", "x", 1)).usage.prompt_tokens
    b.ask(asked("long", "x", (pool.free - 6) * PAGE - short))  # takes all but the pages that were used last
    b.ask(asked("again", late))
    live = b.submit(asked("live", "hello there", 200))[0]
    assert b.engine.caches.pin([b.engine.caches.prefix_of("again")], pinned=True) > 0
    assert isinstance(live.wait(), Finished)


def test_an_error_of_pinning_is_the_callers_alone(
    bench: Make, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(causal, cache=caches(HOST), max_tokens=320)
    b.ask(ask("first", LONG, max_new_tokens=2, recompute=LAST))
    live = b.submit(ask("live", "hello there", max_new_tokens=200, recompute=LAST))[0]

    def broken(_pages: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(b.engine._pool, "hold", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        b.engine.caches.pin([b.engine.caches.prefix_of("first")], pinned=True)
    assert isinstance(live.wait(), Finished)


@pytest.mark.parametrize("prompt", [1, 2])
def test_an_engine_that_answers_late_holds_no_pages_for_a_pin(monkeypatch: pytest.MonkeyPatch, prompt: int) -> None:
    """``prompt``: how many of the pin's questions it answers at once."""
    label = Label("prefix", "m", "", PAGE, "ab" * 32)
    key = bytes.fromhex(label.name)
    pool = PagePool(8)
    [page] = pool.allocate(1)
    pool.publish(page, key)
    pool.release((page,))
    tier: Any = SimpleNamespace(blocks=list, pin=lambda names, pinned: len(names), save=lambda pages: None)
    late: list[Callable[[], None]] = []
    asked = itertools.count()

    def post(call: Callable[[], None]) -> None:
        call() if next(asked) < prompt else late.append(call)

    monkeypatch.setattr(prefixes, "_PATIENCE", 0.05)
    kept = prefixes.Prefixes(pool, tier, {}, post, "m", PAGE, 100)
    kept._labels[key] = label
    with nullcontext() if prompt == 2 else pytest.raises(FailedPrecondition, match="cannot be read now"):
        kept.pin([label.name], pinned=True)
    assert late and (pool.free < pool.total) is (prompt == 2)
    for call in late:
        call()
    assert pool.free == pool.total


@pytest.mark.parametrize("stops", [False, True])
def test_a_request_that_ends_while_its_pages_are_read_leaves_nothing(
    bench: Make, causal: LoadedModel, tmp_path: Path, stops: bool
) -> None:
    """Alone, or with its engine."""
    [request, *_rest] = prompts()
    b = bench(causal, cache=caches(on_disk(tmp_path)))
    b.ask(request)
    b.engine.stop()
    kept = caches(on_disk(tmp_path, host=16 << 20))
    b = bench(causal, cache=kept)
    tier = b.engine.stages.tier
    assert tier is not None
    fetch, calls = tier.fetch, []

    def cancelled(*given: Any) -> Any:
        calls.append(b.engine.cancel("gone"))
        eventually(lambda: b.stage("gone") is None, "it has ended")
        eventually(lambda: b.engine._thread.is_alive() is not stops, "its engine ends, or does not")
        return fetch(*given)

    tier.fetch = cancelled  # type: ignore[method-assign]
    [call] = b.submit(dataclasses.replace(request, id="gone"))
    assert isinstance(call.error(), Cancelled)
    if stops:
        b.engine.stop()
    b.await_nothing_left()
    eventually(lambda: all(not k.references for k in kept.prefix._kept.values()), "nothing is referenced")
