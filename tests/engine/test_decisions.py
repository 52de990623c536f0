"""Typed questions in the engine: the model's own distribution at each slot, from one pass of the whole canvas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gemma_checkpoints import gemma, load_gemma, save_gemma
from harness import Bench
from helpers import ask, picture, tiny_model

from mmserve.core.decisions import (
    CHOICE,
    SCORE,
    YES_NO,
    Calibration,
    Decision,
    Scaling,
    questions_text,
)
from mmserve.core.request import Policy, Request
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.chat import prompt_ids
from mmserve.models.decisions import slots
from mmserve.models.decoder import dense_attention

QUESTIONS = (
    Decision(kind=YES_NO, text="Is there a red circle?"),
    Decision(kind=CHOICE, text="What color is it?", options=("red", "green", "blue")),
    Decision(kind=SCORE, text="How many shapes are there?", low=1, high=4),
    Decision(kind=YES_NO, text="Is it small?"),
)
#: What is on a canvas of ``QUESTIONS`` before each slot.
CANVAS = (
    "Is there a red circle?",
    "\nWhat color is it? A red B green C blue:",
    "\nHow many shapes are there? 1-4:",
    "\nIs it small?",
)
Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(vision=True)


def like(model: LoadedModel, attention: Attention) -> LoadedModel:
    shift = int(attention is Attention.CAUSAL)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, attention=attention, logit_shift=shift))


def asked(
    name: str, *questions: Decision, context: str = "a red circle", recompute: str = "none", **more: object
) -> Request:
    text = f"{context}\n{questions_text(questions, together=recompute == 'none')}"
    request = ask(name, text, recompute=Policy(name=recompute), **more)
    return dataclasses.replace(request, decisions=questions)


def spelled(model: LoadedModel, answers: tuple[str, ...]) -> list[int]:
    """The tokens of answers of one token each, by the tokenizer alone."""
    encoded = [model.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    assert all(len(ids) == 1 for ids in encoded)
    return [ids[0] for ids in encoded]


@torch.inference_mode()
def expected(model: LoadedModel, request: Request, mask: torch.Tensor | None = None) -> list[np.ndarray]:
    """Log-probabilities of each question's answers, from dense attention over the text written out by hand."""
    [message], [part] = request.messages, request.messages[0].parts
    ids = prompt_ids(model.tokenizer, [{"role": message.role, "content": part.text}])
    places = []
    for text in CANVAS[: len(request.decisions)] if model.spec.attention is Attention.FULL else [""]:
        ids += model.tokenizer.encode(text, add_special_tokens=False)
        places.append(len(ids))
        ids.append(model.spec.mask_id)
    row = torch.tensor(ids)[None]
    positions = torch.arange(len(ids))[None]
    hidden = model.decoder(model.decoder.embed(row), positions, dense_attention(mask))
    logits = model.decoder.logits(hidden)[0].float()
    logits[:, list(model.spec.banned_ids)] = -torch.inf
    found = []
    for place, question in zip(places, request.decisions, strict=True):
        logs = logits[place - model.spec.logit_shift].log_softmax(-1)
        found.append(logs[spelled(model, question.answers)].numpy())
    return found


def test_the_probabilities_of_one_pass_are_the_softmax_of_the_model_s_logits_at_the_slots(
    bench: Make, model: LoadedModel
) -> None:
    request = asked("together", *QUESTIONS)
    finished = bench().ask(request)
    assert finished.forwards == 1 and len(finished.decisions) == len(QUESTIONS)
    for decided, own in zip(finished.decisions, expected(model, request), strict=True):
        np.testing.assert_allclose(decided.log_probabilities, own, atol=2e-4)
        np.testing.assert_allclose(decided.probabilities, np.exp(own) / np.exp(own).sum(), atol=1e-5)
        assert decided.mass == pytest.approx(np.exp(own).sum(), abs=1e-5)
    best = [q.answers[d.best] for q, d in zip(QUESTIONS, finished.decisions, strict=True)]
    assert finished.text == "".join(f"{text}{answer}" for text, answer in zip(CANVAS, best, strict=True))
    assert finished.reason == "end" and finished.usage.completion_tokens == len(
        model.tokenizer.encode(finished.text, add_special_tokens=False)
    )


def test_an_autoregressive_model_is_read_before_the_slot(bench: Make, model: LoadedModel) -> None:
    causal = like(model, Attention.CAUSAL)
    for question in QUESTIONS:
        request = asked(f"q {question.text}", question, recompute="last")
        finished = bench(causal).ask(request)
        size = 400
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        length = len(prompt_ids(causal.tokenizer, [{"role": "user", "content": request.messages[0].parts[0].text}])) + 1
        [own] = expected(causal, request, mask[:length, :length])
        np.testing.assert_allclose(finished.decisions[0].log_probabilities, own, atol=2e-4)
        assert finished.forwards == 1


def test_a_block_diffusion_model_is_read_at_the_slot_s_block(bench: Make, model: LoadedModel) -> None:
    blocks = like(model, Attention.BLOCK_CAUSAL)
    request = asked("block", QUESTIONS[1], recompute="block")
    finished = bench(blocks).ask(request)
    length = len(prompt_ids(blocks.tokenizer, [{"role": "user", "content": request.messages[0].parts[0].text}])) + 1
    block = torch.arange(length) // blocks.spec.default_block_length
    [own] = expected(blocks, request, block[:, None] >= block[None])
    np.testing.assert_allclose(finished.decisions[0].log_probabilities, own, atol=2e-4)


def test_questions_beside_other_requests_get_the_bits_that_they_get_alone(bench: Make, model: LoadedModel) -> None:
    requests = [
        asked("one", *QUESTIONS),
        asked("two", *QUESTIONS[:2], context="two squares"),
        dataclasses.replace(asked("pictures", QUESTIONS[0], images=(picture(1),))),
    ]
    alone = [bench().ask(request) for request in requests]
    with_others = bench()
    calls = with_others.submit_together(*requests, ask("text", max_new_tokens=8))
    assert [call.finished().decisions for call in calls[:-1]] == [finished.decisions for finished in alone]


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
    causal = bench(like(model, Attention.CAUSAL))
    with pytest.raises(Unimplemented, match="'tiny' answers one typed question a request"):
        causal.submit(asked("two", *QUESTIONS[:2], recompute="last"))
    assert causal.engine.info.decisions == "apart"
    renoising = bench(load_gemma(save_gemma(tmp_path, 12)))
    request = dataclasses.replace(gemma("gemma", "what?", max_new_tokens=20), decisions=QUESTIONS[:1])
    with pytest.raises(Unimplemented, match="answers no typed questions: open positions hold random tokens"):
        renoising.submit(request)
    assert renoising.engine.info.decisions == ""
    with pytest.raises(InvalidArgument) as refused:
        bench().submit(asked("long", Decision(kind=SCORE, text="How many?", low=8, high=12)))
    assert [v.field for v in refused.value.violations] == ["questions[0]"]
    with pytest.raises(InvalidArgument, match=r"questions: have a canvas of .* ask fewer at once"):
        bench().submit(asked("many", *QUESTIONS * 40))


def test_the_text_of_a_question_makes_no_control_token(bench: Make, model: LoadedModel) -> None:
    mask = model.tokenizer.convert_ids_to_tokens(model.spec.mask_id)
    made = slots(model.tokenizer, [Decision(kind=YES_NO, text=f"Is {mask} there?")], 0, together=True)
    assert model.spec.mask_id not in made.ids
    assert mask in model.tokenizer.decode(made.ids)
