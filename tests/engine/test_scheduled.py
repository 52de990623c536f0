"""Discrete schedulers of diffusers as commit policies: their own pipeline's tokens, and the loop's own promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from harness import Bench
from helpers import ask, tiny_model
from llada2_checkpoints import glm
from llada2_checkpoints import save as save_llada2
from llama_checkpoints import load
from qwen_checkpoints import MASK_ID
from test_constrained import SCHEMAS, check, constrained, needed
from test_masked_families import BLOCK, TEXTS, Judge, Make, answer, endless, prompt_of
from test_samples import Samples, several, told

from mmserve.config import SchedulerConfig
from mmserve.core.canvas import Canvas
from mmserve.core.request import Policy, Request
from mmserve.core.samples import samples
from mmserve.decode.pace import steps_of_whole_block
from mmserve.decode.sampler import step_generator
from mmserve.decode.schedulers import Discrete, load_schedulers
from mmserve.errors import ConfigError, InvalidArgument, Unimplemented


def scheduler(name: str) -> Policy:
    return Policy(name="scheduler", options={"name": name})


def schedulers(**numbers: dict[str, Any]) -> dict[str, Discrete]:
    """``BlockRefinementScheduler`` under each name, with its numbers."""
    return load_schedulers(
        SchedulerConfig(name=name, kind="BlockRefinementScheduler", numbers=given) for name, given in numbers.items()
    )


@pytest.fixture(scope="module")
@torch.no_grad()
def glm_oracle() -> Any:
    made = glm()
    made.get_input_embeddings().weight[MASK_ID] *= 0.2
    return made


class Reseeded(diffusers.BlockRefinementScheduler):
    """Draws each step from the numbers that the server draws it from.

    A pass over a full block where nothing may be edited is not counted: the pipeline makes it, and the server does not.
    """

    taken = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        editing = kwargs["editing_threshold"] is not None
        type(self).taken += editing or bool((kwargs["sample"] == kwargs["mask_token_id"]).any())
        kwargs["generator"] = step_generator(7, self.taken, torch.device("cpu"))
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "numbers",
    [{"threshold": 1.0}, {"threshold": 0.15}, {"threshold": 0.15, "editing_threshold": 0.1}],
    ids=["one a step", "threshold", "edits"],
)
def test_it_gives_the_tokens_of_diffusers_own_pipeline(
    bench: Make, tmp_path: Path, glm_oracle: Any, numbers: dict[str, float], temperature: float
) -> None:
    # As many steps as positions would leave the pipeline none to edit in.
    given = {"num_inference_steps": 16, "block_length": 8, **numbers}
    pipeline = diffusers.LLaDA2Pipeline(Judge(glm_oracle, 8), Reseeded(**given))
    pipeline.set_progress_bar_config(disable=True)
    model = endless(load(save_llada2(glm_oracle, tmp_path, block_size=8)))
    b = bench(model, stages="inline", watch=False, schedulers=schedulers(refine=given))
    edits = 0
    for text in TEXTS:
        while len(prompt_of(b, text)) % 8:  # the pipeline's sample would hold some of the prompt, the server's does not
            text += "?"
        Reseeded.taken = 0
        expected = pipeline(
            input_ids=torch.tensor([prompt_of(b, text)]),
            gen_length=24,
            num_inference_steps=16,
            temperature=temperature,
            threshold=numbers["threshold"],
            editing_threshold=numbers.get("editing_threshold"),
            max_post_steps=15,
            eos_early_stop=False,
            mask_token_id=MASK_ID,
            output_type="seq",
        ).sequences[0]
        request = ask(
            text,
            text,
            max_new_tokens=24,
            recompute=BLOCK,
            commit=scheduler("refine"),
            temperature=temperature,
            seed=7,
        )
        seen: list[Any] = []
        commit = b.engine.stages.decoder.commit
        b.engine.stages.decoder.commit = lambda d, commit=commit, seen=seen: seen.append(d) or commit(d)
        call = b.submit(request)[0]
        done = call.finished()
        tokens = seen[-1].canvas.tokens[seen[-1].canvas.prompt_length :]
        assert tokens.tolist() == expected.tolist()
        assert done.forwards == Reseeded.taken
        edits += done.edits
    assert bool(edits) == ("editing_threshold" in numbers)


def test_a_first_block_that_the_prompt_begins_is_filled_as_fast_as_any(
    bench: Make, tmp_path: Path, glm_oracle: Any
) -> None:
    """The pipeline sizes all blocks alike. Its sample holds the prompt's part of the first, which greedy steps skip."""
    given = {"num_inference_steps": 4, "block_length": 8, "threshold": 1.0}
    pipeline = diffusers.LLaDA2Pipeline(Judge(glm_oracle, 8), diffusers.BlockRefinementScheduler(**given))
    pipeline.set_progress_bar_config(disable=True)
    b = bench(endless(load(save_llada2(glm_oracle, tmp_path, block_size=8))), schedulers=schedulers(refine=given))
    for left in (3, 5, 6):  # open positions of the first block
        text = TEXTS[0]
        while len(prompt_of(b, text)) % 8 != 8 - left:
            text += "?"
        new = 16 + left
        expected = pipeline(
            input_ids=torch.tensor([prompt_of(b, text)]),
            gen_length=new,
            num_inference_steps=4,
            threshold=1.0,
            editing_threshold=None,
            sampling_method="greedy",
            eos_early_stop=False,
            mask_token_id=MASK_ID,
            output_type="seq",
        ).sequences[0]
        request = ask(text, text, max_new_tokens=new, recompute=BLOCK, commit=scheduler("refine"))
        [call] = b.submit(request)
        assert answer(b, call) == expected.tolist()
        assert call.finished().forwards == -(-left // 2) + 8


def test_a_requests_steps_are_shared_as_if_each_block_were_whole() -> None:
    canvas = Canvas.create(np.zeros(5), new_tokens=19, block_length=8, mask_id=MASK_ID, aligned=True)
    for start in (5, 8, 16):
        canvas.block_start = start
        assert [steps_of_whole_block(canvas, total) for total in (19, 38, 1)] == [8, 8, 1]


def test_a_greedy_scheduler_that_is_never_sure_enough_is_low_confidence(bench: Make) -> None:
    b: Bench = bench(tiny_model(vision=False), schedulers=schedulers(refine={"threshold": 2.0}))
    for steps in (4, 16):
        plain = b.submit(ask(f"p{steps}", max_new_tokens=16, block=8, steps=steps))[0]
        same = b.submit(ask(f"s{steps}", max_new_tokens=16, block=8, steps=steps, commit=scheduler("refine")))[0]
        assert (same.finished().text, same.finished().forwards) == (plain.finished().text, plain.finished().forwards)
        assert answer(b, same) == answer(b, plain)


@pytest.mark.parametrize("recompute", ["none", "prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache", "adaptive"])
def test_each_step_commits_and_nothing_committed_changes(bench: Make, recompute: str) -> None:
    """The bench checks both after each step; six steps are fewer than the schedule's 32 and more than none."""
    b: Bench = bench(tiny_model(vision=False), schedulers=schedulers(refine={"threshold": 0.9}))
    request = ask("r", max_new_tokens=20, block=8, commit=scheduler("refine"), recompute=Policy(name=recompute))
    done = b.ask(request)
    assert done.edits == 0 and done.forwards <= 20


def requests() -> list[Request]:
    return [
        ask(
            f"r{i}",
            f"what is left of {i}?",
            max_new_tokens=(9, 16, 21)[i % 3],
            block=(4, 8)[i % 2],
            commit=scheduler(("sure", "edits", "steps")[i % 3]) if i % 4 else None,
            recompute=Policy(name=("none", "dual", "dkv_decode")[i % 3]),
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
        )
        for i in range(12)
    ]


def test_an_answer_is_the_same_among_strangers(bench: Make) -> None:
    made = schedulers(
        sure={"threshold": 0.2}, edits={"threshold": 0.2, "editing_threshold": 0.2}, steps={"num_inference_steps": 3}
    )
    alone: Bench = bench(tiny_model(vision=False), stages="inline", watch=False, schedulers=made)
    expected = {r.id: (f.text, f.forwards, f.edits) for r in requests() for f in [alone.ask(r)]}
    assert sum(edits for _text, _forwards, edits in expected.values()) > 0
    together: Bench = bench(tiny_model(vision=False), watch=False, schedulers=made)
    calls = together.submit(*reversed(requests()))
    assert {c.request.id: (c.finished().text, c.finished().forwards, c.finished().edits) for c in calls} == expected


def test_replaced_tokens_are_announced_and_text_is_never_taken_back(bench: Make) -> None:
    made = schedulers(edits={"threshold": 0.05, "editing_threshold": 0.05})
    b: Bench = bench(tiny_model(vision=False), watch=False, schedulers=made)
    call = b.submit(ask("e", max_new_tokens=16, block=8, commit=scheduler("edits"), snapshots=True))[0]
    done = call.finished()
    assert done.edits == sum(s.edited for s in call.snapshots) > 0
    assert "".join(call.deltas) == done.text


def test_what_does_not_fit_is_refused(bench: Make) -> None:
    made = {
        **schedulers(refine={}),
        **load_schedulers([SchedulerConfig(name="random", kind="EntropyBoundScheduler")]),
    }
    b: Bench = bench(tiny_model(vision=False), schedulers=made)
    assert "scheduler" in b.engine.info.commit_policies
    with pytest.raises(InvalidArgument, match=r"there is no scheduler 'random' for this model; it has \['refine'\]"):
        b.submit(ask("x", commit=scheduler("random")))  # it puts random tokens where this model expects masks
    with pytest.raises(InvalidArgument, match=r"sampling.min_p: the scheduler 'refine' does not take it"):
        b.submit(ask("x", commit=scheduler("refine"), min_p=0.1))
    with pytest.raises(InvalidArgument, match=r"repetition_penalty"):
        b.submit(ask("x", commit=scheduler("refine"), repetition_penalty=1.1))
    plain: Bench = bench(tiny_model(vision=False))
    assert "scheduler" not in plain.engine.info.commit_policies
    with pytest.raises(Unimplemented, match=r"needs a scheduler: name one under \[schedulers.NAME\].*it has low_conf"):
        plain.submit(ask("x", commit=scheduler("refine")))
    with pytest.raises(InvalidArgument, match="there is no policy 'scheduler'"):  # its own candidates would be lost
        b.submit(ask("x", commit=Policy(name="early_commit", base=scheduler("refine"))))


def test_a_constrained_answer_obeys_and_is_the_same_among_strangers(bench: Make) -> None:
    """Over a model that babbles, from the least budget on; what the scheduler would commit the witness fills."""
    made = schedulers(
        one={"threshold": 2.0}, sure={"threshold": 0.2}, edits={"threshold": 0.2, "editing_threshold": 0.1}
    )
    b: Bench = bench(tiny_model(vision=False), schedulers=made, watch=False)
    least = [needed(b, schema) for schema in SCHEMAS]
    requests = [
        constrained(
            ask(
                f"{name} {n} {seed}",
                max_new_tokens=least[n] + (0, 1, 9)[(n + seed) % 3],
                block=(4, 8)[n % 2],
                commit=scheduler(name),
                recompute=Policy(name=("none", "dual", "dkv_decode")[seed]),
                temperature=(0.0, 0.8, 2.0)[seed],
                seed=seed,
            ),
            schema,
        )
        for name in made
        for n, schema in enumerate(SCHEMAS)
        for seed in range(3)
    ]
    calls = b.submit(*requests)
    for call, schema in zip(calls, [s for _ in made for s in SCHEMAS for _ in range(3)], strict=True):
        check(call, schema)
        assert call.finished().edits == 0 or call.request.diffusion.commit == scheduler("edits")
    for call in calls[::7]:
        again = b.ask(replace(call.request, id="alone"))
        assert (again.text, again.forwards, again.edits) == (
            call.finished().text,
            call.finished().forwards,
            call.finished().edits,
        )
    one = [call.finished() for call in calls if call.request.diffusion.commit == scheduler("one")]
    assert all(done.forwards <= done.usage.completion_tokens + 1 for done in one)
    assert max(done.tokens_per_forward for call in calls for done in [call.finished()]) > 2


def test_a_sample_is_the_answer_to_a_request_with_its_seed(bench: Make) -> None:
    made = schedulers(refine={"threshold": 0.05})
    b: Bench = bench(tiny_model(vision=False), watch=False, schedulers=made)
    request = several(ask("n", max_new_tokens=12, block=6, temperature=1.0, seed=4, commit=scheduler("refine")), 3)
    alone = [b.ask(replace(one, id=f"a{i}")) for i, one in enumerate(samples(request))]
    assert [told(e) for e in Samples(b, request).finished()] == [told(e) for e in alone]
    assert len({e.text for e in alone}) == 3


def test_pages_of_the_prompt_are_shared_beneath_it(bench: Make, tmp_path: Path, glm_oracle: Any) -> None:
    model = endless(load(save_llada2(glm_oracle, tmp_path, block_size=8)))
    made = schedulers(edits={"threshold": 0.15, "editing_threshold": 0.1, "block_length": 8})
    b: Bench = bench(model, watch=False, prefix_cache=True, schedulers=made)
    first, second = (
        b.ask(ask(name, TEXTS[0] * 6, max_new_tokens=16, recompute=BLOCK, commit=scheduler("edits"))) for name in "ab"
    )
    assert second.usage.cached_tokens > first.usage.cached_tokens == 0
    assert told(second) == told(first)


@pytest.mark.parametrize(
    ("kind", "numbers", "says"),
    [
        ("NoSuchScheduler", {}, r"\[schedulers.x\]: diffusers has no class 'NoSuchScheduler'"),
        ("DDIMScheduler", {}, r"\[schedulers.x\]: DDIMScheduler"),
        ("LLaDA2Pipeline", {}, r"\[schedulers.x\]: LLaDA2Pipeline is no scheduler"),
        ("BlockRefinementScheduler", {"treshold": 1}, r"has no key 'treshold'; .*'threshold'"),
        ("BlockRefinementScheduler", {"threshold": "high"}, r"\[schedulers.x\]: BlockRefinementScheduler fails"),
        ("no.such.module.Scheduler", {}, r"\[schedulers.x\] needs the package no"),
    ],
)
def test_a_wrong_configuration_is_refused_with_what_is_wrong(kind: str, numbers: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_schedulers([SchedulerConfig(name="x", kind=kind, numbers=numbers)])


def test_which_scheduler_is_for_which_model() -> None:
    kinds = ("BlockRefinementScheduler", "EntropyBoundScheduler", "DiscreteDDIMScheduler")
    found = load_schedulers(SchedulerConfig(name=kind, kind=kind) for kind in kinds)
    assert [s.fits(renoises=False) for s in found.values()] == [True, False, False]
    # Without masks the first one keeps to itself which positions it has committed.
    assert [s.fits(renoises=True) for s in found.values()] == [False, True, True]


def test_without_diffusers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"pip install 'mmserve\[schedulers\]'"):
        schedulers(refine={})
