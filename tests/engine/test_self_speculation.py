"""Self-speculation and blocks of Nemotron-Labs-Diffusion: tokens and passes of the authors' loops, over Ministral 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench, Call, eventually
from helpers import ask
from llama_checkpoints import edit, load
from lora_checkpoints import adapter_tensors, merged, save_adapter
from safetensors.torch import load_file, save_file
from test_causal_engine import LAST, answer
from text_checkpoints import oracle, save

from mmserve.core.canvas import Canvas
from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.events import Finished
from mmserve.core.handover import Handover, Saved
from mmserve.core.request import Policy, Request
from mmserve.decode.extensions import own_blocks
from mmserve.decode.sampler import candidates
from mmserve.errors import Cancelled, ConfigError, Unimplemented
from mmserve.models.base import LoadedModel
from mmserve.transfer.payloads import PAYLOADS

Make = Callable[..., Bench]
MASK, NEW = 100, 24
TEXTS = ("a red circle", "what is left of it? " * 2, "?")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    """A model whose next token depends less on what is far, so that drafts are right now and then."""
    folder = tmp_path_factory.mktemp("model")
    made = oracle("ministral3")
    with torch.no_grad():
        made.lm_head.weight[:12] *= 3
        for name, weight in made.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight *= 0.4
    save(made, folder, model_type="nemotron_labs_diffusion", architectures=["NemotronLabsDiffusionModel"])
    file = folder / "model.safetensors"
    names = {"lm_head.weight": "diffusion_head.weight"}
    tensors = {names.get(n, n.replace("model.", "encoder.", 1)): t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    edit(folder / "config.json", mask_token_id=MASK, dlm_paradigm="bidirectional", block_size=32)
    model = load(folder)
    return made, replace(model, spec=replace(model.spec, end_ids=frozenset({-1})))


@torch.no_grad()
def rows_of(made: Any, final: list[int], block: list[int], *, whole: bool) -> torch.Tensor:
    """Logits ``[block, V]`` of a block after causal tokens; ``whole``: its rows see all of it, not up to themselves."""
    row = torch.tensor([[*final, *block]])
    length = row.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if whole:
        seen[len(final) :] = True
    mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    logits: torch.Tensor = made(input_ids=row, attention_mask=mask).logits[0, len(final) :]
    return logits


def authors_loop(made: Any, prompt: list[int], new: int, length: int, banned: set[int]) -> tuple[list[int], int]:
    """Tokens of ``linear_spec_generate`` at temperature 0, with blocks of ``length`` masks, and how often it drafted.

    Near its end an answer's blocks are shorter: nothing beyond it is drafted or verified.
    """

    def best(logits: torch.Tensor, more: set[int]) -> list[int]:
        logits[:, list(banned | more)] = -torch.inf
        return logits.argmax(-1).tolist()

    answer, cycles = best(rows_of(made, prompt[:-1], prompt[-1:], whole=False), set()), 0
    while len(answer) < new:
        masks = min(length, new - len(answer) - 1)
        final, newest = [*prompt, *answer[:-1]], answer[-1]
        drafted: list[int] = []
        if masks:
            drafted = best(rows_of(made, final, [newest, *[MASK] * masks], whole=True), {MASK})[1:]
            cycles += 1
        verified = best(rows_of(made, final, [newest, *drafted], whole=False), set())
        kept = next((i for i, token in enumerate(drafted) if verified[i] != token), len(drafted))
        answer += verified[: kept + 1]
    return answer, cycles


def asked(name: str, text: str, length: int) -> Request:
    commit = Policy(name="draft_model", options={"length": length})
    return ask(name, text, max_new_tokens=NEW, recompute=LAST, commit=commit)


def prompt_of(bench: Bench, text: str) -> list[int]:
    [found] = bench.engine.stages.encoder.encode([ask("p", text)])
    ids: list[int] = found.ids.tolist()
    return ids


@pytest.mark.parametrize("length", [1, 6, 31])
def test_tokens_and_passes_are_those_of_the_authors_loop(
    pair: tuple[Any, LoadedModel], bench: Make, length: int
) -> None:
    made, model = pair
    running = bench(model)
    calls: list[Call] = running.submit(*[asked(f"{i}", text, length) for i, text in enumerate(TEXTS)])
    saved = 0
    for call, text in zip(calls, TEXTS, strict=True):
        expected, cycles = authors_loop(made, prompt_of(running, text), NEW, length, set(model.spec.banned_ids))
        assert answer(running, call) == expected
        done = call.finished()
        assert done.companion_forwards == cycles
        saved += NEW - done.forwards
    assert saved > 0, "some drafts are right"


def authors_blocks(made: Any, prompt: list[int], new: int, block: int, sure_at: float, banned: set[int]) -> Any:
    """Tokens of ``generate`` at temperature 0 with ``causal_context``, and its passes over blocks.

    The last block is cut where the answer's budget ends.
    """
    answer, passes = [], 0
    logits = rows_of(made, prompt[:-1], prompt[-1:], whole=False)
    logits[:, list(banned)] = -torch.inf
    seed = int(logits.argmax())
    while len(answer) < new:
        row = [seed, *[MASK] * (min(block, new - len(answer)) - 1)]
        while MASK in row:
            probabilities = rows_of(made, [*prompt, *answer], row, whole=True)
            probabilities[:, list(banned | {MASK})] = -torch.inf
            sure, token = probabilities.double().softmax(-1).max(-1)
            sure[torch.tensor(row) != MASK] = -1.0
            passes += 1
            for at in torch.nonzero((sure >= sure_at) | (sure == sure.max())).flatten().tolist():
                row[at] = int(token[at])
        logits = rows_of(made, [*prompt, *answer], row, whole=False)
        logits[:, list(banned)] = -torch.inf
        answer, seed = answer + row, int(logits[-1].argmax())
    return answer, passes


@pytest.mark.parametrize("sure_at", [2.0, 0.2])
def test_blocks_are_those_of_the_authors_loop(pair: tuple[Any, LoadedModel], bench: Make, sure_at: float) -> None:
    made, model = pair
    running = bench(replace(model, spec=replace(model.spec, draft_block=8)))
    commit = Policy(name="threshold", options={"confidence": sure_at})
    calls = running.submit(
        *[ask(f"{i}", text, max_new_tokens=NEW - i, recompute=LAST, commit=commit) for i, text in enumerate(TEXTS)]
    )
    one_a_pass = 0
    for i, (call, text) in enumerate(zip(calls, TEXTS, strict=True)):
        banned = set(model.spec.banned_ids)
        expected, passes = authors_blocks(made, prompt_of(running, text), NEW - i, 8, sure_at, banned)
        assert answer(running, call) == expected
        assert call.finished().companion_forwards == passes
        one_a_pass += NEW - i - -(-(NEW - i) // 8)
    total = sum(call.finished().companion_forwards for call in calls)
    assert total == one_a_pass if sure_at > 1 else total < one_a_pass


def in_blocks(**sampling: Any) -> Request:
    commit = Policy(name="threshold", options={"confidence": 2.0})
    asked = ask("blocks", TEXTS[0], max_new_tokens=NEW, recompute=LAST, commit=commit)
    return replace(asked, sampling=replace(asked.sampling, **sampling))


def test_penalties_count_the_tokens_of_the_block_before(pair: tuple[Any, LoadedModel], bench: Make) -> None:
    """Each of two tokens is preferred until it is in the answer: the second one is first given within a block."""
    _made, model = pair
    running = bench(replace(model, spec=replace(model.spec, draft_block=8)))
    [call] = running.submit(in_blocks(logit_bias={40: 100.0, 41: 50.0}, repetition_penalty=100.0))
    found = answer(running, call)
    assert len(found) == NEW and (found.count(40), found.count(41)) == (1, 1)


def test_forced_text_and_penalties_give_what_they_give_token_by_token(
    pair: tuple[Any, LoadedModel], bench: Make
) -> None:
    """Penalties do not count what a pass only drafts, so nothing is drafted with them."""
    model = replace(pair[1], spec=replace(pair[1].spec, end_ids=frozenset({2})))
    asked = ask("forced", "hello", max_new_tokens=NEW, recompute=LAST)
    sampling = replace(asked.sampling, presence_penalty=2.0, frequency_penalty=2.0)
    asked = replace(asked, sampling=sampling, constraint=ConstraintSpec(Regex("xyzxyz[a-z]{5}")))
    ahead, alone = bench(model), bench(model)
    parts = alone.engine.stages.decoder.parts
    alone.engine.stages.decoder.parts = replace(parts, passes=replace(parts.passes, runs_ahead=False))
    assert ahead.ask(asked).text == alone.ask(asked).text


def test_no_two_passes_over_blocks_draw_with_the_same_noise(
    pair: tuple[Any, LoadedModel], bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _made, model = pair
    drawn: dict[tuple[int, int], set[int]] = {}

    def noting(logits: Any, positions: Any, canvas: Canvas, *rest: Any, **named: Any) -> Any:
        for position in positions.tolist():
            drawn.setdefault((canvas.step, position - canvas.block_start), set()).add(position)
        return candidates(logits, positions, canvas, *rest, **named)

    monkeypatch.setattr(own_blocks, "candidates", noting)
    bench(replace(model, spec=replace(model.spec, draft_block=8))).ask(in_blocks(temperature=1.0))
    assert len(drawn) > NEW and all(len(positions) == 1 for positions in drawn.values())


def test_blocks_are_filled_a_pass_a_step(
    pair: tuple[Any, LoadedModel], bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests go on between two passes over a block, and one that is cancelled ends there."""
    running, passes = bench(pair[1]), list[str]()
    forward, steps = own_blocks.forward, running.engine.stages.decoder.parts.runner
    run = steps.run

    def filling(*given: Any, **named: Any) -> Any:
        passes.append("block")
        if passes.count("block") == 4:
            running.engine.cancel("cancelled")
        return forward(*given, **named)

    def stepping(stage: str, *given: Any) -> Any:
        passes.append(stage)
        return run(stage, *given)

    monkeypatch.setattr(own_blocks, "forward", filling)
    monkeypatch.setattr(steps, "run", stepping)
    running.ask(in_blocks())
    assert passes.count("block") == NEW - 1
    assert max(one.size for one in running.engine.passes if one.stage == "decode") == NEW, (
        "a pass counts with all its rows"
    )
    passes.clear()
    other = ask("plain", TEXTS[1], max_new_tokens=NEW, recompute=LAST)
    for call in running.submit(in_blocks(), other):
        call.finished()
    assert all("decode" in passes[i : i + 2] for i, each in enumerate(passes) if each == "block")
    passes.clear()
    [cancelled] = running.submit(replace(in_blocks(), id="cancelled"))
    assert isinstance(cancelled.error(), Cancelled)
    running.await_nothing_left()
    assert passes.count("block") == 4


