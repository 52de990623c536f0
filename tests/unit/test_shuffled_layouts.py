"""Pixel shuffle, and what SmolVLM and InternVL make of tiles, clips and configurations, against transformers' own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clips import Clip, clip, decode_video
from helpers import ask, picture
from llama_checkpoints import edit, load, our_logits
from PIL import Image
from pixtral_checkpoints import mistral3, pixtral
from shuffled_checkpoints import SIDE, TILE, Checkpoint, internvl, internvl_chat, smolvlm
from transformers.models.internvl.modeling_internvl import InternVLModel
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, Message, TextPart, VideoPart
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel
from mmserve.models.checkpoint import write_json
from mmserve.models.evidence import OF_CLASS, OF_PATCHES
from mmserve.models.shuffle import squares
from mmserve.models.smolvlm_vision import in_words
from mmserve.prune.base import Evidence, GridView, Part
from mmserve.prune.hired import Hired

FILE = clip(frames=12, rate=4)
VIDEO_SETTINGS = {"num_frames": 3, "size": {"height": SIDE, "width": SIDE}}


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_squares_are_in_the_order_of_transformers(factor: int) -> None:
    x = torch.randn(2, 36, 5)
    ours = squares(x, factor).flatten(2)
    smol: Any = SimpleNamespace(scale_factor=factor)
    assert torch.equal(ours, SmolVLMConnector.pixel_shuffle(smol, x, factor))
    if factor < 3:  # of a third, transformers finds that 6 does not divide by it
        theirs = InternVLModel.pixel_shuffle(smol, x.view(2, 6, 6, 5), 1 / factor)
        assert torch.equal(ours, theirs.flatten(1, 2))


# --- evidence ---


def attentions(tower: Any, pixels: torch.Tensor) -> Any:
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        return tower(pixels, output_attentions=True, output_hidden_states=True)


def pooled(values: torch.Tensor) -> torch.Tensor:
    """Means over squares of 2 x 2 of a grid of 6 x 6, ``[36]`` or ``[36, C]``."""
    return values.view(3, 2, 3, 2, *values.shape[1:]).mean((1, 3)).flatten(0, 1)


@pytest.mark.parametrize("kind", ["smolvlm", "internvl", "internvl with normed queries and keys"])
def test_evidence_is_eager_attention_over_squares(tmp_path: Path, kind: str) -> None:
    changes = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False} if "normed" in kind else {}
    made = smolvlm(tmp_path) if kind == "smolvlm" else internvl(tmp_path, tower=changes)
    vision, inner = load(tmp_path).vision, made.oracle.model
    assert vision is not None
    first, wanted = (0, OF_PATCHES) if kind == "smolvlm" else (1, OF_PATCHES | OF_CLASS)
    assert vision.evidence == wanted
    prepared = vision.prepare(Image.open(io.BytesIO(picture(1))))
    tower = inner.vision_model if kind == "smolvlm" else inner.vision_tower
    keys: list[torch.Tensor] = []
    last = tower.encoder.layers[-1].self_attn.k_proj if kind == "smolvlm" else tower.encoder.layer[-1].attention.k_norm
    last.register_forward_hook(lambda _module, _args, out: keys.append(out))
    out = attentions(tower, prepared["pixels"])
    with torch.inference_mode():
        [seen], [plain] = (vision.encode([prepared], asked, clip=False) for asked in (wanted, frozenset()))
    assert torch.equal(seen.tokens, plain.tokens), "what is asked for has no say in the tokens"
    assert len(seen.grids) == len(prepared["pixels"]) > 2
    for i, grid in enumerate(seen.grids):
        assert (grid.view.rows, grid.view.columns) == (3, 3)
        assert grid.patches.tolist() == list(range(i * TILE, (i + 1) * TILE))
        expected = {
            Evidence.CLS_ROW: out.attentions[-1][i, :, 0].mean(0)[first:],
            Evidence.FIRST_CLS_ROW: out.attentions[0][i, :, 0].mean(0)[first:],
            Evidence.LAST_CLS_ROW: out.attentions[-1][i, :, 0].mean(0)[first:],
            Evidence.COLUMN_MEANS: out.attentions[-1][i].mean((0, 1))[first:],
            Evidence.KEYS: keys[0][i, first:].unflatten(-1, (tower.config.num_attention_heads, -1)).mean(1),
            Evidence.FIRST_FEATURES: out.hidden_states[1][i, first:],
        }
        assert grid.view.evidence.keys() == wanted
        for name in wanted:
            assert (grid.view[name] - pooled(expected[name])).abs().max() < 1e-5, name


@pytest.mark.parametrize("make", [smolvlm, internvl])
def test_tiles_say_what_they_show(tmp_path: Path, make: Callable[[Path], Checkpoint]) -> None:
    make(tmp_path)
    vision = load(tmp_path).vision
    assert vision is not None
    with torch.inference_mode():
        wide = vision.encode([vision.prepare(Image.new("RGB", (48, 24)))], frozenset(), clip=False)
        small = vision.encode([vision.prepare(Image.new("RGB", (1, 1)))], frozenset(), clip=False)
    assert [grid.view.part for grid in wide[0].grids] == [Part(0, 1, 0, 0.5), Part(0, 1, 0.5, 1), None]
    assert small[0].grids[-1].view.part is None


def test_hired_knows_the_whole_view_wherever_it_stands() -> None:
    def view(row: list[float], part: Part | None) -> GridView:
        scores = torch.tensor(row)
        return GridView(2, 2, {Evidence.CLS_ROW: scores, Evidence.FIRST_CLS_ROW: scores}, part)

    tiles = [view([0.1] * 4, Part(0, 1, 0, 0.5)), view([0.1] * 4, Part(0, 1, 0.5, 1))]
    whole = view([0.6, 0.2, 0.1, 0.1], None)
    last, first = (Hired().plans(views, Amount("token_budget", 8)) for views in ([*tiles, whole], [whole, *tiles]))
    assert [len(plan.places) for plan in last] == [2, 2, 4]
    assert [plan.places.tolist() for plan in [last[2], *last[:2]]] == [plan.places.tolist() for plan in first]


# --- clips ---


def encoded(model: LoadedModel) -> Encoded:
    request = ask("clip", "how long?")
    parts = (TextPart("GridView: "), VideoPart(FILE), TextPart("how long?"))
    encoder = Encoder(model, MediaConfig(), max_tokens=1000)
    with torch.inference_mode():
        [found] = encoder.encode([request.__class__(**{**vars(request), "messages": (Message("user", parts),)})])
    return found


def content(video: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "GridView: "}, {"type": video}, {"type": "text", "text": "how long?"}]
    return [{"role": "user", "content": parts}]


@torch.no_grad()
def check_clip(made: Checkpoint, model: LoadedModel, text: str, pixels: torch.Tensor) -> None:
    """The prompt is ``text`` as a whole, and logits are transformers' of ``pixels``."""
    ours, ids = encoded(model), made.processor.tokenizer(text, return_tensors="pt")["input_ids"]
    rows = ours.ids.copy()
    rows[ours.image_rows] = made.oracle.config.image_token_id
    assert rows.tolist() == ids[0].tolist()
    assert ours.features is not None
    x = model.decoder.embed(torch.from_numpy(rows))
    x[torch.from_numpy(ours.image_rows)] = ours.features
    theirs = made.oracle(input_ids=ids, pixel_values=pixels).logits
    assert (our_logits(model, x[None]) - theirs).abs().max() < 1e-4


