"""The partial refresh of ``adaptive``: which positions it runs, and that refreshing every step is no cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import Bench
from helpers import ask, blank, tiny_model

from mmserve.core.request import Policy
from mmserve.decode.forward import Watch, value_changes
from mmserve.decode.recompute.adaptive import Adaptive
from mmserve.errors import Internal
from mmserve.kv.store import KVStore
from mmserve.models.decoder import dense_attention


def adaptive(**options: float) -> Policy:
    return Policy(name="adaptive", options=options)


def partial(prompt: int = 5, response: int = 3, ratio: float = 0.25) -> Policy:
    return adaptive(prompt_refresh=prompt, response_refresh=response, ratio=ratio)


@pytest.mark.parametrize("new_tokens", [7, 24])
def test_refreshing_every_step_is_no_cache(bench, new_tokens: int) -> None:
    b: Bench = bench(tiny_model(vision=False))
    plain = b.ask(ask("plain", max_new_tokens=new_tokens))
    fresh = b.ask(ask("fresh", max_new_tokens=new_tokens, recompute=partial(1, 1)))
    tokens, committed = b.canvases["plain"]
    assert (b.canvases["fresh"][0] == tokens).all() and (b.canvases["fresh"][1] == committed).all()
    assert fresh.recomputed_tokens == plain.recomputed_tokens
    whole = b.ask(ask("whole", max_new_tokens=new_tokens, recompute=partial(1, 7, ratio=1.0)))
    assert (b.canvases["whole"][0] == tokens).all() and whole.recomputed_tokens == plain.recomputed_tokens
    b.await_nothing_left()


def test_less_is_run_between_refreshes(bench) -> None:
    b: Bench = bench(tiny_model(vision=False))
    plain = b.ask(ask("plain", max_new_tokens=24))
    counts = [
        b.ask(ask(f"r{ratio}", max_new_tokens=24, recompute=partial(12, 6, ratio))).recomputed_tokens
        for ratio in (0.0, 0.25, 0.75)
    ]
    assert counts[0] < counts[1] < counts[2] < plain.recomputed_tokens


def test_an_answer_is_the_same_among_strangers(bench) -> None:
    def requests() -> list:
        policies = [partial(), partial(9, 4, 0.5), Policy(name="none"), Policy(name="dual"), partial(2, 2, 0.1)]
        return [
            ask(f"r{i}", f"what is left of {i}?", max_new_tokens=(9, 16, 21)[i % 3], recompute=policies[i % 5])
            for i in range(15)
        ]

    alone: Bench = bench(tiny_model(vision=False), stages="inline")
    expected = {r.id: (alone.ask(r).recomputed_tokens, alone.canvases[r.id][0].tolist()) for r in requests()}
    together: Bench = bench(tiny_model(vision=False))
    calls = together.submit(*reversed(requests()))
    found = {c.request.id: (c.finished().recomputed_tokens, together.canvases[c.request.id][0].tolist()) for c in calls}
    assert found == expected


def test_a_failure_beside_it_does_not_change_an_answer(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that failed has written keys and values already; the one that repeats it must run the same rows."""
    from mmserve.decode import propose

    policy, real = partial(100, 20, 0.2), propose.candidates
    alone: Bench = bench(tiny_model(vision=False), stages="inline")
    good = ask("good", "what is left of it?", max_new_tokens=24, recompute=policy)
    expected = (alone.ask(good).recomputed_tokens, alone.canvases["good"][0].tolist())
    bad_size = len(alone.canvases["good"][0]) + 7
    b: Bench = bench(tiny_model(vision=False), stages="inline")

    def poisoned(logits, positions, canvas, *rest, **named):
        if canvas.size == bad_size and canvas.step >= 3:
            raise RuntimeError("poisoned")
        return real(logits, positions, canvas, *rest, **named)

    monkeypatch.setattr(propose, "candidates", poisoned)
    bad = ask("bad", "what is left of it?", max_new_tokens=31, recompute=policy)
    calls = b.submit(bad, good)
    assert isinstance(calls[0].error(), Internal)
    assert (calls[1].finished().recomputed_tokens, b.canvases["good"][0].tolist()) == expected
    b.await_nothing_left()


def test_changes_are_those_of_the_second_layers_values() -> None:
    """Against the layers run one by one over the dense row, after a token has been replaced."""
    model = tiny_model(vision=False)
    decoder, size = model.decoder, 13
    store = KVStore(decoder.config, pages=4, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    pages = np.array([2, 0, 3, 1])
    positions = torch.arange(size)
    before = decoder.embed(torch.arange(20, 20 + size))
    after = before.clone()
    after[6] = decoder.embed(torch.tensor(99))

    def second_layer(x: torch.Tensor) -> torch.Tensor:
        return decoder.values_of_second_layer(x[None], positions[None], dense_attention())[0]

    with torch.inference_mode():
        ragged = store.ragged([np.arange(size)], [pages], [size])
        decoder(before, positions, store.attend(ragged))
        canvas = blank(3, size - 3, 5)
        asked = np.array([3, 4, 6, 7, 12])
        watch = Watch(canvas, pages, after, asked)
        [changes] = value_changes(model, store, [watch], 8)
        # keys and values of the first layer at 6 are the new token's for every position that looks there
        expected = 1 - torch.cosine_similarity(second_layer(after).flatten(1), second_layer(before).flatten(1))
    assert np.abs(changes - expected[asked].numpy()).max() < 1e-5
    assert changes[2] > 10 * np.delete(changes, 2).max() or changes.argmax() == 2


def test_what_changed_most_is_run() -> None:
    canvas = blank(4, 12, 4)
    canvas.step = 1
    policy = Adaptive(prompt_refresh=8, response_refresh=4, ratio=0.25)
    changes = np.linspace(0, 1, 12, dtype=np.float32)
    assert policy.watched(canvas).tolist() == list(range(4, 16))
    assert policy.rows(canvas, changes).tolist() == [4, 5, 6, 7, 13, 14, 15]  # the block, then the most changed
    canvas.step = 4
    assert len(policy.watched(canvas)) == 0
    assert policy.rows(canvas).tolist() == list(range(4, 16))
    canvas.step = 8
    assert policy.rows(canvas).tolist() == list(range(16))


@pytest.mark.parametrize("numbers", [{"prompt_refresh": 0}, {"response_refresh": 0}, {"ratio": -0.1}, {"ratio": 1.1}])
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Adaptive(**numbers)
