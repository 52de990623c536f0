"""Schedulers of diffusers over canvases of random tokens: their own pipeline's tokens from the same random numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from gemma_checkpoints import LENGTH, gemma, load_gemma, prompt_of, row_of, save_gemma, transformers_own, watched
from harness import Bench

from mmserve.config import SchedulerConfig
from mmserve.core.request import Policy, Request
from mmserve.decode.sampler import step_generator
from mmserve.decode.schedulers import Discrete, load_schedulers
from mmserve.errors import ConfigError, InvalidArgument

# diffusers 0.42 calls transformers 5.24 by the older name
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

Make = Callable[..., Bench]
SEED, STEPS = 5, 6
EVERYTHING = {"entropy_bound": 1e9}
COLD = {**EVERYTHING, "t_max": 0.002, "t_min": 0.001}


def scheduled(kind: str, **numbers: float) -> dict[str, Discrete]:
    return load_schedulers([SchedulerConfig(name="it", kind=kind, numbers={"num_inference_steps": STEPS, **numbers})])


def by_scheduler(name: str, text: str, **given: Any) -> Request:
    return gemma(name, text, commit=Policy(name="scheduler", options={"name": "it"}), **given)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of models that babble, and that soon repeat themselves."""
    made = tmp_path_factory.mktemp("gemma")
    return {"babbling": save_gemma(made / "babbling", 12), "calm": save_gemma(made / "calm", 1)}


class Ids:
    """A processor for whose prompt the tokens are known."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = torch.tensor([ids])

    def apply_chat_template(self, *_args: object, **_kwargs: object) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids}


def _by_older_name(masks: Callable[..., Any]) -> Callable[..., Any]:
    """transformers 5.24 renamed a parameter that diffusers 0.42 passes by name."""
    return lambda **given: masks(cache=given.pop("past_key_values"), **given)


class Pipeline:
    """diffusers' pipeline where each step's random numbers, and those of each canvas, are the server's."""

    def __init__(self, folder: Path, kind: str, numbers: dict[str, float], prompt: list[int]) -> None:
        base, this = getattr(diffusers, kind), self
        self.passes, self.outputs, self._place = 0, list[Any](), len(prompt)
        self._shared = torch.Generator()

        class Reseeded(base):  # type: ignore[misc, valid-type]
            @functools.wraps(base.step)
            def step(self, *args: Any, **kwargs: Any) -> Any:
                this.passes += 1
                if kwargs["timestep"] == 0:
                    this._place += LENGTH
                kwargs["generator"] = step_generator(SEED, this.passes, torch.device("cpu"))
                this.outputs.append(super().step(*args, **kwargs))
                this._canvas()
                return this.outputs[-1]

        model = transformers_own(folder)
        decoder = model.model.decoder
        if "cache" in inspect.signature(decoder.create_diffusion_decoder_attention_mask).parameters:
            decoder.create_diffusion_decoder_attention_mask = _by_older_name(
                decoder.create_diffusion_decoder_attention_mask
            )
        self._run = diffusers.DiffusionGemmaPipeline(model, Reseeded(num_inference_steps=STEPS, **numbers), Ids(prompt))
        self._run.set_progress_bar_config(disable=True)
        self._canvas()

    def _canvas(self) -> None:
        self._shared.set_state(step_generator(SEED, -self._place, torch.device("cpu")).get_state())

    def __call__(self, new: int, steps: int, temperature: float) -> list[int]:
        out = self._run(
            prompt="",
            gen_length=new,
            num_inference_steps=steps,
            temperature=temperature,
            eos_early_stop=False,
            generator=self._shared,
            output_type="seq",
        )
        tokens: list[int] = out.sequences[0].tolist()
        return tokens


@pytest.mark.parametrize(
    ("folder", "kind", "numbers", "temperature", "steps"),
    [
        ("babbling", "DiscreteDDIMScheduler", {}, 0.0, STEPS),
        ("babbling", "DiscreteDDIMScheduler", {}, 0.8, STEPS),
        ("calm", "DiscreteDDIMScheduler", {}, 0.0, 30),
        ("babbling", "EntropyBoundScheduler", EVERYTHING, 0.0, STEPS),
        ("calm", "EntropyBoundScheduler", COLD, 0.0, 30),
    ],
)
def test_tokens_are_those_of_diffusers_own_pipeline(
    bench: Make,
    folders: dict[str, Path],
    kind: str,
    folder: str,
    numbers: dict[str, float],
    temperature: float,
    steps: int,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)  # imports a compiler for nothing
    b = watched(
        bench(
            load_gemma(folders[folder], same_bits=True),
            stages="inline",
            watch=False,
            schedulers=scheduled(kind, **numbers),
        )
    )
    kinds: set[int] = set()
    for text in ("a red circle", "what is left of it? " * 2)[: 1 if steps > STEPS else 2]:
        pipeline = Pipeline(folders[folder], kind, numbers, prompt_of(b, text))
        expected = pipeline(3 * LENGTH, steps, temperature)
        call = b.submit(
            by_scheduler(
                text,
                text,
                max_new_tokens=3 * LENGTH,
                seed=SEED,
                steps=3 * steps if steps != STEPS else 0,
                temperature=temperature,
                stop=(),
            )
        )[0]
        assert row_of(b, call)[: len(expected)] == expected
        assert call.finished().forwards == pipeline.passes
        kinds |= set(expected)
    assert len(kinds) > 10 or folder == "calm"
    assert (pipeline.passes < 3 * steps) == (kind == "EntropyBoundScheduler" and folder == "calm")


