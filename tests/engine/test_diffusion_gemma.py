"""DiffusionGemma in the engine: transformers' own logits and tokens from the same random numbers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma_checkpoints import (
    LENGTH,
    entropy,
    expected,
    gemma,
    load_gemma,
    prompt_of,
    row_of,
    save_gemma,
    transformers_own,
    watched,
)
from harness import Bench
from helpers import tiny_model, tokenizer
from safetensors.torch import load_file, save_file
from test_samples import Samples, several, told
from transformers.models.diffusion_gemma import EntropyBoundSamplerConfig

from mmserve.config import ModelConfig
from mmserve.core.events import Snapshot
from mmserve.core.request import ImagePart, Message, Policy, Request
from mmserve.core.samples import samples
from mmserve.errors import ConfigError, FailedPrecondition, InvalidArgument, Unimplemented
from mmserve.kv.table import PageTable
from mmserve.models.base import CanvasModel, OpenCanvas
from mmserve.models.companion import accompany
from mmserve.models.registry import load_model

Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tmp_path_factory.mktemp("gemma"), 12)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return transformers_own(folder)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> CanvasModel:
    return load_gemma(folder)


def test_logits_are_those_of_transformers(oracle: Any, loaded: CanvasModel) -> None:
    torch.manual_seed(1)
    prompt, first = torch.randint(600, (21,)), torch.randint(600, (LENGTH,))
    before = torch.randn(LENGTH, len(tokenizer()))
    with torch.no_grad():
        past = loaded.network.read(prompt, None)
        past = loaded.network.read(first, past)
        for said in (None, before):
            [mine] = loaded.network.predict([OpenCanvas(first, past, said)])
            theirs = oracle(
                input_ids=torch.cat([prompt, first])[None],
                decoder_input_ids=first[None],
                self_conditioning_logits=None if said is None else said[None],
            ).logits[0]
            assert mine.dtype == torch.float32
            assert (mine - theirs).abs().max() < 1e-4
        assert theirs.std() > 0.1


def test_a_canvas_says_the_same_to_the_last_bit_whoever_is_beside_it(bench: Make, loaded: CanvasModel) -> None:
    """Behind texts of any length, new ones among those that were told something, and more of them than a pass holds."""
    bench(loaded, started=False, watch=False)  # it measures how few rows a product may have
    generator = torch.Generator().manual_seed(1)
    canvases = []
    for i in range(11):
        past = loaded.network.read(torch.randint(loaded.vocab_size, (3 + 7 * i,), generator=generator), None)
        told = 5 * torch.randn(LENGTH, loaded.vocab_size, generator=generator) if i % 3 else None
        tokens = torch.randint(loaded.vocab_size, (LENGTH,), generator=generator)
        canvases.append(OpenCanvas(tokens, past, told))
    with torch.inference_mode():
        together = loaded.network.predict(canvases)
        for count in (1, 2, 5):
            for i in range(0, 11, count):
                for mine, other in zip(loaded.network.predict(canvases[i : i + count]), together[i:], strict=False):
                    assert torch.equal(mine, other)


@pytest.mark.parametrize("new", [LENGTH, 3 * LENGTH])
def test_tokens_are_those_of_transformers(bench: Make, oracle: Any, folder: Path, new: int, monkeypatch: Any) -> None:
    b = watched(bench(load_gemma(folder, same_bits=True), stages="inline", watch=False))
    kinds: set[int] = set()
    for seed, text in enumerate(("a red circle", "what is left of it? " * 3, "?")):
        tokens, passes = expected(oracle, prompt_of(b, text), new, seed, monkeypatch, eos_token_id=-1)
        call = b.submit(gemma(text, text, max_new_tokens=new, seed=seed))[0]
        assert row_of(b, call) == tokens
        assert call.finished().forwards == passes
        kinds |= set(tokens)
    assert len(kinds) > 10


def test_a_sure_canvas_ends_early_as_in_transformers(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """Cold, with small weights and a bound that accepts everything, a canvas soon predicts itself."""
    oracle = transformers_own(save_gemma(tmp_path, 1))
    model = load_gemma(tmp_path, same_bits=True)
    assert model.spec.renoising is not None
    rule = dataclasses.replace(model.spec.renoising, steps=30, t_max=0.002, t_min=0.001)
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, renoising=rule))
    b = watched(bench(model, stages="inline", watch=False))
    ended = 0
    for seed in range(2):
        tokens, passes = expected(
            oracle,
            prompt_of(b, "a"),
            2 * LENGTH,
            seed,
            monkeypatch,
            eos_token_id=-1,
            max_denoising_steps=30,
            t_max=0.002,
            t_min=0.001,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=1e9),
        )
        call = b.submit(gemma(f"{seed}", "a", max_new_tokens=2 * LENGTH, seed=seed, commit=entropy(bound=1e9)))[0]
        assert call.finished().forwards == passes
        assert row_of(b, call) == tokens
        ended += passes < 60
    assert ended


def requests() -> list[Request]:
    return [
        gemma(
            f"r{i}",
            "red circle " * (i % 4) + f"{i}",
            max_new_tokens=(3, 8, 11, 17)[i % 4],
            seed=i,
            steps=(0, 12)[i % 2],
            commit=entropy(bound=5.0) if i % 3 else entropy(),
        )
        for i in range(9)
    ]


def test_an_answer_is_the_same_alone_and_in_a_ragged_batch(bench: Make, loaded: CanvasModel) -> None:
    single = watched(bench(loaded, stages="inline", watch=False))
    alone = {}
    for request in requests():
        call = single.submit(request)[0]
        alone[request.id] = call.finished().text, call.finished().forwards, row_of(single, call)
    b = watched(bench(loaded, watch=False))
    for call in b.submit(*reversed(requests())):
        done = call.finished()
        assert (done.text, done.forwards, row_of(b, call)) == alone[call.request.id]
    b.await_nothing_left()


def test_text_is_final_only_when_its_canvas_is_and_snapshots_show_what_it_may_become(
    bench: Make, loaded: CanvasModel
) -> None:
    b: Bench = bench(loaded, watch=False)
    call = b.submit(gemma("s", "a red circle", max_new_tokens=2 * LENGTH, snapshots=True))[0]
    done = call.finished()
    assert "".join(call.deltas) == done.text
    assert len(call.deltas) <= 3, "two canvases, and what the end brings"
    assert [s.forwards for s in call.snapshots] == list(range(1, done.forwards + 1))
    shots: list[Snapshot] = call.snapshots
    assert shots[0].committed == 0 and shots[-1].committed == 2 * LENGTH == shots[-1].total
    assert {s.committed for s in shots} == {0, LENGTH, 2 * LENGTH} and all(s.edited == 0 for s in shots)
    assert len({s.text for s in shots}) > 2


def test_the_budget_and_the_end_of_text_cut_the_answer(bench: Make, loaded: CanvasModel) -> None:
    b: Bench = bench(loaded, watch=False)
    done = b.ask(gemma("l", "a red circle", max_new_tokens=5))
    assert (done.reason, done.usage.completion_tokens) == ("length", 5)


def test_what_it_does_not_do_is_refused(bench: Make, loaded: CanvasModel) -> None:
    b: Bench = bench(loaded, watch=False)
    info = b.engine.info
    assert (info.recompute_policies, info.commit_policies) == (("block",), ("entropy_bound",))
    assert info.block_length == info.max_new_tokens == LENGTH and info.diffusion and not info.images
    for field, given in (("temperature", 1.0), ("top_k", 3), ("repetition_penalty", 1.2)):
        with pytest.raises(InvalidArgument, match=f"sampling.{field}"):
            b.submit(gemma("x", "a", **{field: given}))
    with pytest.raises(InvalidArgument, match=r"diffusion.block_length: must be 8"):
        b.submit(gemma("x", "a", block=4))
    with pytest.raises(Unimplemented, match=r"name one under \[schedulers.NAME\] of the server; it has entropy_bound$"):
        b.submit(gemma("x", "a", commit=Policy(name="scheduler")))
    for name in ("threshold", "learned", "guided"):  # nothing that could be named or trained would help
        with pytest.raises(Unimplemented, match=f"no commit policy '{name}'; it has entropy_bound$"):
            b.submit(gemma("x", "a", commit=Policy(name=name)))
    seen = Message("user", (ImagePart(b"x"),))
    call = b.submit(dataclasses.replace(gemma("i", "a"), messages=(seen,)))[0]
    assert isinstance(call.error(), FailedPrecondition)


def test_a_sample_is_the_answer_to_a_request_with_its_seed(bench: Make, loaded: CanvasModel) -> None:
    b: Bench = bench(loaded, watch=False)
    request = several(gemma("n", "a red circle", max_new_tokens=2 * LENGTH, seed=4), 3)
    alone = [b.ask(dataclasses.replace(one, id=f"a{i}")) for i, one in enumerate(samples(request))]
    assert [told(e) for e in Samples(b, request).finished()] == [told(e) for e in alone]
    assert len({e.text for e in alone}) == 3
    b.await_nothing_left()


def test_nothing_is_shared_between_prompts(bench: Make, loaded: CanvasModel) -> None:
    """The network keeps its K/V to itself: a page of the pool holds none that another request could read."""
    b: Bench = bench(loaded, watch=False, prefix_cache=True)
    first, second = (b.ask(gemma(name, "a red circle " * 4)) for name in "ab")
    assert second.usage.prompt_tokens > 2 * b.engine.config.page_size
    assert second.usage.cached_tokens == 0 and told(second) == told(first)


def test_it_neither_has_nor_is_a_companion(loaded: CanvasModel) -> None:
    with pytest.raises(ConfigError, match="denoises random tokens takes none"):
        accompany(loaded, tiny_model(vision=False))
    with pytest.raises(ConfigError, match="it is no autoregressive model"):
        accompany(tiny_model(vision=False), loaded)


def test_a_checkpoint_without_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.decoder.self_conditioning.pre_norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"self_conditioning\.pre_norm\.weight"):
        load_model(ModelConfig(path=str(broken), device="cpu"))


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([0.1], r"generation_config\.json: sampler_config must be an object, not \[0\.1\]"),
        ({"entropy_bound": "low"}, "entropy_bound must be a positive number, not 'low'"),
        ({"_cls_name": "OtherConfig"}, "_cls_name = 'OtherConfig' is not supported"),
    ],
)
def test_samplers_that_are_not_supported(folder: Path, tmp_path: Path, sampler: Any, message: str) -> None:
    path = _changed(folder, tmp_path, "generation_config.json", {"sampler_config": sampler})
    with pytest.raises(ConfigError, match=message):
        load_model(ModelConfig(path=str(path), device="cpu"))


def test_a_padding_token_beyond_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    path = _changed(folder, tmp_path, "config.json", {"text_config": {**text, "pad_token_id": 10**6}})
    with pytest.raises(ConfigError, match="cannot be read: Padding_idx must be within"):
        load_model(ModelConfig(path=str(path), device="cpu"))


def test_a_temperature_of_zero_and_no_stable_step_are_settings_as_in_transformers(folder: Path, tmp_path: Path) -> None:
    path = _changed(folder, tmp_path, "generation_config.json", {"t_min": 0.0, "stability_threshold": 0})
    rule = load_model(ModelConfig(path=str(path), device="cpu")).spec.renoising
    assert rule is not None and (rule.t_min, rule.stable) == (0.0, 0)


def _changed(folder: Path, copy: Path, name: str, changed: dict[str, Any]) -> Path:
    """A ``copy`` of the checkpoint whose file ``name`` has some other values."""
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    settings = json.loads((folder / name).read_text())
    (copy / name).unlink()
    (copy / name).write_text(json.dumps({**settings, **changed}))
    return copy


def test_between_steps_logits_take_the_models_dtype(bench: Make, folder: Path) -> None:
    running = bench(load_model(ModelConfig(path=str(folder), dtype="bfloat16", device="cpu")), watch=False)
    decoder, kept = running.engine.stages.decoder, set[torch.dtype]()
    commit = decoder.commit

    def noting(d: Any) -> Any:
        made = commit(d)
        kept.update(() if d.step is None else (d.step.shaped_LV.dtype,))
        return made

    decoder.commit = noting
    running.ask(requests()[0])
    assert kept == {torch.bfloat16}


def test_a_pass_that_failed_can_be_repeated(bench: Make, loaded: CanvasModel, monkeypatch: Any) -> None:
    """Also where the network had already read a finished canvas into its cache."""
    stages = bench(loaded, started=False, watch=False).engine.stages
    decoder, request = stages.decoder, gemma("f", "a red circle", max_new_tokens=3 * LENGTH, seed=2)

    def run(again: bool) -> tuple[str, int]:
        [encoded] = stages.encoder.encode([request])
        [prefilled] = decoder.prefill([(request, decoder.begin(request, encoded, PageTable(tuple(range(9)))))])
        d, text, outcome = decoder.open(request, prefilled), "", None
        while outcome is None or outcome.reason is None:
            if again and d.logits_LV is None and d.read < d.canvas.block_start:
                monkeypatch.setattr(loaded.network, "predict", lambda *_given: 1 / 0)
                read = loaded.network.read
                monkeypatch.setattr(loaded.network, "read", lambda *given, read=read: (read(*given), 1 / 0))
                with pytest.raises(ZeroDivisionError):
                    decoder.propose([d])
                monkeypatch.undo()
            decoder.propose([d])
            outcome = decoder.commit(d)
            text += outcome.delta
        return text, d.forwards

    assert run(again=True) == run(again=False)
