"""Next-token models in the one loop: transformers' own tokens, one row a step, whoever else is in the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bench, Call
from helpers import ask, dkv, picture, threshold, tokenizer
from llama_checkpoints import SHAPES, Sighted, greedy, llama, load, save, without_special_tokens
from qwen_checkpoints import KINDS, qwen

from mmserve.core.encoded import Encoded
from mmserve.core.events import Finished, Prefilled
from mmserve.core.request import Diffusion, Message, Policy, Request, Streaming, TokensPart
from mmserve.encode.media import decode_image
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel
from mmserve.reference.tokenizer import IMAGE

Make = Callable[..., Bench]
Outcome = tuple[str, str, int, int, int, int, list[int], list[int]]
NONE, LAST = Policy(name="none"), Policy(name="last")


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Sighted:
    return Sighted(tmp_path_factory.mktemp("llava"), image_aspect_ratio="square")


@pytest.fixture(scope="module")
def causal(sighted: Sighted) -> LoadedModel:
    """The model under test: what it loads as is compared with ``sighted.oracle``."""
    return load(sighted.folder)


def say(name: str, *args: Any, **options: Any) -> Request:
    return ask(name, *args, **{"recompute": LAST, **options})


def mixed(count: int = 20) -> list[Request]:
    """Requests that differ in prompt, images, length, seed, temperature and filters."""
    words = ["red", "circle", "two shapes", "left of", "JSON, please", "what colour is it?", "über", "?"]
    return [
        say(
            f"r{i}",
            " ".join(words[(i * k) % len(words)] for k in range(1, 2 + i % 5)) + f" {i}",
            images=tuple(picture(10 * i + j) for j in range(i % 3)),
            max_new_tokens=[1, 5, 12, 16, 23, 32][i % 6],
            recompute=NONE if i % 7 == 3 else LAST,
            commit=threshold(0.3) if i % 5 == 2 else None,
            temperature=[0.0, 0.7, 1.3][(i // 3) % 3],
            top_p=[1.0, 0.9][i % 2],
            top_k=[0, 0, 40][i % 3],
            seed=i % 7,
            stop=("e", "as")[: i % 3] if i % 8 == 5 else (),
        )
        for i in range(count)
    ]


def answer(bench: Bench, call: Call) -> list[int]:
    """The tokens committed, end of text and all."""
    done = call.finished()
    tokens, committed = bench.canvases[call.request.id]
    return tokens[(committed < 1 << 30) & (np.arange(len(tokens)) >= done.usage.prompt_tokens)].tolist()


def outcome(bench: Bench, call: Call) -> Outcome:
    f = call.finished()
    tokens, committed = bench.canvases[call.request.id]
    run = f.recomputed_tokens + f.usage.cached_tokens  # by itself, and by an earlier request with the same beginning
    counts = (f.usage.prompt_tokens, f.usage.completion_tokens, f.forwards, run)
    return (f.text, f.reason, *counts, tokens.tolist(), committed.tolist())


@pytest.fixture(scope="module")
def alone(causal: LoadedModel) -> dict[str, Outcome]:
    """Outcomes of ``mixed()``, one request at a time on one thread."""
    bench = Bench(causal, stages="inline")
    results = {r.id: outcome(bench, bench.submit(r)[0]) for r in mixed()}
    bench.close()
    assert max(map(len, bench.batches)) == 1
    long = [o[6][o[2] :] for o in results.values() if o[3] >= 12]
    assert sum(len(set(tokens)) >= 6 for tokens in long) >= len(long) - 2, "the model says more than one token"
    return results


def endless(model: LoadedModel) -> LoadedModel:
    """The model with an end of text that no test's answer meets: answers run to their full length."""
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


# --- against transformers ---


@pytest.mark.parametrize("kind", ["llama", *KINDS])
@pytest.mark.parametrize("heads", SHAPES)
def test_greedy_tokens_are_those_of_generate(tmp_path: Path, bench: Make, heads: str, kind: str) -> None:
    oracle: Any = llama(*SHAPES[heads]) if kind == "llama" else qwen(kind, *SHAPES[heads])
    b = bench(endless(load(save(oracle, tmp_path))), stages="inline")
    kinds: set[int] = set()
    for text in ("a red circle", "what is left of it? " * 3, "?"):
        [prompt] = b.engine.stages.encoder.encode([ask("x", text)])
        with torch.no_grad():
            expected = greedy(oracle, oracle.model.embed_tokens(torch.from_numpy(prompt.ids)), 16)
        for policy in (LAST, NONE):
            [call] = b.submit(say(f"{policy.name} {text}", text, max_new_tokens=16, recompute=policy))
            assert answer(b, call) == expected
        kinds |= set(expected)
    assert len(kinds) > 12