def test_a_request_goes_on_elsewhere_from_the_middle_of_a_block(pair: tuple[Any, LoadedModel], bench: Make) -> None:
    here, there, saved = bench(pair[1]), bench(pair[1]), list[Handover]()
    here.engine.serve_roles(["encode", "prefill", "decode"], save_every=5)
    request = in_blocks(temperature=1.0, max_new_tokens=50)
    call = Call(request)

    def sink(event: Any) -> None:
        if not isinstance(event, Saved):
            return call.sink(event)
        payload = PAYLOADS.decode(PAYLOADS.encode(event.handover.payload))
        return saved.append(replace(event.handover, payload=payload))

    here.engine.submit(request, sink)
    done = call.finished()
    assert len(saved) > 5, "it was saved in the middle of blocks"
    for handover in saved[::3]:
        later = Call(request)
        there.engine.adopt(handover, later.sink)
        eventually(lambda later=later: later.ended, "the answer")  # type: ignore[misc]
        last = later.events[-1]
        assert isinstance(last, Finished) and last.text == done.text


def with_adapter(pair: tuple[Any, LoadedModel], bench: Make, folder: Path) -> tuple[Any, Bench]:
    """The weights with an adapter merged into them, and an engine that has it as ``mine``."""
    made, model = pair
    tensors = adapter_tensors(made, 1)
    renamed = {name.replace(".model.model.", ".model.encoder.", 1): tensor for name, tensor in tensors.items()}
    save_adapter(folder / "mine", renamed)
    running = bench(replace(model, spec=replace(model.spec, draft_block=8)), adapter_folder=str(folder))
    running.engine.stages.adapters.load("mine")
    return merged(made, tensors), running