def test_no_noise_is_left_where_the_last_step_is_unsure(
    bench: Make, folders: dict[str, Path], monkeypatch: Any
) -> None:
    """What the pipeline's last step accepts is final, and elsewhere not its noise but the most probable token."""
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    kind, numbers = "EntropyBoundScheduler", {"entropy_bound": 8.0}
    b = watched(
        bench(
            load_gemma(folders["babbling"], same_bits=True),
            stages="inline",
            watch=False,
            schedulers=scheduled(kind, **numbers),
        )
    )
    pipeline = Pipeline(folders["babbling"], kind, numbers, prompt_of(b, "a"))
    theirs = torch.tensor(pipeline(LENGTH, STEPS, 0.0))
    last = pipeline.outputs[-1]
    accepted = last.accepted_index[0]
    assert 0 < int(accepted.sum()) < LENGTH
    call = b.submit(by_scheduler("a", "a", max_new_tokens=LENGTH, seed=SEED))[0]
    mine = torch.tensor(row_of(b, call))
    assert torch.equal(mine[accepted], theirs[accepted])
    assert torch.equal(mine[~accepted], last.pred_logits[0].argmax(-1)[~accepted])


def test_the_scheduler_of_the_models_own_rule_goes_its_way(bench: Make, folders: dict[str, Path]) -> None:
    """But for the last step: what that has drawn is final with the scheduler, and not with the model's own rule."""
    made = scheduled("EntropyBoundScheduler", entropy_bound=0.1)
    b = watched(bench(load_gemma(folders["babbling"]), stages="inline", watch=False, schedulers=made))
    shots = []
    for name, make in (("own", gemma), ("named", by_scheduler)):
        call = b.submit(make(name, "a", max_new_tokens=LENGTH, seed=1, snapshots=True))[0]
        call.finished()
        shots.append([s.text for s in call.snapshots])
    assert shots[0][:-1] == shots[1][:-1] and len(set(shots[0])) > 2


def test_an_answer_is_the_same_among_strangers(bench: Make, folders: dict[str, Path]) -> None:
    made = scheduled("DiscreteDDIMScheduler")
    requests = [
        by_scheduler(f"r{i}", "red circle " * (i % 3), max_new_tokens=(3, 8, 17)[i % 3], seed=i, temperature=i % 2)
        if i % 4
        else gemma(f"r{i}", "red", seed=i)
        for i in range(8)
    ]
    alone: Bench = bench(load_gemma(folders["babbling"]), stages="inline", watch=False, schedulers=made)
    expected = {r.id: (f.text, f.forwards) for r in requests for f in [alone.ask(r)]}
    together: Bench = bench(load_gemma(folders["babbling"]), watch=False, schedulers=made)
    calls = together.submit(*reversed(requests))
    assert {c.request.id: (c.finished().text, c.finished().forwards) for c in calls} == expected
    together.await_nothing_left()


def test_what_does_not_fit_is_refused(bench: Make, folders: dict[str, Path]) -> None:
    masks = load_schedulers([SchedulerConfig(name="masks", kind="BlockRefinementScheduler")])
    b: Bench = bench(load_gemma(folders["calm"]), watch=False, schedulers=scheduled("DiscreteDDIMScheduler") | masks)
    assert b.engine.info.commit_policies == ("entropy_bound", "scheduler")
    with pytest.raises(InvalidArgument, match=r"there is no scheduler 'masks' for this model; it has \['it'\]"):
        b.submit(gemma("x", "a", commit=Policy(name="scheduler", options={"name": "masks"})))
    with pytest.raises(InvalidArgument, match=r"sampling\.top_k: the scheduler 'it' does not take it"):
        b.submit(by_scheduler("x", "a", top_k=3))
    with pytest.raises(ConfigError, match="leave corrector_steps at 0"):
        scheduled("DiscreteDDIMScheduler", corrector_steps=1)
