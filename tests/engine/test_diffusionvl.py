"""DiffusionVL: prompts, logits and tokens of the authors' loop, over transformers' Qwen2.5-VL with the same weights."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusionvl_checkpoints import BLOCK, MASK_ID, DiffusionVL
from foreseen import check_foreseen
from harness import Bench, Call
from helpers import ask, picture, threshold
from llama_checkpoints import edit, load
from PIL import Image
from qwen_vl_checkpoints import served_rows

from mmserve.core.request import Amount, ImagePart, Message, Part, Policy, Request, TextPart, Vision
from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.checkpoint import read_json, write_json

Make = Callable[..., Bench]
FILES = [picture(i, size) for i, size in enumerate(((40, 30), (20, 48), (9, 11)))]
ASKED: dict[str, tuple[Part, ...]] = {
    "none": (TextPart("a red circle"),),
    "one": (ImagePart(FILES[0]), TextPart("what?")),
    "several": (*map(ImagePart, FILES), TextPart("what is it?")),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[DiffusionVL, LoadedModel]:
    made = DiffusionVL(tmp_path_factory.mktemp("model"))
    model = load(made.folder)
    return made, dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


def request(name: str, new: int = 16, commit: Policy | None = None, steps: int = 0) -> Request:
    asked = ask(name, max_new_tokens=new, recompute=Policy(name="block"), commit=commit, steps=steps)
    return dataclasses.replace(asked, messages=(Message("user", ASKED[name]),))


def prompt_of(made: DiffusionVL, model: LoadedModel, name: str) -> torch.Tensor:
    """The authors' prompt: ChatML, a line for each image, and its visual tokens in place of the word for it."""
    images = sum(isinstance(part, ImagePart) for part in ASKED[name])
    [text] = [part.text for part in ASKED[name] if isinstance(part, TextPart)]
    shown = "<image>\n" * images
    pieces = f"<|im_start|>user\n{shown}{text}<|im_end|>\n<|im_start|>assistant\n".split("<image>")
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        ids += [*([model.spec.image_id] if i else []), *model.tokenizer.encode(piece, add_special_tokens=False)]
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in FILES[:images]]
    return made.prompt(ids, model.spec.image_id or -1, opened)


