"""Fast-dVLM: prompts, logits and tokens of the authors' loops, over transformers' Qwen2.5-VL with the same weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench, Call
from helpers import ask, picture
from llama_checkpoints import edit
from qwen_checkpoints import FAST_MASK_TOKEN
from qwen_vl_checkpoints import Qwen, served_rows
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer

from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.request import ImagePart, Message, Part, Policy, Request, TextPart
from mmserve.errors import ConfigError, InvalidArgument
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.checkpoint import read_json, write_json

Make = Callable[..., Bench]
LAST = Policy(name="last")
NEW = 20
WIDE, TALL, SMALL = (picture(i, size) for i, size in enumerate(((40, 30), (20, 48), (9, 11))))
ASKED: dict[str, tuple[Part, ...]] = {
    "none": (TextPart("a red circle"),),
    "one": (ImagePart(WIDE), TextPart("what?")),
    "several": (ImagePart(WIDE), TextPart("and"), ImagePart(TALL), ImagePart(SMALL), TextPart("what?")),
}


def fast_dvlm(folder: Path, **changes: Any) -> Qwen:
    """Qwen2.5-VL in the layout of ``Efficient-Large-Model/Fast_dVLM_3B``: its names of classes and of tensors,
    embeddings that are the output layer too, and a mask in the tokenizer alone."""
    made = Qwen(folder, "qwen2_5_vl")
    with torch.no_grad():
        for name, weight in made.oracle.named_parameters():
            if "language_model" in name and ("o_proj" in name or "down_proj" in name):
                weight *= 0.7  # what is far matters less: drafts are right now and then
    made.oracle.lm_head.weight = made.oracle.model.language_model.embed_tokens.weight
    tensors = {name: tensor for name, tensor in made.oracle.state_dict().items() if name != "lm_head.weight"}
    assert all(name.startswith(("model.language_model.", "model.visual.")) for name in tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    tok = AutoTokenizer.from_pretrained(folder)
    tok.add_tokens([AddedToken(FAST_MASK_TOKEN, special=True, normalized=False)], special_tokens=True)
    tok.save_pretrained(folder)
    names = {"model_type": "fast_dvlm", "architectures": ["Fast_dVLMForConditionalGeneration"]}
    edit(folder / "config.json", **{**names, "bd_size": 16, "tie_word_embeddings": True, **changes})
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen, LoadedModel]:
    made = fast_dvlm(tmp_path_factory.mktemp("model"))
    model = made.load()
    return made, dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


def request(name: str, parts: tuple[Part, ...], commit: Policy | None = None, new: int = NEW, **more: Any) -> Request:
    asked = ask(name, max_new_tokens=new, recompute=LAST, commit=commit, **more)
    return dataclasses.replace(asked, messages=(Message("user", parts),))


class Rows:
    """Logits of a block after a prompt and causal tokens, by transformers' model run whole."""

    def __init__(self, made: Qwen, model: LoadedModel, parts: tuple[Part, ...]) -> None:
        self.made, self.spec = made, model.spec
        self.inputs = made.inputs(request("inputs", parts), model.tokenizer)
        self.prompt: list[int] = self.inputs["input_ids"][0].tolist()

    @torch.no_grad()
    def of(self, final: list[int], block: list[int], *, whole: bool) -> torch.Tensor:
        """``[block, V]``, without the tokens that are never generated; ``whole``: its rows see all of it, not up to
        themselves."""
        oracle, more = self.made.oracle, [*final, *block]
        row = torch.tensor([[*self.prompt, *more]])
        length, start = row.shape[1], len(self.prompt) + len(final)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if whole:
            seen[start:] = True
        kinds = self.inputs["mm_token_type_ids"]
        kinds = torch.cat([kinds, kinds.new_zeros(1, len(more))], 1)
        pictures = {name: v for name, v in self.inputs.items() if name in ("pixel_values", "image_grid_thw")}
        places, _delta = oracle.model.get_rope_index(row, kinds, pictures.get("image_grid_thw"))
        mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        logits: torch.Tensor = oracle(input_ids=row, attention_mask=mask, position_ids=places, **pictures).logits[0]
        logits[:, list(self.spec.banned_ids)] = -torch.inf
        return logits[start:] if block else logits[-1:]

    def next(self, final: list[int]) -> int:
        """The next token after causal ones."""
        return int(self.of(final, [], whole=False)[-1].argmax())


