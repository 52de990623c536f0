"""Every recompute policy with every commit policy, through the real engine, against the plain oracle.

Equal means the whole history: each position's token, the step it was committed at, and what the steps cost.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from harness import Bench, Call
from helpers import ask, dkv, picture, threshold
from plain_decoding import History, block_counts, plain_decoding

from mmserve.config import ModelConfig
from mmserve.core.canvas import MASKED
from mmserve.core.events import Finished
from mmserve.core.request import Policy, Request
from mmserve.models.base import LoadedModel
from mmserve.models.registry import load_model

Make = Callable[..., Bench]


def policy(name: str, base: Policy | None = None, **options: float | str) -> Policy:
    return Policy(name=name, options=options, base=base)


RECOMPUTES = [
    policy("none"),
    policy("prefix"),
    policy("dual"),
    policy("dkv_decode"),
    policy("dkv_decode", refresh=3),
    policy("dkv_greedy"),
    policy("dkv_greedy", refresh=3, window=0),
    policy("dkv_greedy", refresh=100, window=1),
    policy("free_cache"),
]
#: Numbers that fit the tiny model: its candidates have probabilities of 0.1 to 0.8, gaps of 0 to 3 and 1 to 4 nats.
BASES = [
    policy("low_confidence"),
    policy("random"),
    policy("threshold", confidence=0.3),
    policy("factor", factor=2.0),
    policy("confident", confidence=0.4),
    policy("entropy_bound", bound=6.0),
]
GAPS = {"early": 0.9, "middle": 0.7, "late": 0.5}
COMMITS = [
    *BASES,
    policy("early_commit", **GAPS),
    policy("early_commit", policy("threshold", confidence=0.35), **GAPS, answer_start=3, answer_length=4),
    policy("early_commit", policy("random"), **GAPS, answer_start=6, answer_length=100),
    policy("early_commit", **GAPS, answer_after="e"),
    policy("early_commit", policy("threshold", confidence=0.35), **GAPS, answer_after="a", answer_length=5),
    policy("early_commit", mistakes=2.0, answer_length=100),
]
#: Policies that take as many steps as the request asks for, or one a block, and no more.
SCHEDULED = {"low_confidence", "random"}
#: (new tokens, block length, steps, images, temperature, repetition penalty)
SHAPES = [
    (13, 5, 0, 0, 0.0, 1.0),
    (13, 5, 4, 0, 0.0, 1.0),
    (13, 5, 9, 1, 0.8, 1.0),
    (16, 16, 6, 0, 0.0, 1.4),
    (19, 8, 30, 0, 0.0, 1.0),
    (14, 4, 6, 0, 1.2, 0.8),
    (7, 32, 3, 0, 0.0, 1.0),
    (1, 1, 0, 0, 0.0, 1.0),
]


def name_of(p: Policy) -> str:
    numbers = ",".join(value if isinstance(value, str) else f"{value:g}" for value in p.options.values())
    return f"{p.name}({numbers})" + (f"[{name_of(p.base)}]" if p.base else "")


def asked(name: str, recompute: Policy, commit: Policy, **options: Any) -> Request:
    """A request that wants its tokens' log-probabilities."""
    request = ask(name, recompute=recompute, commit=commit, **options)
    return dataclasses.replace(request, streaming=dataclasses.replace(request.streaming, tokens=True))


def requests_of(recompute: Policy, commit: Policy, shapes: Sequence[int] = range(len(SHAPES))) -> list[Request]:
    """One for each of the shapes; their prompts and seeds differ."""
    which = f"{name_of(recompute)} {name_of(commit)}"
    return [
        asked(
            f"{which} {shape}",
            recompute,
            commit,
            text=f"{'a red circle ' * (index % 3)}{which} {index}?",
            images=tuple(picture(index) for _ in range(images)),
            max_new_tokens=new,
            block=block,
            steps=steps,
            temperature=temperature,
            repetition_penalty=penalty,
            frequency_penalty=penalty - 1,
            presence_penalty=(penalty - 1) / 2 if index % 2 else 0.0,
            logit_bias={5: 3.0, 9: -100.0} if index % 3 == 2 else {},
            seed=index,
        )
        for index in shapes
        for shape in [SHAPES[index]]
        for new, block, steps, images, temperature, penalty in [shape]
    ]


def plain(bench: Bench, model: LoadedModel, request: Request) -> History:
    [encoded] = bench.engine.stages.encoder.encode([request])
    return plain_decoding(model, encoded, request)


