"""SDAR-VL: prompts and logits are LLaVA-OneVision's under SDAR's mask, and answers those of the authors' loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import clip, decode_video
from harness import Bench
from helpers import ask, picture
from helpers import threshold as surer_than
from llama_checkpoints import edit, load
from llava_checkpoints import SIDE, Llava, sdar_vl
from qwen_checkpoints import block_mask
from transformers import SiglipImageProcessorPil

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import ImagePart, Message, Part, Policy, Request, TextPart, VideoPart
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.decoder import dense_attention

Make = Callable[..., Bench]
FRAMES = 3
FILE = clip(frames=12, rate=4)
#: None, one and several images, and a clip, which is beside an image in the last.
MEDIA: tuple[tuple[Part, ...], ...] = (
    (),
    (ImagePart(picture(1)),),
    (ImagePart(picture(2, (60, 20))), ImagePart(picture(3, (17, 50))), ImagePart(picture(4, (24, 24)))),
    (VideoPart(FILE),),
    (ImagePart(picture(5, (70, 70))), VideoPart(FILE)),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Llava, LoadedModel]:
    made = sdar_vl(tmp_path_factory.mktemp("model"), block_size=8)
    edit(made.folder / "config.json", mm_video_frames=FRAMES)
    with torch.no_grad():  # attention is sharp, and what is predicted at a mask depends on what surrounds it
        made.oracle.get_input_embeddings().weight[made.processor.tokenizer.mask_token_id] *= 0.2
        for name, weight in made.oracle.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight *= 2
    made.oracle.save_pretrained(made.folder / "weights")
    (made.folder / "weights" / "model.safetensors").replace(made.folder / "model.safetensors")
    model = load(made.folder)
    return made, replace(model, spec=replace(model.spec, end_ids=frozenset({-1})))


def request(index: int, new: int = 12, commit: Policy | None = None) -> Request:
    asked = ask(f"r{index}", recompute=Policy(name="block"), commit=commit, max_new_tokens=new)
    return replace(asked, messages=(Message("user", (*MEDIA[index], TextPart("what is it?"))),))


def encoded(model: LoadedModel, asked: Request) -> Encoded:
    [found] = Encoder(model, MediaConfig(), max_tokens=2000).encode([asked])
    return found


@torch.no_grad()
def inputs(made: Llava, model: LoadedModel, index: int, ours: Encoded) -> dict[str, torch.Tensor]:
    """What transformers' processors make of the request."""
    files = [part.data for part in MEDIA[index] if isinstance(part, ImagePart)]
    content = [{"type": "image" if isinstance(part, ImagePart) else "video"} for part in MEDIA[index]]
    if not any(isinstance(part, VideoPart) for part in MEDIA[index]):
        chat = [{"role": "user", "content": [*content, {"type": "text", "text": "what is it?"}]}]
        text = model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return made.inputs(str(text), files)
    values: dict[str, torch.Tensor] = {}
    if files:
        values = {k: v for k, v in made.inputs("<image>" * len(files), files).items() if "ids" not in k}
    settings = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    frames = list(decode_video(FILE, MediaConfig(), frames=FRAMES).frames)
    pixels = SiglipImageProcessorPil(**settings)(frames, return_tensors="pt")["pixel_values"][None]
    return {**values, "pixel_values_videos": pixels, "input_ids": torch.from_numpy(ours.ids)[None]}


@torch.no_grad()
def logits(made: Llava, values: dict[str, torch.Tensor], more: list[int], block: int) -> torch.Tensor:
    """``[T, V]`` of a prompt and ``more`` tokens, each of which sees to the end of its own block."""
    row = torch.cat([values["input_ids"], torch.tensor([more], dtype=torch.int64)], 1)
    asked = {**values, "input_ids": row, "attention_mask": block_mask(row.shape[1], block)}
    found: torch.Tensor = made.oracle(**asked).logits[0]
    return found