def spliced(made: Sighted, prompt: Encoded, pictures: tuple[bytes, ...], bench: Bench) -> torch.Tensor:
    """The prompt's embeddings from transformers' embedding, tower and processor."""
    with torch.no_grad():
        text = made.oracle.model.embed_tokens(torch.from_numpy(prompt.ids).clamp(max=made.oracle.config.vocab_size - 1))
    visual = [made.visual_tokens(decode_image(data, bench.engine.media, field="x")) for data in pictures]
    assert len(prompt.image_rows) == 16 * len(pictures)
    text[torch.from_numpy(prompt.image_rows)] = torch.cat(visual)
    return text


@pytest.mark.parametrize("chunk", [0, 8])
def test_log_probabilities_of_a_prompt_are_those_of_transformers(
    sighted: Sighted, causal: LoadedModel, bench: Make, chunk: int
) -> None:
    """Of text and after images, whole and in chunks, and also of a prompt whose pages others have."""
    b = bench(causal, stages="inline", prefill_tokens=chunk)
    streaming = Streaming(prompt_tokens=True, prompt_alternatives=3)
    for pictures in ((), (picture(1, (30, 30)),)):
        request = say(f"{len(pictures)}", "what is left of the red circle? " * 3, images=pictures, max_new_tokens=3)
        plain = b.ask(dataclasses.replace(request, id=f"plain {len(pictures)}"))
        [prompt] = b.engine.stages.encoder.encode([request])
        embeddings = spliced(sighted, prompt, pictures, b) if pictures else None
        with torch.no_grad():
            ids = torch.from_numpy(prompt.ids)[None]
            given: Any = {"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings[None]}
            expected = torch.log_softmax(sighted.oracle(**given).logits[0].float(), -1).numpy()
        [call] = b.submit(dataclasses.replace(request, streaming=streaming))
        assert call.finished().text == plain.text
        [found] = [event for event in call.events if isinstance(event, Prefilled)]
        assert [token.id for token in found.prompt_tokens] == prompt.ids.tolist() and found.usage.cached_tokens == 0
        unknown = {0, *prompt.image_rows.tolist()}
        for at, token in enumerate(found.prompt_tokens):
            if at in unknown:
                assert (token.log_probability, token.rank) == (None, 0)
                continue
            row = expected[at - 1]
            assert token.log_probability == pytest.approx(row[token.id], abs=1e-4)
            higher = [(row > row[token.id] + margin).sum() for margin in (1e-4, -1e-4)]
            assert 1 + higher[0] <= token.rank <= higher[1]  # the token itself is within the margin
            assert [other.id for other in token.alternatives] == np.argsort(-row)[:3].tolist()
            assert [other.log_probability for other in token.alternatives] == pytest.approx(
                np.sort(row)[:-4:-1].tolist(), abs=1e-4
            )
    b.await_nothing_left()


def test_scores_of_a_prompt_need_pages_for_the_prompt_alone(bench: Make, causal: LoadedModel) -> None:
    size = 16
    ids = np.random.default_rng(0).integers(300, 400, 2 * size).tolist()
    whole = dataclasses.replace(
        say("whole", max_new_tokens=1),
        streaming=Streaming(prompt_tokens=True),
        messages=(Message("user", (TokensPart(tuple(ids)),)),),
        raw=True,
        prompt_only=True,
    )
    scores = []
    for pages in (2, 4):
        b = bench(causal, stages="inline", page_size=size, pages=pages, max_tokens=pages * size)
        [call] = b.submit(dataclasses.replace(whole, id=f"{pages} pages"))
        call.finished()
        scores += [event.prompt_tokens for event in call.events if isinstance(event, Prefilled)]
        b.await_nothing_left()
    assert scores[0] == scores[1] and len(scores[0]) == len(ids)


@pytest.mark.parametrize("spare", [True, False], ids=["an embedding for <image>", "none"])
def test_with_images_too(tmp_path: Path, bench: Make, spare: bool) -> None:
    made = Sighted(tmp_path, image_aspect_ratio="square", **({} if spare else {"rows": len(tokenizer())}))
    if not spare:
        without_special_tokens(tmp_path, IMAGE)
    model = load(tmp_path)
    b = bench(endless(model), stages="inline")
    said = []
    for pictures in ((picture(1, (30, 30)),), (picture(2, (40, 40)), picture(3, (24, 24)))):
        request = say(f"{len(pictures)}", "what is it?", images=pictures, max_new_tokens=32)
        [prompt] = b.engine.stages.encoder.encode([request])
        assert b.engine.detokenized(prompt.ids.tolist()).count(IMAGE) == len(prompt.image_rows)
        assert b.engine.token_strs(prompt.ids.tolist()).count(IMAGE) == len(prompt.image_rows)
        embeddings = spliced(made, prompt, pictures, b)
        said.append(answer(b, b.submit(request)[0]))
        assert said[-1] == greedy(made.oracle, embeddings, 32, model.spec.banned_ids)
    assert said[0] != said[1]


def test_a_step_runs_one_row_and_prefill_the_prompt(bench: Make, causal: LoadedModel) -> None:
    b = bench(endless(causal), stages="inline")
    last = b.ask(say("last", max_new_tokens=24, images=(picture(1),)))
    full = b.ask(say("none", max_new_tokens=24, images=(picture(1),), recompute=NONE))
    prompt = last.usage.prompt_tokens
    assert last.forwards == full.forwards == 24 and last.text == full.text
    assert last.recomputed_tokens == prompt + 23
    assert full.recomputed_tokens == sum(prompt + i for i in range(24))


# --- company ---


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"page_size": 16, "decode_tokens": 150},
        {"page_size": 1, "prefill_tokens": 100, "encode_batch": 2, "max_pending_per_stage": 3},
        {"max_running": 5, "stages": "inline"},
    ],
    ids=["all together", "small decode batches", "pages of one", "few at once, inline"],
)
def test_a_request_gives_the_same_tokens_alone_and_in_a_batch(
    bench: Make, causal: LoadedModel, alone: dict[str, Outcome], config: dict[str, Any]
) -> None:
    b = bench(causal, **config)
    calls = (b.submit if config else b.submit_together)(*mixed())
    for call in calls:
        assert outcome(b, call) == alone[call.request.id]
    if not config:
        assert max(map(len, b.batches)) >= 10, "they did share batches"
    b.await_nothing_left()


