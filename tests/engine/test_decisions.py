"""Typed questions in the engine: the model's own distribution at each slot, from one pass over all branches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemma_checkpoints import gemma, load_gemma, save_gemma
from harness import Bench
from helpers import ask, picture, tiny_model

from mmserve.core.decisions import (
    CHOICE,
    INSTRUCTION,
    SCORE,
    YES_NO,
    Calibration,
    Decision,
    Scaling,
)
from mmserve.core.events import Delta, Failed, Finished
from mmserve.core.request import Policy, Request
from mmserve.errors import DoesNotFit, InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.chat import prompt_ids
from mmserve.models.decisions import questions_ids
from mmserve.models.decoder import dense_attention

QUESTIONS = (
    Decision(kind=YES_NO, text="Is there a red circle?"),
    Decision(kind=CHOICE, text="What color is it?", options=("red", "green", "blue")),
    Decision(kind=SCORE, text="How many shapes are there?", low=1, high=4),
    Decision(kind=YES_NO, text="Is it small?"),
)
#: What is on a branch of ``QUESTIONS`` after the instruction.
BRANCHES = (
    "\nIs there a red circle?",
    "\nWhat color is it? 1 red 2 green 3 blue",
    "\nHow many shapes are there? 1-4",
    "\nIs it small?",
)
Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(vision=True)


def like(model: LoadedModel, attention: Attention) -> LoadedModel:
    shift = int(attention is Attention.CAUSAL)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, attention=attention, logit_shift=shift))


def asked(name: str, *questions: Decision, context: str = "a red circle", **more: object) -> Request:
    request = ask(name, f"{context}\n{INSTRUCTION}", **more)
    return dataclasses.replace(request, decisions=questions)


def spelled(model: LoadedModel, answers: tuple[str, ...]) -> list[int]:
    """The tokens of answers of one token each, by the tokenizer alone."""
    encoded = [model.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    assert all(len(ids) == 1 for ids in encoded)
    return [ids[0] for ids in encoded]


@torch.inference_mode()
def expected(model: LoadedModel, request: Request, question: Decision, text: str) -> np.ndarray:
    """Log-probabilities of a question's answers, from dense attention over the one text that it is asked in: the prompt
    sees itself alone, and the question all of it."""
    [message], [part] = request.messages, request.messages[0].parts
    whole, closed = (
        prompt_ids(model.tokenizer, [{"role": message.role, "content": part.text + more}]) for more in (text, "")
    )
    same = next(i for i, (a, b) in enumerate(zip(whole[::-1], closed[::-1], strict=False)) if a != b)
    shared, ids = len(closed) - same, [*whole, model.spec.mask_id]
    at = torch.arange(len(ids))
    sees = {
        Attention.FULL: (at[None] < shared) | (at[:, None] >= shared),
        Attention.PREFIX: (at[None] < shared)
        | ((at[:, None] >= shared) & (at[None] < len(whole)))
        | (at[:, None] == at),
        Attention.CAUSAL: at[None] <= at[:, None],
        Attention.BLOCK_CAUSAL: at[None] // model.spec.default_block_length
        <= at[:, None] // model.spec.default_block_length,
    }[model.spec.attention]
    hidden = model.decoder(
        model.decoder.embed(torch.tensor(ids)[None]), at[None], dense_attention(sees.expand(len(ids), len(ids)))
    )
    logits = model.decoder.logits(hidden)[0, len(whole) - model.spec.logit_shift].float()
    logits[list(model.spec.banned_ids)] = -torch.inf
    return logits.log_softmax(-1)[spelled(model, question.answers)].numpy()


@pytest.mark.parametrize("attention", list(Attention))
@pytest.mark.parametrize("more", [0, 3, 9])
def test_each_question_is_answered_as_if_it_were_alone(
    bench: Make, model: LoadedModel, attention: Attention, more: int
) -> None:
    kind = like(model, attention)
    request = asked("together", *QUESTIONS, context=f"a red circle{'!' * more}")  # the prompt ends anywhere in a page
    finished = bench(kind).ask(request)
    assert finished.forwards == 1 and finished.reason == "end" and len(finished.decisions) == len(QUESTIONS)
    for decided, question, text in zip(finished.decisions, QUESTIONS, BRANCHES, strict=True):
        own = expected(kind, request, question, text)
        np.testing.assert_allclose(decided.log_probabilities, own, atol=2e-4)
        np.testing.assert_allclose(decided.probabilities, np.exp(own) / np.exp(own).sum(), atol=1e-5)
        assert decided.mass == pytest.approx(np.exp(own).sum(), abs=1e-5)
    best = [q.answers[d.best] for q, d in zip(QUESTIONS, finished.decisions, strict=True)]
    assert finished.text == "\n".join(best)


@pytest.mark.parametrize("more", [0, 3, 9])
@pytest.mark.parametrize(("block", "shift"), [(4, 0), (16, 0), (12, 0), (4, 1), (16, 1)])
def test_blocks_that_are_shorter_and_longer_than_pages(
    bench: Make, model: LoadedModel, block: int, shift: int, more: int
) -> None:
    kind = like(model, Attention.BLOCK_CAUSAL)
    kind = dataclasses.replace(kind, spec=dataclasses.replace(kind.spec, default_block_length=block, logit_shift=shift))
    request = asked("blocks", *QUESTIONS, context=f"a red circle{'!' * more}")
    finished = bench(kind).ask(request)
    for decided, question, text in zip(finished.decisions, QUESTIONS, BRANCHES, strict=True):
        np.testing.assert_allclose(decided.log_probabilities, expected(kind, request, question, text), atol=2e-4)


@pytest.mark.parametrize("attention", list(Attention))
def test_the_end_of_the_prompt_is_run_once(bench: Make, model: LoadedModel, attention: Attention) -> None:
    kind, block = like(model, attention), model.spec.default_block_length
    for more in range(4):
        request = asked("once", *QUESTIONS, context=f"a red circle{'!' * more}")
        done = bench(kind).ask(request)
        ids = questions_ids(kind.tokenizer, request.decisions, special_tokens=kind.spec.special_tokens)
        own, prompt = sum(ids.lengths), done.usage.prompt_tokens
        assert done.usage.completion_tokens == 0, "no text is generated"
        if attention is Attention.CAUSAL:
            own -= len(QUESTIONS)  # slots are not run
        repeated = prompt % block if attention is Attention.BLOCK_CAUSAL else 0  # these see the question
        assert done.recomputed_tokens == prompt - repeated + len(QUESTIONS) * repeated + own


def test_the_text_of_questions_is_not_streamed(bench: Make, model: LoadedModel) -> None:
    [call] = bench().submit(asked("quiet", *QUESTIONS))
    assert isinstance(call.wait(), Finished)
    assert not [event for event in call.events if isinstance(event, Delta)]


@pytest.mark.parametrize("attention", list(Attention))
@pytest.mark.parametrize("kv", [{"kv_bits": 8}, {"kv_bits": 4, "kv_kept": 0.25}], ids=["8 bits", "4 bits, some kept"])
def test_with_quantised_kv_a_question_is_alone_too(
    bench: Make, model: LoadedModel, attention: Attention, kv: dict[str, Any]
) -> None:
    kind = like(model, attention)
    alone = [bench(kind, **kv).ask(asked(f"{i}", each)).decisions[0] for i, each in enumerate(QUESTIONS)]
    turned = bench(kind, **kv).ask(asked("turned", *QUESTIONS[::-1])).decisions[::-1]
    assert alone == list(turned)


@pytest.mark.parametrize("attention", list(Attention))
def test_neither_other_questions_nor_their_order_nor_other_requests_change_a_bit(
    bench: Make, model: LoadedModel, attention: Attention
) -> None:
    kind = like(model, attention)
    images = (picture(1),)
    alone = [bench(kind).ask(asked(f"alone {i}", each, images=images)).decisions[0] for i, each in enumerate(QUESTIONS)]
    turned = bench(kind).ask(asked("turned", *QUESTIONS[::-1], images=images)).decisions[::-1]
    with_others = bench(kind)
    calls = with_others.submit_together(
        asked("one", *QUESTIONS, images=images),
        asked("two", *QUESTIONS[:2], context="two squares"),
        ask("text", max_new_tokens=8),
    )
    beside = calls[0].finished().decisions
    assert alone == list(turned) == list(beside)


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_with_sliding_windows_a_question_is_alone_too(bench: Make, model: LoadedModel, cap: float) -> None:
    decoder = copy.deepcopy(model.decoder)
    windows = tuple(20 * (layer % 2) for layer in range(decoder.config.num_layers))
    decoder.config = dataclasses.replace(decoder.config, windows=windows, score_cap=cap)
    kind = like(dataclasses.replace(model, decoder=decoder), Attention.CAUSAL)
    alone = [bench(kind).ask(asked(f"{i}", each)).decisions[0] for i, each in enumerate(QUESTIONS)]
    turned = bench(kind).ask(asked("turned", *QUESTIONS[::-1])).decisions[::-1]
    plain = bench(like(model, Attention.CAUSAL)).ask(asked("plain", *QUESTIONS)).decisions
    assert alone == list(turned) != list(plain)


def test_the_context_of_later_questions_comes_from_the_prefix_cache(bench: Make, model: LoadedModel) -> None:
    causal, last = bench(like(model, Attention.CAUSAL)), Policy(name="last")
    long = "a red circle beside a green square and a blue triangle above a large yellow circle"
    first = causal.ask(asked("first", *QUESTIONS[:2], context=long, recompute=last))
    second = causal.ask(asked("second", *QUESTIONS[::-1], context=long, recompute=last))
    assert first.usage.cached_tokens == 0 and second.usage.cached_tokens > 0
    fresh = bench(like(model, Attention.CAUSAL)).ask(asked("fresh", *QUESTIONS[::-1], context=long, recompute=last))
    assert second.decisions == fresh.decisions


def test_a_prompt_in_chunks_gives_the_same_bits(bench: Make, model: LoadedModel) -> None:
    causal = like(model, Attention.CAUSAL)
    whole, chunked = (
        bench(causal, prefill_tokens=tokens).ask(asked("chunks", *QUESTIONS, context="a red circle " * 12))
        for tokens in (0, 16)
    )
    assert whole.decisions == chunked.decisions


def test_a_calibration_changes_probabilities_and_neither_mass_nor_log_probabilities(
    bench: Make, model: LoadedModel
) -> None:
    scaling = Scaling(temperature=2.0, bias=1.5)
    calibrated = dataclasses.replace(model, calibration=Calibration({YES_NO: scaling}))
    before = bench().ask(asked("before", *QUESTIONS)).decisions
    after = bench(calibrated).ask(asked("after", *QUESTIONS)).decisions
    for question, plain, scaled in zip(QUESTIONS, before, after, strict=True):
        assert scaled.log_probabilities == plain.log_probabilities and scaled.mass == plain.mass
        if question.kind != YES_NO:
            assert scaled.probabilities == plain.probabilities
            continue
        yes, no = plain.log_probabilities
        odds = (yes - no) / 2 + 1.5
        assert scaled.probabilities == pytest.approx((1 / (1 + np.exp(-odds)), 1 / (1 + np.exp(odds))))


def test_what_a_model_cannot_answer_in_one_pass_is_refused_by_name(
    bench: Make, tmp_path: Path, model: LoadedModel
) -> None:
    renoising = bench(load_gemma(save_gemma(tmp_path, 12)))
    request = dataclasses.replace(gemma("gemma", "what?", max_new_tokens=20), decisions=QUESTIONS[:1])
    with pytest.raises(Unimplemented, match="answers no typed questions: open positions hold random tokens"):
        renoising.submit(request)
    assert renoising.engine.info.decisions == ""
    with pytest.raises(InvalidArgument) as refused:
        bench().submit(asked("long", Decision(kind=SCORE, text="How many?", low=8, high=12)))
    assert [v.field for v in refused.value.violations] == ["questions[0]"]
    long = Decision(kind=YES_NO, text="Is it red? " * 400)
    [call] = bench().submit(asked("long", long))
    failed = call.wait()
    assert isinstance(failed, Failed) and isinstance(failed.error, DoesNotFit)
    assert [v.field for v in failed.error.violations] == ["questions"]
    assert "shorten the context or the questions" in str(failed.error)


def test_more_questions_than_there_are_pages_for_are_refused_by_name(bench: Make, model: LoadedModel) -> None:
    running = bench(model, max_tokens=160, pages=20)
    assert len(running.ask(asked("few", *QUESTIONS)).decisions) == 4
    [call] = running.submit(asked("many", *QUESTIONS * 8))
    error = call.error()
    assert isinstance(error, InvalidArgument)
    [wrong] = error.violations
    assert wrong.field == "questions" and "32 questions" in wrong.description and "there are 20" in wrong.description
    assert "cfg_scale" not in str(error) and "max_new_tokens" not in str(error)


def test_the_text_of_a_question_makes_no_control_token(bench: Make, model: LoadedModel) -> None:
    mask = model.tokenizer.convert_ids_to_tokens(model.spec.mask_id)
    [ids] = questions_ids(model.tokenizer, [Decision(kind=YES_NO, text=f"Is {mask} there?")]).before
    assert model.spec.mask_id not in ids
    assert mask in model.tokenizer.decode(ids)
