"""llama.cpp's generation loop, spelled out for ``mmserve bench peers``, over passes of the bundled model here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from mmserve.bench.generation import TASK, _request, generated
from mmserve.bench.in_process import ask_all
from mmserve.config import EngineConfig, MediaConfig, ModelConfig, resolve
from mmserve.core.request import Diffusion
from mmserve.engine.engine import Engine
from mmserve.export.gguf import write_gguf
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import dense_attention
from mmserve.models.registry import load_model
from mmserve.reference.evaluate import item


def loaded() -> LoadedModel:
    model = load_model(ModelConfig(path="bundled", device="cpu"))
    assert isinstance(model, LoadedModel)
    return model


class Passes:
    """What ``LlamaCpp`` has of the loop, by the decoder here."""

    def __init__(self, model: LoadedModel) -> None:
        self._decoder = model.decoder

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> np.ndarray:
        row = torch.tensor([ids])
        states = self._decoder(self._decoder.embed(row), torch.arange(len(ids))[None], dense_attention())
        found: np.ndarray = self._decoder.logits(states)[0].float().numpy().copy()
        return found


def test_the_loop_is_plain_decoding_in_blocks() -> None:
    model = loaded()
    passes: Any = Passes(model)
    engine = Engine(model, resolve(EngineConfig(torch_threads=1)), MediaConfig())
    engine.start()
    try:
        for index in range(1):
            asked = _request(engine, index, item(TASK, index, 0)[1].text)
            plain = Diffusion(recompute=engine.info.tuning.plain.recompute, commit=engine.info.tuning.plain.commit)
            [encoded] = engine.stages.encoder.encode([asked])
            [answer] = ask_all(engine, [replace(asked, diffusion=plain)])
            assert generated(passes, model, encoded.ids.tolist()) == answer.whole().text
    finally:
        engine.stop()


def test_the_decoder_of_a_vision_model_is_written_alone(tmp_path: Path) -> None:
    write_gguf(loaded(), tmp_path / "bundled.gguf")
    reader = gguf.GGUFReader(tmp_path / "bundled.gguf")
    names = {tensor.name for tensor in reader.tensors}
    assert "blk.0.attn_q.weight" in names and not any("vision" in name or "mm" in name for name in names)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None and architecture.contents() == "llada"
