"""Checkpoint files: single and sharded, what is read, and what every defect is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mmserve.errors import ConfigError
from mmserve.models.checkpoint import INDEX, WEIGHTS, Checkpoint, Weights, read_json, write_checkpoint, write_json

CPU = torch.device("cpu")
TENSORS = {f"t{i}": torch.randn(3, i + 1, generator=torch.Generator().manual_seed(i)) for i in range(5)}


def shape(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


@pytest.mark.parametrize("shard_bytes", [None, 1, 60, 10**6])
def test_round_trip(tmp_path: Path, shard_bytes: int | None) -> None:
    write_checkpoint(tmp_path, {"model_type": "llada"}, TENSORS, shard_bytes=shard_bytes)
    assert (tmp_path / INDEX).exists() == (shard_bytes is not None)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.architecture == "llada"
    assert set(checkpoint.weights.names) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.weights.tensor(name, tensor.shape, torch.float32, CPU), tensor)
    checkpoint.weights.check_all_read()
    if shard_bytes is not None:
        index = read_json(tmp_path / INDEX)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
        assert len(set(index["weight_map"].values())) == {1: 5, 60: 4, 10**6: 1}[shard_bytes]


def test_writing_again_leaves_nothing_of_before(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shard_bytes=1)
    write_checkpoint(tmp_path, {}, {"a": torch.ones(1)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", WEIGHTS]
    assert (tmp_path / WEIGHTS).stat().st_mode & 0o444 == 0o444


def test_tensors_are_copies_in_the_wanted_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"a": torch.tensor([1.0, 2.5])})
    weights = Weights(tmp_path)
    tensor = weights.tensor("a", shape(2), torch.float32, CPU)
    tensor.zero_()
    half = weights.tensor("a", shape(2), torch.bfloat16, CPU)
    assert (half.dtype, half.tolist()) == (torch.bfloat16, [1.0, 2.5])
    assert load_file(tmp_path / WEIGHTS)["a"].tolist() == [1.0, 2.5]


def test_fill_ties_and_freezes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"w": torch.ones(2, 2), "other": torch.zeros(2, 2)})
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[2].weight = module[0].weight
    Weights(tmp_path).fill(module, {"0.weight": "w", "1.weight": "other", "2.weight": "absent"}, torch.float32, CPU)
    assert module[2].weight is module[0].weight
    assert (module[0].weight == 1).all() and (module[1].weight == 0).all()
    assert not any(p.requires_grad for p in module.parameters())


def test_left_over_tensors_are_refused(tmp_path: Path) -> None:
    left = {f"layers.{i:02d}.extra": torch.ones(1) for i in range(12)}
    write_checkpoint(tmp_path, {}, {"a": torch.ones(1), "rotary.inv_freq": torch.ones(1), **left})
    weights = Weights(tmp_path)
    weights.tensor("a", shape(1), torch.float32, CPU)
    message = r"12 tensors are not used: layers\.00\.extra, .* and 2 more\. .*unused_tensors under \[\[models\]\]"
    with pytest.raises(ConfigError, match=message):
        weights.check_all_read()
    weights.ignore("layers.0?.*")
    with pytest.raises(ConfigError, match=r"2 tensors are not used: layers\.10\.extra, layers\.11\.extra\. The"):
        weights.check_all_read()
    weights.ignore("*.extra")
    weights.check_all_read()


def test_dtype_of_a_checkpoint(tmp_path: Path) -> None:
    mixed = {"a": torch.ones(1, dtype=torch.float16), "b": torch.ones(1, dtype=torch.float16), "c": torch.ones(1)}
    write_checkpoint(tmp_path, {"model_type": "llada"}, mixed)
    assert Checkpoint.open(tmp_path).dtype() == torch.float16
    write_checkpoint(tmp_path, {"model_type": "llada", "torch_dtype": "bfloat16"}, mixed)
    assert Checkpoint.open(tmp_path).dtype() == torch.bfloat16
    write_checkpoint(tmp_path, {"model_type": "llada", "dtype": "float32"}, mixed)
    assert Checkpoint.open(tmp_path).dtype() == torch.float32


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model directory .*nowhere"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_bytes(b'"\xff"')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, not list"):
        Checkpoint.open(tmp_path)
    write_json(tmp_path / "config.json", {})
    with pytest.raises(ConfigError, match=r"has no safetensors: neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        Checkpoint.open(tmp_path)
    write_checkpoint(tmp_path, {}, TENSORS)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[:-4])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        Checkpoint.open(tmp_path)
    write_checkpoint(tmp_path, {}, TENSORS)
    with pytest.raises(ConfigError, match="no model_type"):
        _ = Checkpoint.open(tmp_path).architecture
    write_checkpoint(tmp_path, {"quantization_config": {"bits": 4}}, TENSORS)
    with pytest.raises(ConfigError, match="quantization_config has quant_method None, which is not read"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**30}, f"num_hidden_layers = {10**30}, but the model's files have only 5 tensors"),
        ({"vision_config": {"depth": 6}}, "depth = 6, but the model's files have only 5 tensors"),
        ({"text_config": {"num_experts": 10**30}}, f"num_experts = {10**30} is not supported; it can be up to 4096"),
    ],
)
def test_counts_of_which_nothing_is_created(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path, config, TENSORS)
    with pytest.raises(ConfigError, match=message):
        Checkpoint.open(tmp_path)
    write_checkpoint(tmp_path, {"num_hidden_layers": 5, "num_experts": None}, TENSORS)
    assert Checkpoint.open(tmp_path).config


def test_broken_shards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shard_bytes=1)
    (tmp_path / "model-00002-of-00005.safetensors").unlink()
    weights = Weights(tmp_path)
    weights.tensor("t0", shape(3, 1), torch.float32, CPU)
    with pytest.raises(
        ConfigError, match=r"index\.json names model-00002-of-00005\.safetensors, which .* does not have"
    ):
        weights.tensor("t1", shape(3, 2), torch.float32, CPU)
    save_file({"z": torch.ones(1)}, tmp_path / "model-00002-of-00005.safetensors")
    with pytest.raises(ConfigError, match="has no readable tensor t1"):
        Weights(tmp_path).tensor("t1", shape(3, 2), torch.float32, CPU)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": ["t0"]}))
    with pytest.raises(ConfigError, match="has no weight_map"):
        Weights(tmp_path)


def test_wrong_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"a": torch.ones(2, 3), "q": torch.ones(2, dtype=torch.int8)})
    weights = Weights(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.safetensors has no tensor b"):
        weights.tensor("b", shape(1), torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor a has shape \[2, 3\], expected \[3, 2\]"):
        weights.tensor("a", shape(3, 2), torch.float32, CPU)
    with pytest.raises(ConfigError, match="tensor q is int8; only plain floating-point"):
        weights.tensor("q", shape(2), torch.float32, CPU)