@pytest.fixture(scope="module")
def shared(model: LoadedModel) -> Iterator[Bench]:
    """One engine for all requests of the tests that do not look at batches."""
    bench = Bench(model)
    yield bench
    bench.close()


def most_steps(request: Request) -> int:
    """The forward passes that a request may take at the very most."""
    new = request.sampling.max_new_tokens
    commit = request.diffusion.commit
    base = commit.base.name if commit.base else "low_confidence"
    if (base if commit.name == "early_commit" else commit.name) not in SCHEDULED:
        return new
    counts = block_counts(new, min(request.diffusion.block_length, new), request.diffusion.steps)
    assert sum(map(len, counts)) <= max(request.diffusion.steps or new, len(counts))
    return sum(map(len, counts))


# --- the engine against the oracle ---


@pytest.mark.parametrize("commit", COMMITS, ids=name_of)
@pytest.mark.parametrize("recompute", RECOMPUTES, ids=name_of)
def test_a_canvas_has_the_oracles_history(shared: Bench, model: LoadedModel, recompute: Policy, commit: Policy) -> None:
    """Each pair of policies with one shape, so that each policy has all of them, and another after close draws."""
    first = RECOMPUTES.index(recompute) + COMMITS.index(commit)
    shapes = [(first + step) % len(SHAPES) for step in (0, 3)]
    assert any(compare_histories(shared, model, requests_of(recompute, commit, [shape])) == 0 for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("commit", COMMITS, ids=name_of)
@pytest.mark.parametrize("recompute", RECOMPUTES, ids=name_of)
def test_a_canvas_of_any_shape_has_the_oracles_history(
    shared: Bench, model: LoadedModel, recompute: Policy, commit: Policy
) -> None:
    assert compare_histories(shared, model, requests_of(recompute, commit)) <= len(SHAPES) / 2


def compare_histories(shared: Bench, model: LoadedModel, requests: list[Request]) -> int:
    """How many were drawn so closely that they say nothing."""
    calls, ties = shared.submit(*requests), 0
    for call in calls:
        done, request = call.finished(), call.request
        expected = plain(shared, model, request)
        tokens, committed = shared.canvases[request.id]
        if expected.tied:
            ties += 1
            continue
        assert committed.tolist() == expected.committed_at.tolist(), request.id
        assert tokens.tolist() == expected.tokens.tolist(), request.id
        assert done.forwards == len(expected.steps)
        assert done.recomputed_tokens == expected.recomputed
        assert done.forwards <= most_steps(request)
        compare_tokens(model, done, expected)
    shared.await_nothing_left()
    return ties


def compare_tokens(model: LoadedModel, done: Finished, expected: History) -> None:
    """The answer's tokens, as they come with ``streaming.tokens``, are the oracle's."""
    assert len(done.tokens) == done.usage.completion_tokens
    assert model.tokenizer.decode([t.id for t in done.tokens], skip_special_tokens=True) == done.text
    for position, token in enumerate(done.tokens, expected.prompt_length):
        assert token.id == expected.tokens[position]
        assert token.step == expected.committed_at[position]
        assert token.text == model.tokenizer.decode([token.id])
        assert token.log_probability == pytest.approx(expected.log_probability(position), abs=1e-4)
        assert token.log_probability <= 0


def test_the_oracle_sees_a_difference_between_any_two_policies(model: LoadedModel, shared: Bench) -> None:
    """The comparison would be worth little if all policies gave the same history."""
    options: dict[str, Any] = {"text": "two shapes", "max_new_tokens": 24, "block": 12, "steps": 12}
    histories = {}
    for recompute, commit in itertools.product(RECOMPUTES, BASES[:3]):
        h = plain(shared, model, asked("r", recompute, commit, **options))
        histories[name_of(recompute), commit.name] = (h.tokens.tolist(), h.committed_at.tolist(), h.recomputed)
    for first, second in itertools.combinations(histories, 2):
        assert histories[first] != histories[second], (first, second)
    canvases = {key: value[:2] for key, value in histories.items()}
    for commit in BASES[:3]:
        of_commit = [canvases[name_of(recompute), commit.name] for recompute in RECOMPUTES]
        assert len({str(c) for c in of_commit}) >= 7, "stale keys and values change what the model says"


def test_early_commit_does_commit_early(model: LoadedModel, shared: Bench) -> None:
    saved = []
    for commit in COMMITS[6:]:
        for request in requests_of(policy("none"), commit, range(1, 7, 2)):
            base = dataclasses.replace(request.diffusion, commit=commit.base or policy("low_confidence"))
            plainly = plain(shared, model, dataclasses.replace(request, diffusion=base))
            saved.append(len(plainly.steps) - len(plain(shared, model, request).steps))
    assert min(saved) >= 0
    assert sum(s > 2 for s in saved) >= 6


# --- identities ---


def history(bench: Bench, request: Request) -> tuple[list[int], list[int], int, int, list[float]]:
    """What comes of a request alone, with its log-probabilities."""
    [call] = bench.submit(request)
    return of(bench, call)


def histories(bench: Bench, requests: Iterable[Request]) -> list[tuple[list[int], list[int], int, int, list[float]]]:
    """The answers to the requests, which may share batches."""
    calls = bench.submit(*(dataclasses.replace(r, id=f"{r.id}.{i}") for i, r in enumerate(requests)))
    return [of(bench, call) for call in calls]


def of(bench: Bench, call: Call) -> tuple[list[int], list[int], int, int, list[float]]:
    done = call.finished()
    tokens, committed = bench.canvases.pop(call.request.id)
    log_probabilities = [t.log_probability for t in done.tokens]
    return tokens.tolist(), committed.tolist(), done.forwards, done.recomputed_tokens, log_probabilities


VARIED: list[dict[str, Any]] = [
    {"max_new_tokens": 13, "block": 5, "steps": 0, "temperature": 0.0, "seed": 3},
    {"max_new_tokens": 22, "block": 9, "steps": 8, "temperature": 0.0, "seed": 4, "text": "left of the square"},
    {"max_new_tokens": 16, "block": 32, "steps": 7, "temperature": 0.9, "seed": 5, "top_p": 0.95},
    {"max_new_tokens": 11, "block": 4, "steps": 6, "temperature": 1.5, "seed": 6, "images": (picture(3),)},
]


def every_other(policies: Sequence[Policy]) -> list[Any]:
    """Each of the policies with half of ``VARIED``; the other halves are slow tests."""
    return [
        pytest.param(one, options, marks=[pytest.mark.slow] if (i + j) % 2 else [], id=f"{name_of(one)} {j}")
        for i, one in enumerate(policies)
        for j, options in enumerate(VARIED)
    ]


@pytest.mark.parametrize(("commit", "options"), every_other(COMMITS))
def test_a_refresh_at_every_step_is_no_cache(shared: Bench, commit: Policy, options: dict[str, Any]) -> None:
    recomputes = policy("none"), dkv(1), policy("dkv_greedy", refresh=1)
    expected, *found = histories(shared, (asked("r", recompute, commit, **options) for recompute in recomputes))
    assert found == [expected] * 2


@pytest.mark.parametrize(("recompute", "options"), every_other([RECOMPUTES[i] for i in (0, 2, 6)]))
def test_early_commit_with_infinite_gaps_is_its_base(shared: Bench, recompute: Policy, options: dict[str, Any]) -> None:
    """Of the block, and of an answer that is the whole canvas: none of it is final before all of it is."""
    never = {"early": math.inf, "middle": math.inf, "late": math.inf}
    answers: tuple[dict[str, float], ...] = ({}, {"answer_start": 0, "answer_length": options["max_new_tokens"]})
    for base in BASES:
        commits = base, *(policy("early_commit", base, **never, **answer) for answer in answers)
        expected, *found = histories(shared, (asked("r", recompute, commit, **options) for commit in commits))
        assert found == [expected] * 2, base


@pytest.mark.parametrize(("recompute", "options"), every_other(RECOMPUTES[1::2]))
def test_policies_that_take_one_token_a_step_are_low_confidence(
    shared: Bench, recompute: Policy, options: dict[str, Any]
) -> None:
    """A threshold above 1, certainty where there is none, a factor of next to nothing."""
    options = {**options, "steps": 0}
    same = threshold(1.5), policy("confident", confidence=1.0), policy("factor", factor=1e-9)
    commits = policy("low_confidence"), *same, policy("entropy_bound", bound=0.0)
    expected, *found, bound = histories(shared, (asked("r", recompute, commit, **options) for commit in commits))
    if MASKED not in expected[1]:
        assert expected[2] == options["max_new_tokens"]
    assert found == [expected] * 3
    assert bound[2] == options["max_new_tokens"] or MASKED in expected[1]


@pytest.mark.parametrize("steps", [1, 6, 12, 40])
def test_confident_of_one_is_low_confidence_where_steps_divide_the_block(shared: Bench, steps: int) -> None:
    """Where they do not, Dimple spreads the remainder over the steps, and LLaDA puts it first."""
    commits = policy("confident", confidence=1.0), policy("low_confidence")
    options: dict[str, Any] = {"max_new_tokens": 24, "block": 8, "steps": steps}
    certain, plainly = (
        histories(shared, (asked("r", recompute, commit, **options) for recompute in RECOMPUTES)) for commit in commits
    )
    assert certain == plainly


def test_confident_takes_no_more_steps_than_were_asked_for(shared: Bench) -> None:
    for i, recompute in enumerate(RECOMPUTES):
        confident, shapes = policy("confident", confidence=0.4), range(i % 2, len(SHAPES), 2)
        commits = confident, policy("early_commit", confident)
        requests = [request for commit in commits for request in requests_of(recompute, commit, shapes)]
        for call in shared.submit(*requests):
            request = call.request
            counts = block_counts(
                request.sampling.max_new_tokens, request.diffusion.block_length, request.diffusion.steps
            )
            assert call.finished().forwards <= sum(map(len, counts)), request.id


def test_gaps_of_minus_infinity_commit_the_block_or_all_at_once(shared: Bench) -> None:
    always = {"early": -math.inf, "middle": -math.inf, "late": -math.inf}
    for recompute in RECOMPUTES:
        options = {"max_new_tokens": 13, "block": 5}
        assert history(shared, asked("r", recompute, policy("early_commit", **always), **options))[2] <= 3
        answer = policy("early_commit", **always, answer_start=11, answer_length=1)
        assert history(shared, asked("r", recompute, answer, **options))[2] == 1


@pytest.mark.parametrize(
    ("new", "block", "steps", "recompute"),
    [
        pytest.param(*shape, recompute, marks=[pytest.mark.slow] if (i + j) % 2 else [], id=f"{i} {name_of(recompute)}")
        for i, shape in enumerate([(13, 5, 0), (13, 5, 6), (16, 16, 5), (24, 8, 30)])
        for j, recompute in enumerate(RECOMPUTES)
    ],
)
def test_random_commits_the_schedule_in_an_order_that_only_the_seed_decides(
    shared: Bench, recompute: Policy, new: int, block: int, steps: int
) -> None:
    options: dict[str, Any] = {"max_new_tokens": new, "block": block, "steps": steps, "temperature": 0.0}
    orders = {}
    seeds = (1, 2, 1)
    found = histories(shared, (asked("r", recompute, policy("random"), seed=seed, **options) for seed in seeds))
    for seed, (_tokens, committed, forwards, _run, _logs) in zip(seeds, found, strict=True):
        committed = committed[-new:]
        counts = list(itertools.chain(*block_counts(new, block, steps)))
        final = [committed.count(step) for step in range(1, forwards + 1)]
        assert final == counts[:forwards]
        if MASKED not in committed:
            assert orders.setdefault(seed, committed) == committed
    if len(orders) > 1:
        assert orders[1] != orders[2]


# --- the answer's tokens ---


def test_tokens_end_with_the_answer(bench: Make, shared: Bench, model: LoadedModel) -> None:
    """The end token is none of them, nor is what stands right of it."""
    request = asked("r", policy("dual"), threshold(0.3), text="an end", max_new_tokens=24, block=8)
    tokens = plain(shared, model, request)
    answer = tokens.tokens[tokens.prompt_length :].tolist()
    end = next(t for i, t in enumerate(answer) if 4 < i < 14 and t not in answer[:i])
    ending = dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({end})))
    b = bench(ending, stages="inline")
    done = b.ask(request)
    assert done.reason == "end"
    assert [t.id for t in done.tokens] == answer[: answer.index(end)]
    compare_tokens(ending, done, plain(b, ending, request))