def test_a_clip_of_smolvlm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three frames from the first to the last of three seconds, as the processor takes and writes them; frames are
    images that are not cut."""
    made = smolvlm(tmp_path)
    model = load(tmp_path)
    every = decode_video(FILE, MediaConfig(), frames=12)
    chosen = np.linspace(0, 11, 3, dtype=int).tolist()
    frames = Clip(tuple(every.frames[i] for i in chosen), tuple(every.seconds[i] for i in chosen))
    images = copy.deepcopy(made.processor.image_processor)
    images.do_image_splitting, images.size = False, {"longest_edge": SIDE}
    pixels = images([list(frames.frames)], return_tensors="pt")["pixel_values"]
    monkeypatch.setattr(processing_smolvlm, "num2words", {3: "three"}.__getitem__)
    metadata = SimpleNamespace(fps=4, timestamps=frames.seconds, duration=3.0)
    row = made.processor.replace_video_token({"pixel_values": pixels, "video_metadata": [metadata]}, 0)
    template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE
    text = made.processor.tokenizer.apply_chat_template(
        content("video"), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text.count("<video>") == 1
    check_clip(made, model, text.replace("<video>", row), pixels)


def test_a_clip_of_internvl(tmp_path: Path) -> None:
    made = internvl(tmp_path)
    assert load(tmp_path).spec.video_id is None
    write_json(tmp_path / "video_preprocessor_config.json", VIDEO_SETTINGS)
    model = load(tmp_path)
    frames = decode_video(FILE, MediaConfig(), frames=3)
    pixels = made.processor.image_processor(list(frames.frames), return_tensors="pt", crop_to_patches=False)
    row = made.processor.replace_video_token({"pixel_values_videos": pixels["pixel_values"][None]}, 0)
    text = made.processor.tokenizer.apply_chat_template(content("video"), tokenize=False, add_generation_prompt=True)
    check_clip(made, model, text.replace("<video>", row), pixels["pixel_values"])


@pytest.mark.parametrize("name", ["internvl2_5", None])
def test_a_clip_of_internvl_chat(tmp_path: Path, name: str | None) -> None:
    """As ``chat`` of the authors' model card has it: each frame one tile, an image with its number in front."""
    made = internvl_chat(tmp_path, template=name, mm_video_frames=3)
    model = load(tmp_path)
    frames = decode_video(FILE, MediaConfig(), frames=3)
    pixels = made.processor.image_processor(list(frames.frames), return_tensors="pt", crop_to_patches=False)
    image = f"<img>{'<IMG_CONTEXT>' * TILE}</img>"
    question = "GridView: " + "".join(f"Frame{i}: {image}\n" for i in (1, 2, 3)) + "how long?"
    text = mpt(LATER, "<|im_end|>\n", [("user", question)])
    if name is None:
        text = text.removeprefix(f"<|im_start|>system\n{LATER}<|im_end|>\n")
    check_clip(made, model, text, pixels["pixel_values"])
    assert load(internvl_chat(tmp_path).folder).vision.frames_per_video == 8