def authors_loop(
    made: Llava, values: dict[str, torch.Tensor], new: int, spec: Any, threshold: float | None
) -> list[int]:
    """``block_diffusion_generate`` of JetAstra/SDAR-VL at temperature 0, one step for each position of a block.

    ``low_confidence_static`` commits the surest token of a step, ``low_confidence_dynamic`` all that are surer than
    ``threshold``, if there is one. The blocks of K/V that its cache keeps are those of a row that is run whole.
    """
    block, row = spec.default_block_length, [spec.mask_id] * new
    start = values["input_ids"].shape[1]
    for first in range(start // block * block, start + new, block):
        end = min(first + block, start + new)
        own = slice(max(first - start, 0), end - start)
        while spec.mask_id in row[own]:
            found = logits(made, values, row[: own.stop], block)[start + own.start : end].softmax(-1)
            found[:, list(spec.banned_ids)] = 0.0
            sure, token = found.max(-1)
            sure[torch.tensor(row[own]) != spec.mask_id] = -1.0
            surer = torch.nonzero(sure > (2.0 if threshold is None else threshold)).flatten().tolist()
            for at in surer or [int(sure.argmax())]:
                row[own.start + at] = int(token[at])
    return row


def test_prompts_and_logits_equal_transformers(pair: tuple[Llava, LoadedModel]) -> None:
    made, model = pair
    last = []
    for index in range(len(MEDIA)):
        ours = encoded(model, request(index))
        values = inputs(made, model, index, ours)
        assert ours.ids.tolist() == values["input_ids"][0].tolist()
        x = model.decoder.embed(torch.from_numpy(ours.ids))
        if ours.features is not None:
            x[torch.from_numpy(ours.image_rows)] = ours.features
        last.append(store_row(model, x))
        assert (last[-1] - logits(made, values, [], 8)).abs().max() < 1e-4
    assert made.oracle.config.video_token_id == model.spec.video_id
    assert (last[1][-1] - last[0][-1]).abs().max() > 1e-2, "what is in a picture does matter"


def store_row(model: LoadedModel, x_TD: torch.Tensor) -> torch.Tensor:
    """Logits ``[T, V]`` of embedded tokens, through the decoder by itself."""
    length = len(x_TD)
    seen = block_mask(length, 8) == 0
    with torch.inference_mode():
        hidden = model.decoder(x_TD[None], torch.arange(length)[None], dense_attention(seen))
        return model.decoder.logits(hidden)[0]


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_answers_are_those_of_the_authors_loop_in_one_batch(
    pair: tuple[Llava, LoadedModel], bench: Make, threshold: float | None
) -> None:
    made, model = pair
    commit = None if threshold is None else surer_than(threshold)
    asked = [request(index, 13, commit) for index in range(len(MEDIA))]
    running, kinds = bench(model, max_tokens=1000), set()
    for index, call in enumerate(running.submit(*asked)):
        done = call.finished()
        tokens, committed = running.canvases[call.request.id]
        ours = tokens[(committed < 1 << 30) & (np.arange(len(tokens)) >= done.usage.prompt_tokens)].tolist()
        values = inputs(made, model, index, encoded(model, asked[index]))
        assert ours == authors_loop(made, values, 13, model.spec, threshold)
        kinds |= set(ours)
    assert len(kinds) > 8, "the model says more than one token"


def test_spec_and_what_is_refused(pair: tuple[Llava, LoadedModel], tmp_path: Path) -> None:
    made, model = pair
    spec, tok = model.spec, made.processor.tokenizer
    assert (spec.architecture, spec.attention, spec.default_block_length) == ("sdar_v", Attention.BLOCK_CAUSAL, 8)
    assert (spec.mask_id, spec.image_id) == (tok.mask_token_id, tok.convert_tokens_to_ids("<image>"))
    other = sdar_vl(tmp_path)
    assert load(other.folder).spec.end_ids >= {tok.eos_token_id}
    for changes, message in (
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"model_type": "qwen3"}, "text_config of 'sdar_v' must be of model_type 'sdar'"),
    ):
        edit(other.folder / "config.json", text_config={**other.config["text_config"], **changes})
        with pytest.raises(ConfigError, match=message):
            load(other.folder)