def test_tokens_reach_to_the_one_that_completes_a_stop_string(shared: Bench, model: LoadedModel) -> None:
    request = asked("r", policy("none"), policy("random"), text="stop here", max_new_tokens=24, block=6, seed=2)
    free = shared.ask(request)
    pairs = (free.text[at : at + 2] for at in range(5, len(free.text)))
    stop = next(p for p in pairs if "\N{REPLACEMENT CHARACTER}" not in p and p.strip() and p not in free.text[:5])
    shared.canvases.pop("r")
    done = shared.ask(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=(stop,))))
    assert done.reason == "stop"
    assert len(done.tokens) == done.usage.completion_tokens < len(free.tokens)
    assert done.tokens == free.tokens[: len(done.tokens)]
    whole = model.tokenizer.decode([t.id for t in done.tokens], skip_special_tokens=True)
    assert whole.startswith(done.text + stop)
    shared.canvases.pop("r")


def test_requests_that_do_not_ask_get_no_tokens(shared: Bench) -> None:
    assert shared.ask(ask("quiet")).tokens == ()


def test_a_step_commits_something_whatever_the_penalty(shared: Bench) -> None:
    entropy, penalty = policy("entropy_bound"), 1e-39
    done = shared.ask(ask("nan", commit=entropy, max_new_tokens=8, block=8, repetition_penalty=penalty))
    assert 1 <= done.forwards <= 8


