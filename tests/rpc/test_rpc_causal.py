"""A next-token model beside a diffusion model on one server: each is asked for what it can do, over the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_server import threaded
from helpers import picture
from llama_checkpoints import Sighted, load

from mmserve.client import Client, Delta, DkvDecode, DkvGreedy, EarlyCommit, Finished, SeedCanvas, Snapshot
from mmserve.config import EngineConfig, MediaConfig, resolve
from mmserve.engine.engine import Engine
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, model: LoadedModel) -> Iterator[Client]:
    folder: Path = tmp_path_factory.mktemp("llava")
    Sighted(folder)
    settings = resolve(EngineConfig(max_tokens=128, torch_threads=1, page_size=8))
    models = {"causal": load(folder, name="causal"), "tiny": model}
    engines = {name: Engine(loaded, settings, MediaConfig()) for name, loaded in models.items()}
    with threaded(engines) as address, Client(address) as found:  # type: ignore[arg-type]
        yield found


def test_a_next_token_model_answers_with_its_own_defaults(client: Client) -> None:
    info = client.describe("causal")
    assert (info.diffusion, info.block_length, info.recompute_policy) == (False, 1, "last")
    given = {"model": "causal", "images": [picture(1)], "max_new_tokens": 8}
    default = client.generate("what is it?", **given)
    prompt = default.usage.prompt_tokens - default.usage.cached_tokens
    assert default.recomputed_tokens == prompt + default.forwards - 1
    assert client.generate("what is it?", recompute="last", block_length=1, **given).text == default.text
    full = client.generate("what is it?", recompute="none", **given)
    assert full.text == default.text and full.recomputed_tokens > default.recomputed_tokens


def test_its_answer_streams(client: Client) -> None:
    events = list(client.stream("what is it?", model="causal", max_new_tokens=8, snapshots=True))
    done = events[-1]
    assert isinstance(done, Finished)
    assert "".join(e.text for e in events if isinstance(e, Delta)) == done.text
    committed = [e.committed for e in events if isinstance(e, Snapshot)]
    assert committed and committed == sorted(committed)


def test_policies_of_the_other_kind_are_unimplemented(client: Client) -> None:
    with pytest.raises(Unimplemented, match="model 'causal' has no recompute policy 'dkv_decode'; it has last, none"):
        client.generate("x", model="causal", recompute=DkvDecode(4))
    for recompute in ("prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache", DkvGreedy(1)):
        with pytest.raises(Unimplemented, match="model 'causal' has no recompute policy"):
            client.generate("x", model="causal", recompute=recompute)  # type: ignore[arg-type]
    for commit in ("random", "factor", "confident", "entropy_bound", "early_commit", EarlyCommit(answer_length=4)):
        with pytest.raises(Unimplemented, match="model 'causal' has no commit policy"):
            client.generate("x", model="causal", commit=commit)  # type: ignore[arg-type]
    with pytest.raises(Unimplemented, match="model 'tiny' has no commit policy 'ngram'"):
        client.generate("x", model="tiny", commit="ngram")
    with pytest.raises(Unimplemented, match="model 'tiny' has no recompute policy 'last'; it has none, prefix"):
        client.generate("x", model="tiny", recompute="last")


def test_canvases_with_seeds_and_bounds_are_for_diffusion(client: Client) -> None:
    for options, field in (
        ({"max_steps": 2}, "diffusion.max_steps"),
        ({"seed_canvas": SeedCanvas((5,), (0,))}, "diffusion.seed_canvas"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            client.generate("x", model="causal", **options)  # type: ignore[arg-type]
        assert [v.field for v in caught.value.violations] == [field]
        done = client.generate("x", model="tiny", max_new_tokens=4, tokens=True, **options)  # type: ignore[arg-type]
        assert field != "diffusion.seed_canvas" or done.tokens[0].id == 5
    with pytest.raises(InvalidArgument, match=r"template_options\.enable_thinking.*it reads none"):
        client.generate("x", model="tiny", template_options={"enable_thinking": False})
    with pytest.raises(InvalidArgument, match="template_options: must be JSON"):
        client.generate("x", template_options={"x": object()})


def test_blocks_are_for_diffusion(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.generate("x", model="causal", block_length=8, temperature=-1.0)
    assert [v.field for v in caught.value.violations] == ["sampling.temperature", "diffusion.block_length"]
    assert client.generate("x", model="tiny", block_length=8, max_new_tokens=2).forwards
