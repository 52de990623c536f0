"""Write the trained model as a checkpoint: ``python -m mmserve.reference.export --run DIR --out DIR``.

The result is an ordinary directory in LLaDA-V's layout, loaded by the same code as any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast

from mmserve.errors import ConfigError
from mmserve.models.chat import IMAGE
from mmserve.models.checkpoint import write_checkpoint, write_json
from mmserve.models.layouts import HUGGING_FACE, config_json, decoder_tensors, vision_tensors
from mmserve.models.towers import BESIDE, PROCESSOR
from mmserve.reference.data import PIXEL_MEAN, PIXEL_STD
from mmserve.reference.model import PIXELS, SELECT_LAYER, ReferenceModel
from mmserve.reference.tokenizer import BOS, EOS, EOT, HEADER, HEADER_END, MASK, save_tokenizer, train_tokenizer
from mmserve.reference.train import VOCAB_MULTIPLE


def export(run: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the averaged weights of ``run/state.pt`` into ``out`` as ``dtype``; raises ``ConfigError`` without one."""
    path = run / "state.pt"
    if not path.is_file():
        raise ConfigError(f"{run} has no state.pt: train first (python -m mmserve.reference.train)")
    state = torch.load(path, weights_only=True, map_location="cpu")
    tokenizer = train_tokenizer()
    rows = state["average"]["decoder.embed.weight"].shape[0]
    if rows != -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE:
        raise ConfigError(
            f"{path} has {rows} vocabulary rows, which do not fit the tokenizer's {len(tokenizer)} tokens"
        )
    model = ReferenceModel(rows)
    model.load_state_dict(state["average"])
    tensors = decoder_tensors(HUGGING_FACE, model.decoder) | vision_tensors(model.tower, model.projector, None)
    write_checkpoint(out, _config(model, tokenizer, dtype), {name: t.detach().to(dtype) for name, t in tensors.items()})
    write_json(out / "generation_config.json", _generation(tokenizer))
    save_tokenizer(tokenizer, out)
    write_json(out / BESIDE / "config.json", {**model.tower.config.to_diff_dict(), "model_type": "clip_vision_model"})
    write_json(out / BESIDE / PROCESSOR, processor_settings())
    (out / "MODEL_CARD.md").write_text(_card(model, state), encoding="utf-8")


def processor_settings() -> dict[str, Any]:
    """``preprocessor_config.json`` of the bundled tower: what ``mmserve.reference.data.pixels_of`` does in training."""
    settings = {
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": PIXELS, "width": PIXELS},
        "resample": int(Image.Resampling.BICUBIC),
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [PIXEL_MEAN] * 3,
        "image_std": [PIXEL_STD] * 3,
    }
    CLIPImageProcessorPil(**settings)  # fails here, not at the next start, on a setting that transformers refuses
    return {"image_processor_type": "CLIPImageProcessor", **settings}


def _config(model: ReferenceModel, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype) -> dict[str, Any]:
    mask, bos, eos = tokenizer.convert_tokens_to_ids([MASK, BOS, EOS])
    return {
        **config_json(HUGGING_FACE, model.decoder.config),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "mask_token_id": mask,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "mm_vision_tower": BESIDE,
        "mm_hidden_size": model.tower.config.hidden_size,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": SELECT_LAYER,
        "mm_vision_select_feature": "patch",
        "mm_patch_merge_type": "flat",
        "image_aspect_ratio": "square",
    }


def _generation(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The model was trained to fill the canvas behind an answer with the end of text, so that is not suppressed."""
    bos, eos, eot = tokenizer.convert_tokens_to_ids([BOS, EOS, EOT])
    suppressed = tokenizer.convert_tokens_to_ids([BOS, HEADER, HEADER_END, MASK, IMAGE])
    return {
        "bos_token_id": bos,
        "eos_token_id": [eos, eot],
        "pad_token_id": eos,
        "suppress_tokens": sorted(suppressed),
    }


def _card(model: ReferenceModel, state: Mapping[str, Any]) -> str:
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    return f"""# mmserve reference model

A masked-diffusion vision-language model of {parameters:.1f} M parameters that answers questions about small drawn
scenes, in words or as JSON. It exists to try and test mmserve with; it knows nothing but its scenes.

- Architecture: LLaDA-V's (a CLIP-style tower, an MLP projector, a LLaMA-style decoder with full attention).
- Input: one picture, scaled to {PIXELS} x {PIXELS} pixels, and a question in English.
- Data: scenes and questions generated by `mmserve.reference.scenes`; no outside data.
- Training: on a CPU; weights averaged over the last steps. Accuracy: `mmserve bench quality`.
- Made by `python -m mmserve.reference.train` and `python -m mmserve.reference.export`.
- License: Apache-2.0.
{_legs(state)}"""


def _legs(state: Mapping[str, Any] | None) -> str:
    """The recipe of the run, and of the runs it began with, the latest first."""
    if state is None:
        return ""
    recipe = "\n".join(f"- {key}: {value}" for key, value in state["recipe"].items())
    began = " It began with the weights of the run below." if state.get("before") else ""
    head = f"Up to step {state['done']}, {state['seconds'] / 60:.0f} minutes.{began}"
    return f"\n## Recipe\n\n{head}\n\n{recipe}\n{_legs(state.get('before'))}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write the trained model as a checkpoint in LLaDA-V's layout.")
    parser.add_argument("--run", type=Path, default=Path("runs/reference"), help="folder that holds state.pt")
    parser.add_argument("--out", type=Path, default=Path("mmserve/assets/reference"), help="folder to write")
    arguments = parser.parse_args()
    export(arguments.run, arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