@torch.no_grad()
def authors_loop(
    made: DiffusionVL, prompt: torch.Tensor, banned: tuple[int, ...], new: int, steps: int, sure_at: float | None
) -> list[int]:
    """``generate_with_bd3lm`` at temperature 0 without its cache: blocks lie on a grid from position 0.

    ``low_confidence_static``: a step commits its share of a block's tokens, of ``steps`` for a block, the surest first.
    ``low_confidence_dynamic``: all that are surer than ``sure_at``, or that share where they are fewer.
    """
    embed, start = made.oracle.get_input_embeddings(), len(prompt)
    row = [MASK_ID] * new
    for first in range(start // BLOCK * BLOCK, start + new, BLOCK):
        end = min(first + BLOCK, start + new)
        own = range(max(first - start, 0), end - start)
        for step in range(steps + 1):
            open_ = [at for at in own if row[at] == MASK_ID]
            if not open_:
                break
            x = torch.cat([prompt, embed(torch.tensor(row[: end - start]))])
            probabilities = made.logits(x, BLOCK).softmax(-1)[start:]
            probabilities[:, list(banned)] = -1.0
            sure, token = (each.tolist() for each in probabilities.max(-1))
            share = BLOCK // steps + (step < BLOCK % steps)
            surest = sorted(open_, key=lambda at: -sure[at])
            surer = [at for at in open_ if sure_at is not None and sure[at] > sure_at]
            for at in surer if len(surer) >= share else surest[:share]:
                row[at] = token[at]
    return row


def answer(bench: Bench, call: Call) -> list[int]:
    done = call.finished()
    tokens, _committed = bench.canvases[call.request.id]
    return tokens[done.usage.prompt_tokens :].tolist()


@pytest.mark.parametrize("what", ASKED)
def test_prompts_and_logits_are_those_of_transformers(
    pair: tuple[DiffusionVL, LoadedModel], bench: Make, what: str
) -> None:
    made, model = pair
    asked = request(what)
    [one] = bench(model, stages="inline").engine.stages.encoder.encode([asked])
    prompt = prompt_of(made, model, what)
    assert len(one.ids) == len(prompt) and one.places is None
    whole = len(prompt) // BLOCK * BLOCK  # the rest sees masks
    assert (served_rows(model, asked, one) - made.logits(prompt, BLOCK))[:whole].abs().max() < 1e-4


@pytest.mark.parametrize(("steps", "sure_at"), [(BLOCK, None), (BLOCK, 0.02)])
def test_answers_are_those_of_the_authors_loop_in_one_batch_and_alone(
    pair: tuple[DiffusionVL, LoadedModel], bench: Make, steps: int, sure_at: float | None
) -> None:
    made, model = pair
    running, kinds, saved = bench(model), set[int](), 0
    commit = None if sure_at is None else threshold(sure_at)
    prompts = {name: prompt_of(made, model, name) for name in ASKED}
    asked = [request(name, 3 * BLOCK - len(prompts[name]) % BLOCK, commit) for name in ASKED]
    for one, call in zip(asked, running.submit(*asked), strict=True):
        new = one.sampling.max_new_tokens
        expected = authors_loop(made, prompts[one.id], model.spec.banned_ids, new, steps, sure_at)
        assert answer(running, call) == expected
        [alone] = running.submit(dataclasses.replace(one, id=f"{one.id} alone"))
        assert answer(running, alone) == expected
        kinds |= set(expected)
        saved += new - call.finished().forwards
    assert len(kinds) > 8, "the model says more than one token"
    assert (saved > 0) == (sure_at is not None), "the threshold makes several tokens known at once"


def test_several_tokens_a_step(pair: tuple[DiffusionVL, LoadedModel], bench: Make) -> None:
    """Steps are shared by whole blocks: the prompt ends with one."""
    made, model = pair
    running = bench(model)
    text = next(t for t in ("a" + "!" * n for n in range(BLOCK)) if _length(running, t) % BLOCK == 0)
    ASKED["even"] = (TextPart(text),)
    [call] = running.submit(request("even", 2 * BLOCK, steps=6))
    prompt = prompt_of(made, model, "even")
    assert answer(running, call) == authors_loop(made, prompt, model.spec.banned_ids, 2 * BLOCK, 3, None)
    del ASKED["even"]
    assert call.finished().forwards == 6


def _length(running: Bench, text: str) -> int:
    asked = dataclasses.replace(ask("n"), messages=(Message("user", (TextPart(text),)),))
    [one] = running.engine.stages.encoder.encode([asked])
    return len(one.ids)


def test_pruned_images_are_the_same_alone_and_together(pair: tuple[DiffusionVL, LoadedModel], bench: Make) -> None:
    running = bench(pair[1])
    vision = Vision(pruner="column_attention", amount=Amount("keep_ratio", 0.5))
    asked = [dataclasses.replace(request(name), vision=vision) for name in ("one", "several")]
    together = [(answer(running, call), call.finished().usage) for call in running.submit(*asked)]
    assert all(usage.visual_tokens < usage.visual_tokens_before for _tokens, usage in together)
    for one, (tokens, _usage) in zip(asked, together, strict=True):
        [call] = running.submit(dataclasses.replace(one, id=f"{one.id} alone"))
        assert answer(running, call) == tokens


def test_spec_and_what_is_refused(pair: tuple[DiffusionVL, LoadedModel], bench: Make, tmp_path: Path) -> None:
    made, model = pair
    spec = load(made.folder).spec
    assert (spec.architecture, spec.attention, spec.attention_block) == (
        "diffusionvl_qwenvl",
        Attention.BLOCK_CAUSAL,
        BLOCK,
    )
    assert (spec.logit_shift, spec.mask_id, spec.video_id) == (0, MASK_ID, None)
    assert set(spec.banned_ids) == {MASK_ID, spec.image_id}
    assert model.tokenizer.convert_tokens_to_ids("<|im_end|>") in spec.end_ids
    assert model.position_axes == 1
    check_foreseen(model)
    info = bench(model).engine.stages.capabilities.describe({})
    assert info.images and not info.videos and info.recompute_policies == ("block", "none", "dual")
    other = DiffusionVL(tmp_path)
    for changes, message in (
        ({"enable_bd3lm": False}, "enable_bd3lm = False is not supported"),
        ({"bd3lm_block_size": ...}, "bd3lm_block_size"),
        ({"mask_token_id": ...}, "mask_token_id 151671 is no token"),
        ({"architectures": ["DiffusionVLQwenVLModel"]}, "DiffusionVL_Qwen2_5_VL_ForConditionalGeneration"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mrope_section": [2, 3, 3]}}, "rope_type = 'yarn'"),
    ):
        before = read_json(tmp_path / "config.json")
        edit(tmp_path / "config.json", **changes)
        with pytest.raises(ConfigError, match=message):
            load(other.folder)
        write_json(tmp_path / "config.json", before)
