"""A companion that drafts for a next-token model or judges a diffusion model: plain tokens, whatever it is worth."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Bench
from helpers import ask, picture, tiny_model

from mmserve.core.request import Policy, Request, Stage
from mmserve.decode import runner
from mmserve.decode.extensions import draft_model
from mmserve.decode.extensions.base import extension_of
from mmserve.decode.extensions.draft_model import DraftModel
from mmserve.decode.recompute import FULL_ATTENTION
from mmserve.errors import Cancelled, FailedPrecondition, InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import dense_attention

Make = Callable[..., Bench]
LAST = Policy(name="last")
PROMPTS = ("red circle, red circle, red", "what is left of it? " * 4, "?")
KINDS = ("always", "sometimes", "never")


def draft(length: int = 4) -> Policy:
    return Policy(name="draft_model", options={"length": length})


def guided(**numbers: float) -> Policy:
    return Policy(name="guided", options=numbers)


def causal(seed: int, *, vision: bool = True) -> LoadedModel:
    made = tiny_model(vision=vision, seed=seed)
    spec = dataclasses.replace(made.spec, attention=Attention.CAUSAL, logit_shift=1, end_ids=frozenset({-1}))
    return dataclasses.replace(made, spec=spec)


@torch.no_grad()
def like(model: LoadedModel, kind: str) -> LoadedModel:
    """A causal model that agrees with a causal ``model`` always, sometimes, or never: its last choice is its first."""
    decoder = copy.deepcopy(model.decoder)
    if kind == "never":
        decoder.head.weight.neg_()
    if kind == "sometimes":
        generator = torch.Generator().manual_seed(1)
        decoder.head.weight += torch.randn(decoder.head.weight.shape, generator=generator) * 0.15
    return dataclasses.replace(model, decoder=decoder)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    """A next-token model."""
    return causal(3)


@pytest.fixture(scope="module")
def diffusion() -> LoadedModel:
    """A diffusion model beside an unlike next-token model; they have five tokens to choose from, so that they agree
    now and then."""
    made = tiny_model(vision=True, seed=4)
    banned = tuple(i for i in range(made.decoder.config.vocab_size) if i not in range(70, 75))
    spec = dataclasses.replace(made.spec, end_ids=frozenset({-1}), banned_ids=banned)
    return dataclasses.replace(made, spec=spec, companion=causal(3))


def accompanied(model: LoadedModel, kind: str) -> LoadedModel:
    return dataclasses.replace(model, companion=like(model, kind))


def tokens_of(bench: Bench, name: str) -> list[int]:
    return bench.canvases[name][0].tolist()


# --- a plain loop: dense attention, no cache, one request ---


class Plain:
    """A request's prompt as two models see it, and dense passes over it and what follows it."""

    def __init__(self, model: LoadedModel, bench: Bench, request: Request) -> None:
        [self.encoded] = bench.engine.stages.encoder.encode([request])
        self.model, self.ids = model, self.encoded.ids

    @torch.no_grad()
    def logits(self, answer: list[int], *, beside: bool) -> torch.Tensor:
        """``[N, V]`` of prompt and ``answer``, of the model or of the one beside it, fp64, impossible tokens out."""
        model = self.model.companion if beside else self.model
        assert model is not None
        features = self.encoded.companion_features if beside else self.encoded.features
        row = model.decoder.embed(torch.tensor([*self.ids.tolist(), *answer]))
        if features is not None:
            row[torch.from_numpy(self.encoded.image_rows)] = features
        seen = torch.ones(len(row), len(row), dtype=torch.bool)
        mask = seen.tril() if model.spec.attention is Attention.CAUSAL else seen
        hidden = model.decoder(row[None], torch.arange(len(row))[None], dense_attention(mask[None, None]))
        logits = model.decoder.logits(hidden)[0].double()
        logits[:, list(self.model.spec.banned_ids)] = -torch.inf
        return logits

    def greedy(self, count: int, *, beside: bool) -> list[int]:
        answer: list[int] = []
        while len(answer) < count:
            answer.append(int(self.logits(answer, beside=beside)[-1].argmax()))
        return answer

    def guided(self, count: int, block: int, top_k: int, ratio: float) -> tuple[list[int], list[int]]:
        """The answer, and after how many passes each of its tokens was known."""
        first, mask = len(self.ids), self.model.spec.mask_id
        answer: list[int] = []
        when: list[int] = []
        passes = 0
        while len(answer) < count:
            passes += 1
            end = min((len(answer) // block + 1) * block, count)
            masked = [*answer, *[mask] * (count - len(answer))]
            drafted = self.logits(masked, beside=False)[first + len(answer) : first + end].argmax(-1).tolist()
            says = self.logits([*answer, *drafted], beside=True)[first + len(answer) - 1 :]
            for token, scores in zip(drafted, says, strict=False):
                order, p = scores.argsort(descending=True).tolist(), scores.softmax(-1)
                best = order[0]
                fine = token in order[:top_k] and p[token] >= ratio * p[best] if top_k else token == best
                answer.append(token if fine else best)
                when.append(passes)
                if not fine:
                    break
        return answer, when


# --- draft_model ---


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_change_the_plain_greedy_tokens(bench: Make, target: LoadedModel, kind: str) -> None:
    b = bench(accompanied(target, kind), stages="inline")
    companion, passes = extension_of(b.engine.stages.decoder.parts.extensions, DraftModel), list[int]()
    saved = dict.fromkeys((1, 3, 7), 0)
    run = companion._forward
    companion._forward = lambda parts: passes.append(len(parts)) or run(parts)
    for i, prompt in enumerate(PROMPTS):
        given: dict[str, Any] = {"images": (picture(i),) * (i % 2), "max_new_tokens": 15, "recompute": LAST}
        plain = b.ask(ask(f"p{i}", prompt, **given))
        assert plain.companion_forwards == 0 and plain.forwards == 15
        for length in saved:
            passes.clear()
            fast = b.ask(ask(f"f{i} {length}", prompt, commit=draft(length), **given))
            assert fast.companion_forwards == sum(passes)
            assert tokens_of(b, f"f{i} {length}") == tokens_of(b, f"p{i}")
            assert fast.text == plain.text
            saved[length] += plain.forwards - fast.forwards
            if kind == "always":
                assert fast.forwards == 1 + -(-14 // (length + 1))
    assert all((each == 0) == (kind == "never") for each in saved.values())


def test_draft_model_gives_the_tokens_of_dense_passes_without_a_cache(bench: Make, target: LoadedModel) -> None:
    b = bench(accompanied(target, "sometimes"), stages="inline")
    request = ask("x", PROMPTS[0], images=(picture(2),), max_new_tokens=20, recompute=LAST, commit=draft(3))
    b.ask(request)
    plain = Plain(b.engine.stages.model, b, request)
    assert tokens_of(b, "x")[len(plain.ids) :] == plain.greedy(20, beside=False)


@pytest.mark.parametrize("chunk", [1, 7, 25, 10_000])
def test_the_companion_reads_a_prompt_in_the_chunks_of_its_model(bench: Make, target: LoadedModel, chunk: int) -> None:
    whole = bench(accompanied(target, "sometimes"), stages="inline")
    expected = whole.ask(ask("x", PROMPTS[1], max_new_tokens=9, recompute=LAST, commit=draft()))
    b = bench(accompanied(target, "sometimes"), stages="inline", prefill_tokens=chunk)
    sizes = companion_rows(b)
    found = b.ask(ask("x", PROMPTS[1], max_new_tokens=9, recompute=LAST, commit=draft()))
    assert tokens_of(b, "x") == tokens_of(whole, "x") and found.forwards == expected.forwards
    prompt = found.usage.prompt_tokens
    chunks = -(-prompt // chunk)
    assert sum(sizes[:chunks]) == prompt and max(sizes[:chunks]) <= chunk
    assert max(sizes[chunks:]) <= 6, "of what it has seen it runs no more than the row that it asks"


def test_an_end_of_text_ends_a_draft(bench: Make, target: LoadedModel) -> None:
    b = bench(accompanied(target, "always"), stages="inline")
    b.ask(ask("plain", PROMPTS[0], max_new_tokens=12, recompute=LAST))
    fourth = tokens_of(b, "plain")[-12:][3]
    ends = dataclasses.replace(target.spec, end_ids=frozenset({fourth}))
    made = dataclasses.replace(target, spec=ends)
    b = bench(accompanied(made, "always"), stages="inline")
    sizes = companion_rows(b)
    done = b.ask(ask("x", PROMPTS[0], max_new_tokens=12, recompute=LAST, commit=draft(9)))
    assert done.reason == "end" and done.forwards <= 2
    assert len(sizes) <= 1 + 3, "the prompt, and three tokens at most"


# --- guided ---


@pytest.mark.parametrize(
    ("block", "top_k", "ratio"), [(8, 0, 0.5), (23, 0, 0.5), (5, 3, 0.1), (23, 5, 0.0), (8, 2, 1.0)]
)
def test_guided_is_the_plain_loop_alone_and_in_a_batch(
    bench: Make, diffusion: LoadedModel, block: int, top_k: int, ratio: float
) -> None:
    def requests() -> list[Request]:
        return [
            ask(
                f"r{i}",
                prompt,
                images=tuple(picture(10 * i + j) for j in range(i)),
                max_new_tokens=(23, 9, 16)[i],
                block=block,
                commit=guided(top_k=top_k, ratio=ratio),
            )
            for i, prompt in enumerate(PROMPTS)
        ]

    alone, together = bench(diffusion, stages="inline"), bench(diffusion)
    poison(together)
    strangers = [ask(f"s{i}", f"{i}", max_new_tokens=12, block=6) for i in range(3)]
    calls = together.submit(*strangers, *requests())
    steps: list[int] = []
    for request, call in zip(requests(), calls[3:], strict=True):
        new = request.sampling.max_new_tokens
        answer, when = Plain(diffusion, alone, request).guided(new, min(block, new), top_k, ratio)
        alone.ask(request)
        call.finished()
        for b in (alone, together):
            tokens, committed = b.canvases[request.id]
            assert tokens[-new:].tolist() == answer
            assert committed[-new:].tolist() == when
        steps.append(new - when[-1])
    assert sum(steps) > 0, "some drafts were taken"


@pytest.mark.parametrize("recompute", FULL_ATTENTION)
def test_deterministic_guided_says_what_the_companion_says(bench: Make, diffusion: LoadedModel, recompute: str) -> None:
    """Whatever was drafted: the cache policy may lessen the draft's worth, and even leave the first mask out of it."""
    b = bench(diffusion, stages="inline")
    for i, prompt in enumerate(PROMPTS):
        images = (picture(i),) * (i % 2)
        request = ask(
            f"{i}", prompt, images=images, max_new_tokens=14, recompute=Policy(name=recompute), commit=guided()
        )
        done = b.ask(request)
        plain = Plain(diffusion, b, request)
        assert tokens_of(b, f"{i}")[len(plain.ids) :] == plain.greedy(14, beside=True)
        assert done.forwards <= 14


def test_a_good_draft_is_kept_whole(bench: Make, target: LoadedModel) -> None:
    """A block diffusion model whose every first draft the companion takes: a pass a block."""
    spec = dataclasses.replace(target.spec, attention=Attention.BLOCK_CAUSAL, default_block_length=4, logit_shift=0)
    made = dataclasses.replace(target, spec=spec, companion=target)
    b = bench(made, stages="inline")
    block = Policy(name="block")
    done = b.ask(ask("x", max_new_tokens=16, recompute=block, commit=guided(top_k=10_000, ratio=0)))
    first = 4 - done.usage.prompt_tokens % 4
    assert done.forwards == 1 + -(-(16 - first) // 4)
    request = ask("y", max_new_tokens=16, recompute=block, commit=guided())
    b.ask(request)
    plain = Plain(made, b, request)
    assert tokens_of(b, "y")[-16:] == plain.greedy(16, beside=True)


# --- both ---


def mixed(policies: tuple[Policy | None, ...], recompute: tuple[str, ...]) -> list[Request]:
    return [
        ask(
            f"r{i}",
            PROMPTS[i % 3] + f" {i}",
            images=tuple(picture(i) for _ in range(i % 2)),
            max_new_tokens=(7, 16, 25)[i % 3],
            recompute=Policy(name=recompute[i % len(recompute)]),
            commit=policies[i % len(policies)],
            temperature=(0.0, 0.8)[i // 2 % 2],
            top_k=(0, 30)[i % 2],
            seed=i,
        )
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, tuple[int, list[int]]]]:
    """Passes and tokens of each kind of model's requests, each alone; filled as they are first asked for."""
    return {}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("diffusion", {}),
        ("causal", {"page_size": 1, "decode_tokens": 100}),
        ("diffusion", {"max_running": 3, "stages": "inline"}),
        pytest.param("causal", {}, marks=pytest.mark.slow),
        pytest.param("diffusion", {"page_size": 1, "decode_tokens": 100}, marks=pytest.mark.slow),
        pytest.param("causal", {"max_running": 3, "stages": "inline"}, marks=pytest.mark.slow),
    ],
)
def test_an_answer_is_the_same_among_strangers(
    bench: Make,
    target: LoadedModel,
    diffusion: LoadedModel,
    alone: dict[str, dict[str, tuple[int, list[int]]]],
    kind: str,
    config: dict[str, Any],
) -> None:
    if kind == "diffusion":
        model, policies = diffusion, (None, guided(), guided(top_k=3, ratio=0.1))
        requests = mixed(policies, ("none", "prefix", "dkv_decode", "dual"))
    else:
        model, policies = accompanied(target, "sometimes"), (draft(), draft(1), None, draft(7), Policy(name="ngram"))
        requests = mixed(policies, ("last", "last", "none"))
    if kind not in alone:
        one = bench(model, stages="inline")
        alone[kind] = {r.id: (one.ask(r).forwards, tokens_of(one, r.id)) for r in requests}
    together = bench(model, **config)
    poison(together)
    calls = together.submit(*reversed(requests))
    found = {c.request.id: (c.finished().forwards, tokens_of(together, c.request.id)) for c in calls}
    assert found == alone[kind]
    together.await_nothing_left()


@pytest.mark.parametrize("policy", [draft(), guided(), guided(top_k=3, ratio=0.1)], ids=lambda p: p.name)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_pass_that_failed_is_repeated(
    bench: Make,
    target: LoadedModel,
    diffusion: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    when: str,
) -> None:
    """Passes of more than one request fail, before or after they wrote their K/V; each alone is then the same."""
    model = diffusion if policy.name == "guided" else accompanied(target, "sometimes")
    recompute = Policy(name="none") if policy.name == "guided" else LAST

    def requests() -> list[Request]:
        given: dict[str, Any] = {"max_new_tokens": 12, "recompute": recompute, "commit": policy, "temperature": 0.5}
        return [ask(f"r{i}", PROMPTS[i], seed=i, **given) for i in range(3)]

    b = bench(model, stages="inline")
    expected = {r.id: (b.ask(r).text, tokens_of(b, r.id)) for r in requests()}
    real = runner.forward
    failed = dict.fromkeys(("served", "companion"), 0)

    def poisoned(model_: LoadedModel, store: Any, batch: list[Any], floor: int, **options: Any) -> Any:
        if len(batch) < 2:
            return real(model_, store, batch, floor, **options)
        failed["companion" if model_ is model.companion else "served"] += 1
        if when == "behind":
            real(model_, store, batch, floor, **options)
        raise RuntimeError("only alone")

    b = bench(model, stages="inline")
    monkeypatch.setattr(draft_model, "forward", poisoned)
    calls = b.submit(*requests())
    assert {c.request.id: (c.finished().text, tokens_of(b, c.request.id)) for c in calls} == expected
    assert failed["companion"] > 1
    b = bench(model, stages="inline")
    monkeypatch.setattr(runner, "forward", poisoned)
    calls = b.submit(*requests())
    assert {c.request.id: (c.finished().text, tokens_of(b, c.request.id)) for c in calls} == expected
    assert failed["served"] > 1


@pytest.mark.parametrize("name", ["draft_model", "guided"])
def test_what_is_drawn_is_drawn_from_the_right_distribution(
    bench: Make, target: LoadedModel, diffusion: LoadedModel, name: str
) -> None:
    """Three tokens of two choices each, 200 seeds: as often as the model's probabilities, or its companion's."""
    model, beside = (diffusion, True) if name == "guided" else (accompanied(target, "sometimes"), False)
    policy, recompute = (guided(), Policy(name="none")) if beside else (draft(2), LAST)
    b = bench(model, max_queued=200, stages="inline")
    given: dict[str, Any] = {"max_new_tokens": 3, "temperature": 2.0, "top_k": 2, "recompute": recompute}
    seeds = 200
    calls = b.submit(*(ask(f"{seed}", "?", seed=seed, commit=policy, **given) for seed in range(seeds)))
    counts: dict[tuple[int, ...], int] = {}
    passes = 0
    for call in calls:
        passes += call.finished().forwards
        answer = tuple(tokens_of(b, call.request.id)[-3:])
        counts[answer] = counts.get(answer, 0) + 1
    plain = Plain(model, b, ask("x", "?", **given))
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for answer, p in expected.items():
            scores, tokens = (plain.logits(list(answer), beside=beside)[-1] / 2.0).topk(2)
            for token, share in zip(tokens.tolist(), scores.softmax(-1).tolist(), strict=True):
                longer[(*answer, token)] = p * share
        expected = longer
    assert counts.keys() <= expected.keys()
    for answer, p in expected.items():
        sigma = (seeds * p * (1 - p)) ** 0.5
        assert abs(counts.get(answer, 0) - seeds * p) <= 4 * sigma + 1, (answer, counts, expected)
    assert passes < 3 * seeds, "some drafts were taken"


def test_a_companion_runs_only_what_it_has_not_seen(bench: Make, diffusion: LoadedModel) -> None:
    b = bench(diffusion, stages="inline")
    sizes = companion_rows(b)
    done = b.ask(ask("x", PROMPTS[1], max_new_tokens=24, block=8, commit=guided()))
    assert sizes[0] == done.usage.prompt_tokens
    assert len(sizes) == 1 + done.forwards and max(sizes[1:]) <= 9


def test_a_request_cancelled_between_its_passes_leaves_nothing(bench: Make, diffusion: LoadedModel) -> None:
    b = bench(diffusion)
    seen = itertools.count()
    gate = b.gate("decode", lambda _ids: next(seen) >= 2)
    [call] = b.submit(ask("x", max_new_tokens=30, commit=guided()))
    gate.wait()
    assert b.stage("x") is Stage.STEPPING
    b.engine.cancel("x")
    gate.open()
    assert isinstance(call.error(), Cancelled)
    b.await_nothing_left()


def test_log_probabilities_are_of_whoever_chose_the_token(bench: Make, diffusion: LoadedModel) -> None:
    b = bench(diffusion, stages="inline")
    request = ask("x", max_new_tokens=9, block=9, commit=guided())
    request = dataclasses.replace(request, streaming=dataclasses.replace(request.streaming, tokens=True))
    done = b.ask(request)
    plain = Plain(diffusion, b, request)
    answer = [t.id for t in done.tokens]
    first = answer[:1]
    says = plain.logits([], beside=True)[-1].log_softmax(-1)
    drafts = plain.logits([diffusion.spec.mask_id] * 9, beside=False)[-9].log_softmax(-1)
    judge = drafts if int(drafts.argmax()) == first[0] else says
    assert done.tokens[0].log_probability == pytest.approx(float(judge[first[0]]), abs=1e-4)


# --- what is refused ---


def test_without_a_companion_both_are_unimplemented(bench: Make, target: LoadedModel, model: LoadedModel) -> None:
    for made, policy in ((model, guided()), (target, draft())):
        b = bench(made)
        assert policy.name not in b.engine.info.commit_policies
        told = rf"has no commit policy '{policy.name}'.*needs a companion: name one in the model's entry under \[\[mod"
        with pytest.raises(Unimplemented, match=told):
            b.submit(ask("x", commit=policy, recompute=LAST if made is target else None))
    b = bench(accompanied(target, "always"))
    assert "draft_model" in b.engine.info.commit_policies
    with pytest.raises(Unimplemented, match=r"no commit policy 'guided'; it has [a-z_, ]+$"):
        b.submit(ask("x", commit=guided(), recompute=LAST))


@pytest.mark.parametrize("kind", ["guided", "draft_model"])
def test_changed_logits_are_refused(bench: Make, target: LoadedModel, diffusion: LoadedModel, kind: str) -> None:
    b = bench(diffusion if kind == "guided" else accompanied(target, "always"))
    changes: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.1, "logit_bias": {3: 1.0}}
    for name, value in changes.items():
        with pytest.raises(InvalidArgument, match=f"{name}: must not be set with the commit policy '{kind}'"):
            b.submit(ask("x", commit=Policy(name=kind), recompute=LAST, **{name: value}))


def test_a_blind_companion_judges_text_only(bench: Make, diffusion: LoadedModel) -> None:
    b = bench(dataclasses.replace(diffusion, companion=causal(3, vision=False)), stages="inline")
    assert b.ask(ask("text", commit=guided())).forwards
    [call] = b.submit(ask("image", images=(picture(1),), commit=guided()))
    error = call.error()
    assert isinstance(error, FailedPrecondition) and "which 'guided' needs, takes no images" in str(error)
    assert b.ask(ask("unguided", images=(picture(1),))).forwards


def poison(bench: Bench) -> None:
    """K/V that nobody has written is no number."""
    stages = bench.engine.stages
    assert extension_of(stages.decoder.parts.extensions, DraftModel) is not None
    for store in (stages.store, extension_of(stages.decoder.parts.extensions, DraftModel).store):
        for tensor in (*store.keys, *store.values):
            tensor.fill_(torch.nan)


def companion_rows(bench: Bench) -> list[int]:
    """Rows of each pass that the companion makes from now on."""
    beside = extension_of(bench.engine.stages.decoder.parts.extensions, DraftModel)
    assert beside is not None
    made, original = list[int](), beside._forward

    def watched(parts: list[Any]) -> Any:
        if parts:
            made.append(sum(len(beside._pass(part).rows) for part in parts))
        return original(parts)

    beside._forward = watched  # type: ignore[method-assign]
    return made