def test_last_gives_the_tokens_of_none(bench: Make, causal: LoadedModel, alone: dict[str, Outcome]) -> None:
    b = bench(causal, stages="inline")
    for request in mixed():
        policy = LAST if request.diffusion.recompute == NONE else NONE
        other = dataclasses.replace(request, diffusion=dataclasses.replace(request.diffusion, recompute=policy))
        [call] = b.submit(other)
        result = outcome(b, call)
        was = alone[request.id]
        assert result[:5] == was[:5] and result[6:] == was[6:]
        assert (result[5] == was[5]) == (was[4] == 1), "they differ in how much they run"


@pytest.mark.parametrize("stages", ["threads", "inline"])
def test_what_lies_in_a_page_from_before_is_never_read(
    bench: Make, causal: LoadedModel, alone: dict[str, Outcome], stages: str
) -> None:
    b = bench(causal, page_size=16, pages=24, stages=stages)
    for tensor in (*b.engine.stages.store.keys, *b.engine.stages.store.values):
        tensor.fill_(torch.nan)
    for call in b.submit(*mixed(), *(dataclasses.replace(r, id=f"{r.id}-again") for r in mixed(8))):
        assert outcome(b, call) == alone[call.request.id.removesuffix("-again")]
    assert b.most_pages > 12


# --- sampling, streaming and endings ---


def test_a_seed_decides_what_is_drawn(bench: Make, causal: LoadedModel) -> None:
    b = bench(endless(causal), stages="inline")
    drawn = [
        answer(b, b.submit(say(f"{n}", max_new_tokens=24, temperature=1.0, seed=seed))[0])
        for n, seed in enumerate((1, 1, 2, 3))
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn}) == 3
    [call] = b.submit(say("k", max_new_tokens=24, temperature=5.0, top_k=1, seed=9))
    [plain] = b.submit(say("greedy", max_new_tokens=24))
    assert answer(b, call) == answer(b, plain)