def test_blocks_of_an_adapter_are_filled_with_it(pair: tuple[Any, LoadedModel], bench: Make, tmp_path: Path) -> None:
    theirs, running = with_adapter(pair, bench, tmp_path)
    banned, commit = set(pair[1].spec.banned_ids), Policy(name="threshold", options={"confidence": 0.2})
    requests = [ask(text, text, max_new_tokens=NEW, recompute=LAST, commit=commit) for text in TEXTS]
    calls = running.submit(*[replace(r, adapter="mine") for r in requests], replace(requests[0], id="plain"))
    expected = [authors_blocks(theirs, prompt_of(running, text), NEW, 8, 0.2, banned) for text in TEXTS]
    expected.append(authors_blocks(pair[0], prompt_of(running, TEXTS[0]), NEW, 8, 0.2, banned))
    assert [(answer(running, call), call.finished().companion_forwards) for call in calls] == expected
    assert expected[0] != expected[-1]


def test_an_adapter_drafts_for_itself(pair: tuple[Any, LoadedModel], bench: Make, tmp_path: Path) -> None:
    theirs, running = with_adapter(pair, bench, tmp_path)
    calls = running.submit(*[replace(asked(text, text, 6), adapter="mine") for text in TEXTS])
    for call, text in zip(calls, TEXTS, strict=True):
        expected = authors_loop(theirs, prompt_of(running, text), NEW, 6, set(pair[1].spec.banned_ids))
        assert (answer(running, call), call.finished().companion_forwards) == expected


