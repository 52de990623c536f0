"""Answers depend on the request alone: not on who else is served, on the workers, or on a cache that never caches."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from e2e_helpers import Ask, Gates, Running, answer, draw_asks, running, settings, wait_for

from mmserve.client import Client, Delta, DkvDecode, Finished, Result, Snapshot, Threshold
from mmserve.core.request import Stage
from mmserve.reference.tasks import sample

CLIENTS = 64


def test_64_clients_at_once_get_the_answers_they_get_alone(server: Running, gates: Gates) -> None:
    asks = draw_asks(CLIENTS, canvas=(4, 6, 8, 12))
    assert len({a.images for a in asks if a.images}) == sum(bool(a.images) for a in asks), "pictures must be distinct"
    alone = [answer(a.of(server.client)) for a in asks]
    start = Barrier(CLIENTS)

    def one(ask: Ask) -> Result:
        with Client(server.address) as client:  # a connection of its own
            client.models()
            start.wait(60)
            return ask.of(client, timeout=100)

    gates.decode.close()
    with ThreadPoolExecutor(CLIENTS) as pool:
        futures = [pool.submit(one, ask) for ask in asks]
        wait_for("all of them at once", lambda: server.engine.stats().live == CLIENTS)
        records, max_pending_per_stage = server.engine._live.by_id, server.engine.config.max_pending_per_stage
        full = lambda: [r.stage for r in list(records.values())].count(Stage.PREFILLED) >= max_pending_per_stage  # noqa: E731
        wait_for("as many to be prefilled as may wait", full)
        gates.decode.open()
        together = [answer(f.result(100)) for f in futures]
    assert server.engine.config.decode_tokens == 256, "rows of a batch on a CPU: those of three to five of the requests"
    assert max(gates.decode.sizes) >= 3, "the requests must have shared batches"
    assert together == alone
    assert len(set(alone)) > 4, "requests this different cannot all have one answer"


def test_stages_on_one_thread_give_the_same_answers_as_on_three(server: Running) -> None:
    asks = draw_asks(12, seed=1)
    with running(settings(engine={"stages": "inline"})) as inline:
        futures = [inline.start(a.of, inline.client) for a in asks]
        on_one = [answer(f.result(100)) for f in futures]
        inline.assert_serves()
    on_three = [answer(f.result(100)) for f in [server.start(a.of, server.client) for a in asks]]
    assert on_one == on_three


def test_the_smallest_budgets_give_the_same_answers(server: Running) -> None:
    """One request a batch, one between two stages, pages for one request of the largest size."""
    asks = draw_asks(6, seed=2)
    tight = {
        "max_pending_per_stage": 1,
        "encode_batch": 1,
        "prefill_tokens": 1,
        "decode_tokens": 1,
        "pages": 64,
        "page_size": 16,
    }
    with running(settings(engine=tight)) as small:
        futures = [small.start(a.of, small.client) for a in asks]
        squeezed = [answer(f.result(100)) for f in futures]
        small.assert_serves()
    assert squeezed == [answer(a.of(server.client)) for a in asks]


@pytest.mark.parametrize("commit", ["low_confidence", Threshold(0.6)])
def test_dkv_decode_that_refreshes_every_step_equals_no_cache(server: Running, commit: str | Threshold) -> None:
    rng = random.Random(3)
    for task in ("count", "what", "json"):
        scene, question = sample(task, rng)
        given = {"images": [scene.png()], "max_new_tokens": 20, "block_length": 8, "commit": commit}
        plain = server.client.generate(question.text, recompute="none", **given)
        fresh = server.client.generate(question.text, recompute=DkvDecode(1), **given)
        assert answer(fresh) == answer(plain)


def test_dkv_decode_runs_fewer_positions_than_no_cache(server: Running) -> None:
    scene, question = sample("json", random.Random(4))
    given = {"images": [scene.png()], "max_new_tokens": 16, "commit": "low_confidence"}
    plain = server.client.generate(question.text, recompute="none", **given)
    cached = server.client.generate(question.text, recompute=DkvDecode(8), **given)
    assert plain.recomputed_tokens == plain.forwards * (plain.usage.prompt_tokens + 16)
    assert 0 < cached.recomputed_tokens < plain.recomputed_tokens


def test_drawn_answers_repeat_with_their_seed_and_change_with_it(server: Running) -> None:
    scene, question = sample("json", random.Random(5))
    given = {"images": [scene.png()], "max_new_tokens": 12, "temperature": 5.0, "steps": 6}
    first, again = ([server.client.generate(question.text, seed=s, **given) for s in range(4)] for _ in range(2))
    assert [answer(r) for r in first] == [answer(r) for r in again]
    assert len({r.text for r in first}) > 1


def test_a_seed_of_temperature_zero_changes_nothing(server: Running) -> None:
    texts = {server.client.generate("Is there a red circle?", max_new_tokens=6, seed=s).text for s in (0, 1, 2**64 - 1)}
    assert len(texts) == 1


def test_streamed_deltas_and_the_last_snapshot_add_up_to_the_answer(server: Running) -> None:
    for ask in draw_asks(6, seed=6):
        whole = ask.of(server.client)
        events = list(server.client.stream(ask.prompt, images=ask.images, snapshots=True, **ask.options))
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert answer(finished) == answer(whole)
        assert "".join(e.text for e in events if isinstance(e, Delta)) == whole.text
        committed = [e.committed for e in events if isinstance(e, Snapshot)]
        assert committed and all(a < b for a, b in itertools.pairwise(committed))


def test_an_answer_of_one_token_takes_one_forward_pass(server: Running) -> None:
    result = server.client.generate("Is there a red circle?", max_new_tokens=1)
    assert result.forwards == 1
    assert result.usage.completion_tokens <= 1
    assert result.finish_reason in ("end", "length")


def test_an_answer_ends_before_its_stop_string(server: Running) -> None:
    given = {"max_new_tokens": 24, "temperature": 50.0, "steps": 8}  # so hot that any model says something
    seed, whole = next(
        (s, r)
        for s in range(50)
        for r in [server.client.generate("Say something.", seed=s, **given)]
        if len(r.text) >= 6 and r.text.isprintable()
    )
    stop = whole.text[2:4]
    cut = server.client.generate("Say something.", seed=seed, stop=["never in it ▒", stop], **given)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.find(stop)], "stop")
    events = list(server.client.stream("Say something.", seed=seed, stop=stop, **given))
    assert "".join(e.text for e in events if isinstance(e, Delta)) == cut.text
    unmet = server.client.generate("Say something.", seed=seed, stop="never in it ▒", **given)
    assert answer(unmet) == answer(whole)


def test_system_and_assistant_messages_and_several_pictures_are_part_of_the_prompt(server: Running) -> None:
    pictures = [sample("count", random.Random(s))[0].png() for s in (7, 8)]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "How many shapes are there?"},
    ]
    alone = server.client.generate(chat[-1:], max_new_tokens=4)
    all_of_it = server.client.generate(chat, images=pictures, max_new_tokens=4)
    per_image = server.client.describe().visual_tokens_per_image
    assert alone.usage.visual_tokens == 0
    assert all_of_it.usage.visual_tokens == 2 * per_image
    assert all_of_it.usage.prompt_tokens > alone.usage.prompt_tokens + 2 * per_image


def test_times_of_an_answer_add_up(server: Running) -> None:
    times = server.client.generate("How many shapes are there?", max_new_tokens=8).times
    parts = times.queue + times.encode + times.prefill + times.decode
    assert min(times.queue, times.encode, times.prefill, times.decode) >= 0
    assert parts == pytest.approx(times.total, abs=0.1)
    assert 0 < times.first_token <= times.total