def test_what_fills_a_canvas_after_the_answers_end_is_not_penalised(bench: Make) -> None:
    b = bench(load_model(ModelConfig(path="bundled", device="cpu")))
    question = "Describe a red circle."  # without a picture, which the model leaves unanswered
    said = [
        b.ask(ask(f"r{penalty}", question, max_new_tokens=32, block=32, frequency_penalty=penalty)).text
        for penalty in (0.0, 0.5)
    ]
    assert said == ["", ""]


# --- company ---


def strangers() -> list[Request]:
    """Requests of all policies, with sizes, seeds and prompts of their own."""
    return [
        asked(
            f"s{i}",
            RECOMPUTES[i % len(RECOMPUTES)],
            COMMITS[(i + i // len(RECOMPUTES)) % len(COMMITS)],
            text=f"{'the square ' * (i % 4)}{i}",
            images=(picture(i),) if i % 5 == 0 else (),
            max_new_tokens=[9, 16, 1, 13, 24][i % 5],
            block=[4, 16, 5, 0][i % 4],
            steps=[0, 5, 11][i % 3],
            temperature=[0.0, 0.8][i % 2],
            min_p=[0.0, 0.1][i % 3 == 1],
            repetition_penalty=[1.0, 1.3][i % 4 == 2],
            frequency_penalty=[0.0, 0.7][i % 4 == 3],
            logit_bias={3: 2.0, 11: -5.0} if i % 7 == 3 else {},
            seed=i % 6,
        )
        for i in range(32)
    ]


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> dict[str, Any]:
    bench = Bench(model, stages="inline")
    results = {request.id: history(bench, request) for request in strangers()}
    bench.close()
    return results


def test_the_strangers_are_worth_comparing(alone: dict[str, Any]) -> None:
    requests = strangers()
    assert {r.diffusion.recompute.name for r in requests} == {r.name for r in RECOMPUTES}
    assert {r.diffusion.commit.name for r in requests} == {c.name for c in COMMITS}
    assert len({(name_of(r.diffusion.recompute), name_of(r.diffusion.commit)) for r in requests}) >= 24
    assert len({str(result) for result in alone.values()}) == 32


@pytest.mark.parametrize("order", ["forwards", "backwards", "one after another"])
def test_strangers_change_nothing(bench: Make, alone: dict[str, Any], order: str) -> None:
    b = bench(decode_tokens=600) if order == "one after another" else bench()
    requests = strangers() if order != "backwards" else strangers()[::-1]
    calls = (b.submit if order == "one after another" else b.submit_together)(*requests)
    for call in calls:
        assert of(b, call) == alone[call.request.id], call.request
    assert max(map(len, b.batches)) >= (2 if order == "one after another" else 8), "they did share batches"
    b.await_nothing_left()


def test_early_commit_scores_its_block_and_the_answer_until_it_is_sure(
    bench: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then once all that is left; until then the rest of a long canvas costs no logits."""
    scored: list[int] = []
    real = model.decoder.logits
    monkeypatch.setattr(model.decoder, "logits", lambda hidden, _: scored.append(len(hidden)) or real(hidden))
    b: Bench = bench(stages="inline", watch=False)
    for gap, last in ((1e9, 0), (-1e9, 56)):
        answer = policy("early_commit", early=1e9, middle=1e9, late=gap, answer_start=60, answer_length=4)
        scored.clear()
        done = b.ask(ask(f"{gap}", max_new_tokens=64, block=4, steps=64, commit=answer))
        assert done.forwards == (64 if not last else 43)
        assert sum(scored) <= 16 * done.forwards + last, "the fewest rows of a product may be 16"