def authors_drafts(rows: Rows, new: int, block: int) -> tuple[list[int], int]:
    """Tokens of the authors' speculative loop at temperature 0, and how often it drafted.

    The newest token and masks make a block; each mask is filled with what the row before it finds most probable. Of the
    block read causally, all tokens that the row before them would have given are kept, and one more follows.
    """
    mask = rows.spec.draft_mask
    answer, drafts = [rows.next([])], 0
    while len(answer) < new:
        masks = min(block - 1, new - len(answer) - 1)
        final, newest = answer[:-1], answer[-1]
        drafted: list[int] = []
        if masks:
            logits = rows.of(final, [newest, *[mask] * masks], whole=True)[:-1]
            logits[:, mask] = -torch.inf
            drafted, drafts = logits.argmax(-1).tolist(), drafts + 1
        verified = rows.of(final, [newest, *drafted], whole=False).argmax(-1).tolist()
        kept = next((i for i, token in enumerate(drafted) if verified[i] != token), len(drafted))
        answer += verified[: kept + 1]
    return answer, drafts


def authors_blocks(rows: Rows, new: int, block: int, part: int, sure_at: float) -> tuple[list[int], int]:
    """Tokens of the authors' block-diffusion loop at temperature 0, and its passes over blocks.

    A block is the newest token and masks. Its parts are filled one after another, the surest token of a pass and those
    that are at least ``sure_at``, each from the row before it; the block is then read causally, for the token after it.
    """
    mask, answer, passes = rows.spec.draft_mask, [], 0
    newest = rows.next([])
    while len(answer) < new:
        row = [newest, *[mask] * (min(block, new - len(answer)) - 1)]
        for first in range(0, len(row), part):
            here = range(first, min(first + part, len(row)))
            while any(row[at] == mask for at in here):
                logits = rows.of(answer, row, whole=True)
                logits[:, mask] = -torch.inf
                sure, token = logits.double().softmax(-1).max(-1)
                open_ = {at: float(sure[at - 1]) for at in here if row[at] == mask}
                passes += 1
                for at, how in open_.items():
                    if how >= sure_at or how == max(open_.values()):
                        row[at] = int(token[at - 1])
        answer += row
        newest = rows.next(answer)
    return answer, passes


def answer(bench: Bench, call: Call) -> list[int]:
    done = call.finished()
    tokens, _committed = bench.canvases[call.request.id]
    return tokens[done.usage.prompt_tokens :].tolist()


@pytest.mark.parametrize("what", ASKED)
def test_prompts_and_logits_are_those_of_transformers(pair: tuple[Qwen, LoadedModel], bench: Make, what: str) -> None:
    made, model = pair
    asked = request(what, ASKED[what])
    [one] = bench(model, stages="inline").engine.stages.encoder.encode([asked])
    inputs = made.inputs(asked, model.tokenizer)
    assert one.ids.tolist() == inputs["input_ids"][0].tolist()
    assert (served_rows(model, asked, one) - made.logits(inputs)).abs().max() < 1e-4


def test_drafts_are_those_of_the_authors_loop(pair: tuple[Qwen, LoadedModel], bench: Make) -> None:
    made, model = pair
    running, saved = bench(model), 0
    commit = Policy(name="draft_model", options={"length": 15})
    calls = running.submit(*(request(name, parts, commit) for name, parts in ASKED.items()))
    for call, parts in zip(calls, ASKED.values(), strict=True):
        expected, drafts = authors_drafts(Rows(made, model, parts), NEW, 16)
        assert (answer(running, call), call.finished().companion_forwards) == (expected, drafts)
        saved += NEW - call.finished().forwards
    assert saved > 0, "some drafts are right"


