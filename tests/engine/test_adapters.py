"""LoRA by request: tokens are those of the merged weights, whoever else is in the batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench, eventually
from helpers import ask
from llama_checkpoints import greedy, llama, load, save
from lora_checkpoints import ALL, ATTENTION, adapter_tensors, merged, save_adapter
from qwen_checkpoints import qwen
from qwen_vl_checkpoints import Qwen
from test_causal_engine import LAST, NONE, answer, endless
from text_checkpoints import oracle as text_oracle

from mmserve.config import ModelConfig
from mmserve.core.events import Finished
from mmserve.core.request import Diffusion, Request
from mmserve.errors import InvalidArgument, NotFound, ResourceExhausted, Unimplemented
from mmserve.models.adapters import Adapters, key_of
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.checkpoint import GENERATION
from mmserve.models.lora_files import read_adapter
from mmserve.models.registry import load_model

Make = Callable[..., Bench]
NEW = 12
#: Adapters of a batch: name to what they are for, and their rank.
KINDS: dict[str, tuple[int, tuple[str, ...] | None]] = {
    "wide": (4, None),
    "other": (4, None),
    "attention": (8, ATTENTION),
    "one": (2, ("q_proj", "down_proj")),
    "head": (4, ("v_proj", "lm_head")),
    "headonly": (2, ("lm_head",)),
    "a1": (4, None),
    "a2": (4, None),
}
ORACLES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen2": lambda: qwen("qwen2"),
    "qwen2 tied": lambda: qwen("qwen2", tie_word_embeddings=True),
    "phi3": lambda: text_oracle("phi3"),
    "gemma3_text": lambda: text_oracle("gemma3_text"),
}


def tensors_of(model: Any, seed: int, rank: int, targets: tuple[str, ...] | None) -> dict[str, torch.Tensor]:
    return adapter_tensors(model, seed, rank=rank, targets=targets or (*ALL, "qkv_proj", "gate_up_proj"))


class Made:
    """A checkpoint, the merged models of its adapters, and the folder that those are in."""

    def __init__(self, folder: Path, kind: str, kinds: dict[str, tuple[int, tuple[str, ...] | None]]) -> None:
        self.base, self.folder = ORACLES[kind](), folder / "adapters"
        self.model: LoadedModel = load(save(self.base, folder / "model"))
        self.merged: dict[str, Any] = {"": self.base}
        for seed, (name, (rank, targets)) in enumerate(kinds.items()):
            tensors = tensors_of(self.base, seed, rank, targets)
            save_adapter(self.folder / name, tensors, rank=rank)
            self.merged[name] = merged(self.base, tensors)

    def expected(self, bench: Bench, text: str, name: str) -> list[int]:
        [prompt] = bench.engine.stages.encoder.encode([ask("x", text)])
        theirs = self.merged[name]
        with torch.no_grad():
            return greedy(theirs, theirs.get_input_embeddings()(torch.from_numpy(prompt.ids)), NEW)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("lora"), "llama", KINDS)


def serving(bench: Make, made: Made, *names: str, **options: Any) -> Bench:
    running = bench(endless(made.model), adapter_folder=str(made.folder), **options)
    for name in names:
        running.engine.stages.adapters.load(name)
    return running


def asked(name: str, text: str, adapter: str, **options: Any) -> Request:
    return replace(ask(name, text, **{"max_new_tokens": NEW, "recompute": LAST, **options}), adapter=adapter)


def thirty_two() -> list[Request]:
    names = [*KINDS, ""]
    texts = ("a red circle", "what is left of it? " * 3, "?", "two shapes and more")
    return [asked(f"r{i}", f"{texts[i % 4]} {i // 4}", names[i % 9]) for i in range(32)]


def test_thirty_two_requests_with_eight_adapters_are_the_merged_weights_one_by_one(made: Made, bench: Make) -> None:
    running = serving(bench, made, *KINDS, max_running=32)
    requests = thirty_two()
    expected = [made.expected(running, r.messages[0].parts[0].text, r.adapter) for r in requests]  # type: ignore[union-attr]
    together = [answer(running, call) for call in running.submit(*requests)]
    assert together == expected
    assert max(map(len, running.batches)) > 8
    plain = [made.expected(running, r.messages[0].parts[0].text, "") for r in requests]  # type: ignore[union-attr]
    assert sum(a != b for a, b, r in zip(expected, plain, requests, strict=True) if r.adapter) > 24
    alone = serving(bench, made, *KINDS, max_running=1, prefix_cache=False, stages="inline")
    assert [answer(alone, call) for r in requests[:10] for call in alone.submit(r)] == expected[:10]


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "gemma3_text"])
def test_other_layouts(tmp_path: Path, bench: Make, kind: str) -> None:
    """Layers of a layout that lie in one tensor are one layer to peft."""
    made = Made(tmp_path, kind, {"one": (3, None), "two": (5, None)})
    running = serving(bench, made, "one", "two")
    requests = [asked(f"{name}{i}", "a red circle", name) for i, name in enumerate(("one", "two", "", "one"))]
    expected = [made.expected(running, "a red circle", r.adapter) for r in requests]
    assert [answer(running, call) for call in running.submit(*requests)] == expected
    assert len({tuple(each) for each in expected}) == 3


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("model", "lm_head"),
        ("model.language_model", "lm_head"),
        ("language_model.model", "language_model.lm_head"),
    ],
)
def test_an_adapter_has_the_names_of_any_version_of_transformers(tmp_path: Path, text: str, head: str) -> None:
    """The checkpoint has those that Qwen2-VL was published with, ``model.layers``; peft saves those of the class."""
    made = Qwen(tmp_path / "model", "qwen2_vl")
    tensors = adapter_tensors(made.oracle, 3, targets=(*ATTENTION, "lm_head"))
    names = {name: name.replace("model.language_model", text).replace("lm_head", head) for name in tensors}
    folder = save_adapter(tmp_path / "one", {names[name]: tensor for name, tensor in tensors.items()})
    model = made.load()
    adapter = read_adapter("one", folder, model.decoder, model.dtype, model.device)
    for layer, sites in enumerate(adapter.layers[:-1]):
        own = f"base_model.model.model.language_model.layers.{layer}.self_attn.o_proj.lora_A.weight"
        assert torch.equal(sites["o"].a_IR, tensors[own].T) and set(sites) == {"qkv", "o"}
    assert adapter.has_head


def test_sampled_answers_are_bit_equal_alone_and_together(made: Made, bench: Make) -> None:
    requests = [asked(f"s{i}", "a red circle, please", name, temperature=1.0, seed=i) for i, name in enumerate(KINDS)]
    requests += [asked(f"t{i}", "and " * 20, "wide", temperature=0.8, seed=i, recompute=NONE) for i in range(3)]
    together = serving(bench, made, *KINDS)
    expected = [answer(together, call) for call in together.submit(*requests)]
    alone = serving(bench, made, *KINDS, max_running=1, prefix_cache=False, stages="inline")
    assert [answer(alone, call) for r in requests for call in alone.submit(r)] == expected


def test_pages_of_prompts_are_shared_with_the_same_adapter_only(made: Made, bench: Make) -> None:
    running = serving(bench, made, "wide", "other")
    text = "a long prompt about red circles " * 4
    cached = []
    for i, name in enumerate(("wide", "other", "", "wide", "")):
        [call] = running.submit(asked(f"p{i}", text, name))
        assert answer(running, call) == made.expected(running, text, name)
        cached.append(call.finished().usage.cached_tokens)
    assert cached[:3] == [0, 0, 0] and cached[3] > 0 and cached[4] > 0


def test_loaded_listed_dropped_and_replaced(made: Made, bench: Make, tmp_path: Path) -> None:
    made_here = Made(tmp_path, "llama", {"mine": (4, None)})
    running = serving(bench, made_here)
    adapters = running.engine.stages.adapters
    with pytest.raises(NotFound, match="has no adapter 'mine'; there is: none is loaded"):
        running.submit(asked("early", "a", "mine"))
    info = adapters.load("mine")
    assert (info.name, info.rank) == ("mine", 4) and adapters.listed() == [info]
    text = "what is it?"
    [before] = running.submit(asked("r0", text, "mine"))
    first = answer(running, before)
    tensors = tensors_of(made_here.base, 99, 4, None)
    save_adapter(made_here.folder / "mine", tensors)
    again = adapters.load("mine")
    assert again.digest != info.digest and adapters.listed() == [again]
    [after] = running.submit(asked("r1", text, "mine"))
    made_here.merged["new"] = merged(made_here.base, tensors)
    assert answer(running, after) == made_here.expected(running, text, "new") != first
    adapters.drop("mine")
    assert adapters.listed() == []
    with pytest.raises(NotFound, match="has no adapter 'mine'"):
        adapters.drop("mine")
    with pytest.raises(NotFound, match="adapter_folder has no folder 'other'"):
        adapters.load("other")
    with pytest.raises(InvalidArgument, match="must match"):
        adapters.load("../mine")
    with pytest.raises(Unimplemented, match=r"it has no \[engine\] adapter_folder"):
        bench(made_here.model).engine.stages.adapters.load("mine")


def test_requests_under_way_keep_an_adapter_that_is_dropped(made: Made, bench: Make) -> None:
    running = serving(bench, made, "wide", stages="inline")
    [call] = running.submit(asked("r", "a red circle", "wide", max_new_tokens=NEW))
    running.engine.stages.adapters.drop("wide")
    try:
        tokens = answer(running, call)
    except AssertionError as gone:  # it had not begun
        assert "was dropped while the request waited" in str(gone)
    else:
        assert tokens == made.expected(running, "a red circle", "wide")


@pytest.mark.parametrize("again", [True, False])
def test_requests_that_wait_keep_an_adapter_that_is_loaded_again_or_dropped(
    bench: Make, tmp_path: Path, again: bool
) -> None:
    here, text = Made(tmp_path, "llama", {"mine": (4, None)}), "what is it?"
    running = serving(bench, here, "mine")
    expected, adapters = here.expected(running, text, "mine"), running.engine.stages.adapters
    gate = running.gate("prefill")
    calls = running.submit(asked("r", text, "mine"), asked("two", text, "mine", n=2))
    if again:
        save_adapter(here.folder / "mine", tensors_of(here.base, 99, 4, None))
        adapters.load("mine")
    else:
        adapters.drop("mine")
    gate.open()
    assert answer(running, calls[0]) == expected
    eventually(lambda: sum(isinstance(event, Finished) for event in calls[1].events) == 2, "both samples")
    running.await_nothing_left()


def test_memory_is_bounded(made: Made, bench: Make) -> None:
    size = serving(bench, made, "wide").engine.stages.adapters.listed()[0].bytes
    running = serving(bench, made, "wide", adapter_bytes=int(1.5 * size))
    adapters = running.engine.stages.adapters

    class Locked(dict[str, Any]):
        def values(self) -> Any:
            assert adapters._lock.locked(), "another thread may load or drop one meanwhile"
            return super().values()

    adapters._by_key = Locked(adapters._by_key)
    with pytest.raises(ResourceExhausted, match=r"\[engine\] adapter_bytes is"):
        adapters.load("other")
    adapters.load("wide")
    adapters.drop("wide")
    adapters.load("other")
    requests = [asked(f"r{i}", "a", "other") for i in range(5)]
    for call in running.submit(*requests):
        call.finished()
    assert adapters.stacks.held <= 1.5 * size


def test_an_adapter_that_is_held_beside_one_of_its_name_is_counted(bench: Make, tmp_path: Path) -> None:
    """A worker of a cluster has both until no request uses the older one."""
    here = Made(tmp_path, "llama", {"mine": (4, None)})
    size = serving(bench, here, "mine").engine.stages.adapters.listed()[0].bytes
    adapters = serving(bench, here, adapter_bytes=int(1.5 * size)).engine.stages.adapters
    old = adapters.hold("mine")
    assert adapters.hold("mine") == old
    save_adapter(here.folder / "mine", tensors_of(here.base, 99, 4, None))
    with pytest.raises(ResourceExhausted, match=r"\[engine\] adapter_bytes is"):
        adapters.hold("mine")
    adapters.discard([key_of(old)])
    assert adapters.hold("mine").digest != old.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16' is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora' is not supported"),
        ({"alora_invocation_tokens": [5, 7]}, r"alora_invocation_tokens = \[5, 7\] is not supported"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
    ],
)
def test_adapters_that_cannot_be_served(made: Made, bench: Make, changes: dict[str, Any], message: str) -> None:
    running = serving(bench, made)
    save_adapter(made.folder / "wrong", adapter_tensors(made.base, 3), **changes)
    with pytest.raises(InvalidArgument, match=message):
        running.engine.stages.adapters.load("wrong")


def test_tensors_that_are_for_no_layer_are_refused(made: Made, bench: Make) -> None:
    running = serving(bench, made)
    more = {f"base_model.model.score.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
    save_adapter(made.folder / "wrong", {**adapter_tensors(made.base, 3), **more})
    with pytest.raises(InvalidArgument, match=r"2 tensors are not used: base_model\.model\.score\.lora_A"):
        running.engine.stages.adapters.load("wrong")
    wide = adapter_tensors(llama(hidden_size=48), 3)
    save_adapter(made.folder / "wrong", wide)
    with pytest.raises(InvalidArgument, match=r"lora_A\.weight has shape \[4, 48\], expected \[4, 32\]"):
        running.engine.stages.adapters.load("wrong")


def test_an_output_layer_that_shares_its_weights_with_the_embeddings(tmp_path: Path, bench: Make) -> None:
    """What the adapter adds changes the logits alone, as in peft: the embeddings stay as they are."""
    made = Made(tmp_path, "qwen2 tied", {"head": (4, ("lm_head",))})
    running = serving(bench, made, "head")
    text = "a red circle"
    tokens = [answer(running, call) for call in running.submit(asked("r", text, "head"), asked("p", text, ""))]
    assert tokens == [made.expected(running, text, name) for name in ("head", "")]
    assert tokens[0] != tokens[1]


def test_rank_stabilised_scale(made: Made, bench: Make) -> None:
    tensors = adapter_tensors(made.base, 5, rank=9)
    save_adapter(made.folder / "stable", tensors, rank=9, use_rslora=True)
    running = serving(bench, made, "stable")
    made.merged["stable"] = merged(made.base, tensors, rslora=True)
    [call] = running.submit(asked("r", "a red circle", "stable"))
    assert answer(running, call) == made.expected(running, "a red circle", "stable")


@pytest.mark.parametrize(
    ("given", "asked", "expected"), [({"block_length": 4}, 0, 4), ({"block_length": 4}, 8, 8), ({}, 0, 0)]
)
def test_an_adapter_may_have_a_block_length(tmp_path: Path, given: dict[str, int], asked: int, expected: int) -> None:
    model = load_model(ModelConfig(path="bundled"))
    assert isinstance(model, LoadedModel) and model.adapters is not None
    shutil.copytree(model.adapters / "decisions", tmp_path / "own")
    plain = Adapters(model, folder=str(tmp_path), most=1 << 30)
    digest = plain.load("own").digest
    (tmp_path / "own" / GENERATION).write_text(json.dumps(given))
    adapters = Adapters(model, folder=str(tmp_path), most=1 << 30)
    assert adapters.load("own").digest != digest
    request = replace(ask("r", "a"), adapter="own", diffusion=Diffusion(block_length=asked))
    found = adapters.resolved(request)
    assert found.diffusion.block_length == expected and adapters.resolved(found) == found


@pytest.mark.parametrize(
    ("attention", "given", "message"),
    [
        (Attention.FULL, 0, "block_length"),
        (Attention.FULL, "4", "block_length"),
        (Attention.BLOCK_CAUSAL, 5, "must divide 32"),
    ],
)
def test_block_lengths_that_an_adapter_cannot_have(
    tmp_path: Path, attention: Attention, given: Any, message: str
) -> None:
    model = load_model(ModelConfig(path="bundled"))
    assert isinstance(model, LoadedModel) and model.adapters is not None
    shutil.copytree(model.adapters / "decisions", tmp_path / "own")
    (tmp_path / "own" / GENERATION).write_text(json.dumps({"block_length": given}))
    changed = replace(model, spec=replace(model.spec, attention=attention))
    with pytest.raises(InvalidArgument, match=message):
        Adapters(changed, folder=str(tmp_path), most=1 << 30).load("own")


def test_a_block_length_is_nothing_to_an_autoregressive_model(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.folder, tmp_path / "adapters")
    (tmp_path / "adapters" / "one" / GENERATION).write_text('{"block_length": 4}')
    adapters = Adapters(made.model, folder=str(tmp_path / "adapters"), most=1 << 30)
    adapters.load("one")
    assert adapters.resolved(replace(ask("r", "a"), adapter="one")).diffusion.block_length == 0