def test_deltas_and_snapshots_follow_the_answer_from_left_to_right(bench: Make, causal: LoadedModel) -> None:
    b = bench(endless(causal))
    calls = b.submit(*(say(f"r{i}", f"shape {i}", max_new_tokens=20, snapshots=True) for i in range(5)))
    for call in calls:
        done = call.finished()
        assert "".join(call.deltas) == done.text and len(call.deltas) > 3
        assert [(s.forwards, s.committed, s.total) for s in call.snapshots] == [(i, i, 20) for i in range(1, 21)]
        for snapshot in call.snapshots:
            known = snapshot.text.rstrip("▒")
            assert snapshot.text == known + "▒" * (20 - snapshot.committed)
            assert done.text.startswith(known.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_the_answer_ends_before_a_stop_string(bench: Make, causal: LoadedModel) -> None:
    b = bench(endless(causal), stages="inline")
    whole = b.ask(say("whole", max_new_tokens=32))
    stop = whole.text[9:12]
    cut = b.ask(say("cut", max_new_tokens=32, stop=(stop,)))
    assert (cut.reason, cut.text) == ("stop", whole.text[: whole.text.index(stop)])
    assert cut.forwards < whole.forwards


def test_the_answer_ends_before_the_first_end_of_text(bench: Make, causal: LoadedModel) -> None:
    b = bench(endless(causal), stages="inline")
    [call] = b.submit(say("whole", max_new_tokens=32))
    tokens = answer(b, call)
    end = tokens[10]
    first = tokens.index(end)
    spec = dataclasses.replace(causal.spec, end_ids=frozenset({end}))
    done = bench(dataclasses.replace(causal, spec=spec), stages="inline").ask(say("ended", max_new_tokens=32))
    assert (done.reason, done.usage.completion_tokens, done.forwards) == ("end", first, first + 1)
    assert call.finished().text.startswith(done.text.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_an_answer_of_one_token_is_all_prefill(bench: Make, causal: LoadedModel) -> None:
    b = bench(endless(causal), stages="inline")
    done = b.ask(say("one", max_new_tokens=1))
    assert (done.reason, done.forwards, done.usage.completion_tokens) == ("length", 1, 1)
    assert done.recomputed_tokens == done.usage.prompt_tokens


# --- what the model can do ---


def test_the_engine_tells_what_a_causal_model_can_do(bench: Make, causal: LoadedModel, model: LoadedModel) -> None:
    info, other = bench(causal).engine.info, bench(model).engine.info
    assert (info.diffusion, info.block_length, info.recompute_policy) == (False, 1, "last")
    assert info.recompute_policies == ("last", "none")
    assert (info.architecture, info.images, info.visual_tokens_per_image) == ("llava_llama", True, 16)
    assert (other.diffusion, other.block_length, other.recompute_policy) == (True, 8, "dual")
    cached = ("prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache", "adaptive")
    assert other.recompute_policies == ("none", *cached)
    assert info.commit_policies == ("low_confidence", "threshold", "ngram")
    assert other.commit_policies == (
        "low_confidence",
        "random",
        "threshold",
        "factor",
        "early_commit",
        "confident",
        "entropy_bound",
        "edit",
    )


def test_a_policy_for_other_attention_is_unimplemented(bench: Make, causal: LoadedModel, model: LoadedModel) -> None:
    b = bench(causal)
    with pytest.raises(Unimplemented, match="has no recompute policy 'dkv_decode'; it has last, none"):
        b.submit(ask("r", recompute=dkv()))
    for name in ("prefix", "dual", "dkv_greedy", "free_cache"):
        with pytest.raises(Unimplemented, match=f"has no recompute policy '{name}'; it has last, none"):
            b.submit(ask("r", recompute=Policy(name=name)))
    for name in ("random", "factor", "early_commit", "confident", "entropy_bound"):
        with pytest.raises(Unimplemented, match=f"has no commit policy '{name}'; it has low_confidence"):
            b.submit(say("r", commit=Policy(name=name)))
    with pytest.raises(Unimplemented, match="model 'tiny' has no recompute policy 'last'; it has none, prefix, dual"):
        bench(model).submit(say("r"))
    with pytest.raises(InvalidArgument, match=r"diffusion.*: there is no policy 'magic'"):
        b.submit(ask("r", recompute=Policy(name="magic")))


def test_blocks_are_for_diffusion(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal, stages="inline")
    with pytest.raises(InvalidArgument, match=r"diffusion\.block_length: must be 1") as caught:
        b.submit(say("two", block=2))
    assert [v.field for v in caught.value.violations] == ["diffusion.block_length"]
    assert b.ask(say("one", block=1)).text == b.ask(say("default", steps=3)).text


def test_a_request_that_says_nothing_of_policies_works(bench: Make, causal: LoadedModel) -> None:
    b = bench(causal, stages="inline")
    plain = b.ask(dataclasses.replace(ask("plain"), diffusion=Diffusion()))
    assert isinstance(plain, Finished) and plain.text == b.ask(say("last")).text


def test_a_prompt_of_nothing_is_an_invalid_argument(bench: Make, causal: LoadedModel, tmp_path: Path) -> None:
    save(llama(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    b = bench(load(tmp_path))
    calls = b.submit(say("empty", ""), say("full", "x"))
    error = calls[0].error()
    assert isinstance(error, InvalidArgument)
    assert "messages: the prompt has no token" in str(error)
    assert calls[1].finished().forwards