def test_drawn_answers_are_the_same_alone_and_together(pair: tuple[Any, LoadedModel], bench: Make) -> None:
    """Each token is the model's own draw, with the noise of its step; a draft is drawn with the same."""
    _made, model = pair
    running = bench(model)
    drawn = [
        replace(
            asked(f"{seed}", TEXTS[seed], 6), sampling=replace(asked("x", "", 6).sampling, temperature=1.0, seed=seed)
        )
        for seed in range(3)
    ]
    together = [call.finished().text for call in running.submit(*drawn)]
    assert [running.ask(replace(r, id=f"alone {r.id}")).text for r in drawn] == together
    assert len(set(together)) == 3


def test_who_drafts(pair: tuple[Any, LoadedModel], bench: Make, tmp_path: Path) -> None:
    _made, model = pair
    assert model.spec.causal and (model.spec.draft_mask, model.spec.draft_block) == (MASK, 32)
    assert "draft_model" in bench(model).engine.stages.capabilities.describe({}).commit_policies
    for other, options in ((model, {"sparse_decode": "quest"}), (load(save(oracle("ministral3"), tmp_path)), {})):
        with pytest.raises(Unimplemented, match="no commit policy 'draft_model'"):
            bench(other, **options).submit(asked("r", "?", 4))
    edit(tmp_path / "config.json", model_type="nemotron_labs_diffusion", mask_token_id=10**6)
    edit(tmp_path / "config.json", architectures=["NemotronLabsDiffusionModel"])
    with pytest.raises(ConfigError, match="mask_token_id 1000000 is no token"):
        load(tmp_path)