@pytest.mark.parametrize(("part", "sure_at"), [(8, 2.0), (8, 0.03), (16, 0.03)])
def test_blocks_are_those_of_the_authors_loop_in_one_batch_and_alone(
    pair: tuple[Qwen, LoadedModel], bench: Make, part: int, sure_at: float
) -> None:
    made, model = pair
    assert (model.spec.draft_block, model.spec.sub_block) == (16, 8)
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, sub_block=part % 16))
    running, kinds, total = bench(model), set[int](), 0
    commit = Policy(name="threshold", options={"confidence": sure_at})
    asked = [request(name, parts, commit, NEW + i) for i, (name, parts) in enumerate(ASKED.items())]
    for one, call in zip(asked, running.submit(*asked), strict=True):
        new = one.sampling.max_new_tokens
        parts = one.messages[0].parts
        expected, passes = authors_blocks(Rows(made, model, parts), new, 16, part, sure_at)
        assert (answer(running, call), call.finished().companion_forwards) == (expected, passes)
        [alone] = running.submit(dataclasses.replace(one, id=f"{one.id} alone"))
        assert answer(running, alone) == expected
        kinds |= set(expected)
        total += new - passes
    assert len(kinds) > 8, "the model says more than one token"
    assert (total > 2 * len(asked)) == (sure_at < 1), "the threshold makes several tokens known at once"


def test_token_by_token_it_is_qwen(pair: tuple[Qwen, LoadedModel], bench: Make) -> None:
    made, model = pair
    running = bench(model)
    for name, parts in ASKED.items():
        asked = request(name, parts)
        inputs = made.inputs(asked, model.tokenizer)
        [call] = running.submit(asked)
        assert answer(running, call) == made.greedy(inputs, NEW, model.spec.banned_ids)


def test_constrained_answers_are_valid_with_every_policy(pair: tuple[Qwen, LoadedModel], bench: Make) -> None:
    made, _endless = pair
    running = bench(made.load(), watch=False)
    commits = (None, Policy(name="threshold"), Policy(name="draft_model"))
    asked = [
        dataclasses.replace(request(f"{i}", ASKED["one"], commit), constraint=ConstraintSpec(Regex("(red|blue){2,3}")))
        for i, commit in enumerate(commits)
    ]
    texts = {call.finished().text for call in running.submit(*asked)}
    assert len(texts) == 1 and all(re.fullmatch("(red|blue){2,3}", text) for text in texts)


def test_drawn_answers_are_the_same_alone_and_together(pair: tuple[Qwen, LoadedModel], bench: Make) -> None:
    running = bench(pair[1])
    commits = (Policy(name="draft_model", options={"length": 6}), Policy(name="threshold", options={"confidence": 0.1}))
    drawn = [request(f"{i}", ASKED["one"], commits[i % 2], temperature=1.0, seed=i) for i in range(4)]
    together = [call.finished().text for call in running.submit(*drawn)]
    assert [running.ask(dataclasses.replace(r, id=f"alone {r.id}")).text for r in drawn] == together
    assert len(set(together)) == 4


def test_spec_and_what_is_refused(pair: tuple[Qwen, LoadedModel], bench: Make, tmp_path: Path) -> None:
    _made, model = pair
    spec = model.spec
    assert (spec.architecture, spec.attention, spec.logit_shift) == ("fast_dvlm", Attention.CAUSAL, 1)
    assert spec.draft_mask == model.tokenizer.convert_tokens_to_ids(FAST_MASK_TOKEN)
    info = bench(model).engine.stages.capabilities.describe({})
    assert {"draft_model", "threshold"} <= set(info.commit_policies) and info.images and info.videos
    with pytest.raises(InvalidArgument, match=r"block_length: must be 1"):
        bench(model).submit(dataclasses.replace(request("r", ASKED["none"], block=8)))
    other = fast_dvlm(tmp_path, bd_size=...)
    loaded = other.load()
    assert (loaded.spec.draft_block, loaded.spec.sub_block) == (32, 8)
    assert loaded.decoder.head.weight is loaded.decoder.embed.weight
    for changes, message in (
        ({"use_block_causal_mask": True}, "use_block_causal_mask = True is not supported"),
        ({"bd_size": 0}, "bd_size must be a positive number"),
        ({"architectures": ["Fast_dVLMModel"]}, "it can be Fast_dVLMForConditionalGeneration"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"mask_token_id": 10**6}, "mask_token_id 1000000 is no token"),
    ):
        before = read_json(tmp_path / "config.json")
        edit(tmp_path / "config.json", **changes)
        with pytest.raises(ConfigError, match=message):
            other.load()
        write_json(tmp_path / "config.json", before)