def test_numbers_in_words() -> None:
    words = {0: "zero", 1: "one", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    words |= {101: "one hundred and one", 999: "nine hundred and ninety-nine"}
    assert {number: in_words(number) for number in words} == words
    assert len({in_words(number) for number in range(1000)}) == 1000


# --- checkpoints ---


def test_tensors_may_have_the_names_within(tmp_path: Path) -> None:
    """As ``state_dict`` of transformers' class has them, not as published."""
    made = internvl(tmp_path)
    model = load(tmp_path)
    made.oracle.save_pretrained(tmp_path, save_original_format=False)
    write_json(tmp_path / "config.json", made.config)
    again = load(tmp_path)
    assert "model.language_model.norm.weight" in made.oracle.state_dict()
    x = torch.randn(1, 9, again.width)
    assert torch.equal(our_logits(model, x), our_logits(again, x))


@pytest.mark.parametrize("make", [smolvlm, internvl])
def test_tied_embeddings(tmp_path: Path, make: Callable[..., Checkpoint]) -> None:
    made = make(tmp_path, tie_word_embeddings=True)
    model = load(tmp_path)
    assert model.decoder.head.weight is model.decoder.embed.weight
    ids = torch.arange(9)[None]
    with torch.no_grad():
        theirs = made.oracle(input_ids=ids).logits
        assert (our_logits(model, model.decoder.embed(ids)) - theirs).abs().max() < 1e-4


def test_rotation_that_grows_beyond_the_context_is_plain_within(tmp_path: Path) -> None:
    """InternVL3's decoders say ``dynamic``: transformers changes nothing up to ``max_position_embeddings``."""
    made = internvl(tmp_path, text_options={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    model = load(tmp_path)
    ids = torch.randint(0, 500, (1, 70))
    with torch.no_grad():
        theirs = made.oracle(input_ids=ids).logits
        assert (our_logits(model, model.decoder.embed(ids)) - theirs).abs().max() < 1e-4


# --- chats of ``internvl_chat`` ---

SECOND = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
LATER = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"


def mpt(system: str, separator: str, turns: list[tuple[str, str]]) -> str:
    """``SeparatorStyle.MPT`` of the authors' conversation.py; an open turn of the assistant at the end."""
    text = f"<|im_start|>system\n{system}{separator}"
    for role, said in turns:
        text += f"<|im_start|>{role}\n{said}{separator}"
    return text + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "separator", "system"),
    [
        ("internvl2_5", "<|im_end|>\n", LATER),
        ("Hermes-2", "<|im_end|>", SECOND),
        ("internlm2-chat", "<|im_end|>", SECOND),
    ],
)
def test_chats_have_the_format_that_is_named(tmp_path: Path, name: str, separator: str, system: str) -> None:
    tok = load(internvl_chat(tmp_path, template=name).folder).tokenizer
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what? "}]}
    said = ("user", "<IMG_CONTEXT>\n what? ")
    chats: list[tuple[list[dict[str, Any]], str]] = [
        ([asked], mpt(system, separator, [said])),
        ([{"role": "system", "content": "Be brief."}, asked], mpt("Be brief.", separator, [said])),
        (
            [asked, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Where?"}],
            mpt(system, separator, [said, ("assistant", "A cat."), ("user", "Where?")]),
        ),
    ]
    for chat, expected in chats:
        assert tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected


@pytest.mark.parametrize("name", [None, "phi4-chat"])
def test_a_format_that_is_not_known_leaves_the_tokenizer_s(
    tmp_path: Path, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tok = load(internvl_chat(tmp_path, template=name).folder).tokenizer
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    text = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n<IMG_CONTEXT>\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    assert ("'phi4-chat' is not one of Hermes-2, internlm2-chat, internvl2_5" in caplog.text) is (name is not None)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (smolvlm, {"scale_factor": 4}, "tiles of 24 pixels .* are not whole squares of 4 x 4 patches of 4"),
        (smolvlm, {"image_token_id": 3}, "chat template cannot render"),
        (internvl, {"image_token_id": 5000}, "image_token_id 5000 is no token of the tokenizer"),
        (internvl, {"downsample_ratio": 0.3}, "downsample_ratio = 0.3 is not supported; it can be 0.5"),
        (internvl, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy = 'full' is not"),
        (internvl, {"vision_feature_layer": [-1, -2]}, r"vision_feature_layer = \[-1, -2\] is not one of"),
        (internvl, {"vision_feature_layer": 9}, "vision_feature_layer = 9 is not one of the tower's 3 layers"),
        (internvl, {"text_config": "qwen2"}, "config.json"),
        (internvl_chat, {"ps_version": "v1"}, "ps_version = 'v1' is not supported; it can be 'v2'"),
        (internvl_chat, {"use_thumbnail": False}, "use_thumbnail = False is not supported"),
        (internvl_chat, {"llm_config": ...}, "has no vision_config and llm_config"),
        (internvl_chat, {"llm_config": {"model_type": "internlm2"}}, "internlm2"),
        (internvl_chat, {"force_image_size": 48}, r"makes tiles of \(48, 48\), the tower takes"),
    ],
)
def test_configurations_that_cannot_be_served(
    tmp_path: Path, make: Callable[[Path], Checkpoint], changes: dict[str, Any], message: str
) -> None:
    make(tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (smolvlm, {"max_image_size": {"longest_edge": 20}}, "tiles of 20 pixels"),
        (smolvlm, {"video_sampling": {"max_frames": 4}}, "names no video_size, max_frames and fps"),
        (smolvlm, {"video_sampling": {"max_frames": 0, "fps": 1, "video_size": {"longest_edge": 24}}}, "1 to 999"),
        (internvl, {"size": {"height": 20, "width": 20}}, r"makes tiles of \(20, 20\), the tower takes"),
        (internvl, {"do_resize": False}, "do_resize = False of the image processor"),
        (internvl, {"max_patches": 10**30}, f"max_patches = {10**30} of the image processor must be 1 to 1024"),
        (internvl, {"min_patches": 13, "max_patches": 12}, "min_patches = 13 and max_patches = 12"),
        (
            internvl,
            {"image_std": [0.2, 0.2]},
            "a value in its files may be wrong: ValueError: std must have 3 elements",
        ),
        (smolvlm, {"image_std": [0.2, 0.0, 0.2]}, "image_std of an image or video processor"),
        (mistral3, {"do_resize": False}, "do_resize = False of the image processor"),
        (pixtral, {"do_resize": False}, "do_resize = False of the image processor"),
    ],
)
def test_processors_that_do_not_fit(
    tmp_path: Path, make: Callable[[Path], Checkpoint], changes: dict[str, Any], message: str
) -> None:
    make(tmp_path)
    edit(tmp_path / "preprocessor_config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_without_a_processor_nothing_is_served(tmp_path: Path) -> None:
    smolvlm(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="the image processor's settings cannot be read"):
        load(tmp_path)


def test_a_layer_before_the_last(tmp_path: Path) -> None:
    made = internvl(tmp_path, vision_feature_layer=-2)
    vision = load(tmp_path).vision
    assert vision is not None
    prepared = vision.prepare(Image.fromarray(np.full((24, 24, 3), 99, np.uint8)))
    with torch.inference_mode():
        [seen] = vision.encode([prepared], frozenset(), clip=False)
        theirs = made.oracle.get_image_features(prepared["pixels"]).pooler_output
    assert (seen.tokens - theirs.flatten(0, 1)).abs().max() < 1e-5
