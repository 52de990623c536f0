"""Write a trained model as a checkpoint: ``python -m mmserve.reference.export --run DIR --out DIR``.

The result is an ordinary directory in LLaDA-V's or LLaVA's layout, loaded by the same code as any other; of a run that
trained an adapter it is a directory in peft's layout, for ``adapters/NAME`` of the model that it is added to. Its card
takes accuracy from files in the run's folder, if there are any: ``quality.json``, what ``mmserve bench quality --json``
prints; ``streams.json``, of ``python -m mmserve.reference.stream_accuracy --json``; for an adapter ``decisions.json``,
of ``mmserve bench decisions --tasks accuracy --json``, and ``tools.json``, of ``mmserve bench tools --json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast

from mmserve.errors import ConfigError
from mmserve.models.chat import IMAGE, VIDEO
from mmserve.models.checkpoint import GENERATION, write_checkpoint, write_json
from mmserve.models.layouts import HUGGING_FACE, LLAVA_LLAMA, Layout, config_json, decoder_tensors, vision_tensors
from mmserve.models.processors import IMAGES
from mmserve.models.towers import BESIDE
from mmserve.reference.data import PIXEL_MEAN, PIXEL_STD
from mmserve.reference.low_rank import add_low_rank, write_adapter
from mmserve.reference.model import FRAME_TIME, FRAMES, PIXELS, POOL, SELECT_LAYER, ReferenceModel
from mmserve.reference.tokenizer import BOS, EOS, EOT, HEADER, HEADER_END, MASK, save_tokenizer, train_tokenizer
from mmserve.reference.train import VOCAB_MULTIPLE

#: Reports in a run's folder that go into the card.
QUALITY, STREAMS, DECISIONS, TOOLS = "quality.json", "streams.json", "decisions.json", "tools.json"
#: ``max_canvas`` of the diffusion model: of 80 sums and counts 65 are right with 128 tokens, 63 with 256, 53 with 512.
MAX_CANVAS = 256

#: First line of an adapter's card.
_ADAPTER_TITLE = "# Adapter of the mmserve bundled model"


def export(run: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16, block_length: int = 0) -> None:
    """Write the averaged weights of ``run/state.pt``, or the adapter that they have, into ``out`` as ``dtype``.

    ``block_length``: default of requests with the adapter; 0 = the model's. Raises ``ConfigError`` without a state.
    """
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
    causal = state["recipe"]["objective"] == "causal"
    layout = LLAVA_LLAMA if causal else HUGGING_FACE
    model = ReferenceModel(rows, causal=causal)
    quality, streams, decisions, tools = (
        json.loads(path.read_text()) if path.is_file() else None
        for path in (run / QUALITY, run / STREAMS, run / DECISIONS, run / TOOLS)
    )
    if rank := state["recipe"].get("rank", 0):
        add_low_rank(model, rank, output=state["recipe"].get("output", False))
        model.load_state_dict(state["average"])
        write_adapter(model, out, dtype=dtype)
        card = _adapter_card(state, streams, decisions, tools, block_length)
        (out / "README.md").write_text(card, encoding="utf-8")
        if block_length:
            write_json(out / GENERATION, {"block_length": block_length})
        return
    model.load_state_dict(state["average"])
    tensors = decoder_tensors(layout, model.decoder) | vision_tensors(model.tower, model.projector, None)
    write_checkpoint(
        out, _config(layout, model, tokenizer, dtype), {name: t.detach().to(dtype) for name, t in tensors.items()}
    )
    write_json(out / GENERATION, _generation(tokenizer, causal=model.causal))
    save_tokenizer(tokenizer, out)
    write_json(out / BESIDE / "config.json", {**model.tower.config.to_diff_dict(), "model_type": "clip_vision_model"})
    write_json(out / BESIDE / IMAGES, processor_settings())
    (out / "MODEL_CARD.md").write_text(_card(model, state, quality, streams), encoding="utf-8")


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


def _config(
    layout: Layout, model: ReferenceModel, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> dict[str, Any]:
    mask, bos, eos = tokenizer.convert_tokens_to_ids([MASK, BOS, EOS])
    return {
        **config_json(layout, model.decoder.config),
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
        "mm_video_frames": FRAMES,
        "mm_video_time": FRAME_TIME,
        "mm_spatial_pool_stride": POOL,
        "mm_spatial_pool_mode": "average",
    }


def _generation(tokenizer: PreTrainedTokenizerFast, *, causal: bool) -> dict[str, Any]:
    """The model was trained to fill the canvas after an answer with the end of text, so that is not suppressed."""
    bos, eos, eot = tokenizer.convert_tokens_to_ids([BOS, EOS, EOT])
    suppressed = tokenizer.convert_tokens_to_ids([BOS, HEADER, HEADER_END, MASK, IMAGE, VIDEO])
    return {
        "bos_token_id": bos,
        "eos_token_id": [eos, eot],
        "pad_token_id": eos,
        "suppress_tokens": sorted(suppressed),
        **({} if causal else {"max_canvas": MAX_CANVAS}),
    }


def _card(
    model: ReferenceModel,
    state: Mapping[str, Any],
    quality: Mapping[str, Any] | None,
    streams: Sequence[Mapping[str, Any]] | None,
) -> str:
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    kind = "An autoregressive" if model.causal else "A masked-diffusion"
    layout, attention = ("LLaVA", "causal") if model.causal else ("LLaDA-V", "full")
    windows = ", windows of a video stream at one frame a second" if streams else ""
    return f"""# mmserve bundled model

{kind} vision-language model of {parameters:.1f} M parameters that answers questions about drawn pictures and clips, in
words or as JSON, and does small sums. It exists to try and measure mmserve with; it knows nothing else.

- Architecture: {layout}'s (a LLaMA-style decoder with {attention} attention, a CLIP-style tower, an MLP projector).
- Input: pictures scaled to {PIXELS} x {PIXELS} pixels, {FRAMES} frames of a clip{windows}, questions in English.
- Data: generated by `mmserve.reference.tasks`; no outside data.
- Made by `python -m mmserve.reference.train` and `python -m mmserve.reference.export`; weights are the average over the
  last steps.
- License: Apache-2.0.
{_accuracy(quality)}{_streams(streams)}{_legs(state)}"""


def _adapter_card(
    state: Mapping[str, Any],
    streams: Sequence[Mapping[str, Any]] | None,
    decisions: Mapping[str, Any] | None,
    tools: Mapping[str, Any] | None,
    block_length: int,
) -> str:
    layers = "decoder and for the output layer" if state["recipe"].get("output") else "decoder"
    blocks = f"\nRequests with it fill blocks of {block_length} tokens by default.\n" if block_length else ""
    return f"""{_ADAPTER_TITLE}

LoRA of rank {state["recipe"]["rank"]} for all linear layers of the {layers}, trained on the mix
`{state["recipe"]["mix"]}` of generated data while the model's own weights stayed as they are. Made by
`python -m mmserve.reference.train --trained adapter` and `python -m mmserve.reference.export`. License: Apache-2.0.
{blocks}{_streams(streams)}{_decisions(decisions)}{_tools(tools)}{_legs(_of_adapter(state))}"""


def _of_adapter(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The run in ``state`` and those before it that trained the same adapter; None where it trained none. A run that
    began with an exported adapter has its card."""
    if state is None or state.get("card", "").startswith(_ADAPTER_TITLE):
        return state
    if not state.get("recipe", {}).get("rank", 0):
        return None
    return {**state, "before": _of_adapter(state.get("before"))}


def _accuracy(report: Mapping[str, Any] | None) -> str:
    """The table of ``mmserve bench quality``."""
    if report is None:
        return ""
    settings, machine = report["settings"], report["machine"]
    rows = "\n".join(
        f"| {row['task']} | {row['n']} | {row['accuracy']:.1%} | {row['low']:.1%} to {row['high']:.1%} |"
        for row in report["rows"]
    )
    return f"""
## Accuracy

`mmserve bench quality --limit {report["rows"][0]["n"]} --seed {settings["seed"]}`, recompute `{settings["recompute"]}`,
commit `{settings["commit"]}`, on {machine["cpu"]}, torch {machine["torch"]}:

| task | items | right | 95% interval |
|---|---|---|---|
{rows}
"""


def _tools(report: Mapping[str, Any] | None) -> str:
    """The table of ``mmserve bench tools``."""
    if report is None:
        return ""
    rows = "\n".join(
        f"| {row['task']} | {row['n']} | {row['valid']:.1%} | {row['right_tools']:.1%} | {row['right']:.1%} |"
        for row in report["rows"]
    )
    return f"""
## Accuracy of tool calls

`mmserve bench tools --limit {report["rows"][-1]["n"]} --seed {report["settings"]["seed"]}`:

| task | requests | calls with valid arguments | right tools | right tools and arguments |
|---|---|---|---|---|
{rows}
"""


def _decisions(report: Mapping[str, Any] | None) -> str:
    """The table of ``mmserve bench decisions --tasks accuracy``: kinds of typed questions about fresh scenes."""
    if report is None:
        return ""
    rows = "\n".join(
        f"| {row['task']} | {row['n']} | {row['accuracy']:.1%} | {row['calibration_error']:.3f} |"
        for row in report["rows"]
        if row["measured"] == "accuracy"
    )
    return f"""
## Accuracy of typed questions

`mmserve bench decisions --tasks accuracy`, calibrated, about scenes that are drawn or described in words:

| kind | questions | right | expected calibration error |
|---|---|---|---|
{rows}
"""


def _streams(report: Sequence[Mapping[str, Any]] | None) -> str:
    """The table of ``mmserve.reference.stream_accuracy``: tasks by what is kept of a stream."""
    if report is None:
        return ""
    tasks = [task for task in dict.fromkeys(e["result"]["task"] for e in report) if not task.startswith("label ")]
    found: dict[tuple[int, int, int], dict[str, Mapping[str, Any]]] = {}
    for entry in report:
        found.setdefault((entry["whole"], entry["carriers"], entry["frames"]), {})[entry["result"]["task"]] = entry[
            "result"
        ]
    lines = []
    for (whole, carriers, frames), results in found.items():
        cells = [f"{results[t]['accuracy']:.1%}" if t in results else "" for t in tasks]
        lines.append(f"| {whole} | {carriers} | {frames} | {' | '.join(cells)} |")
    rows = "\n".join(lines)
    return f"""
## Accuracy about streams

`python -m mmserve.reference.stream_accuracy`: the share of right answers at random moments, by the whole frames and
carriers that the model sees (at most) and the frames of the stream so far. `newest clip` is the video tasks about the
newest clip, `whole clip` those of them where all of it is in the window, `now` the image tasks about the newest frame,
`lately` and `earlier` questions that begin with "In the last N seconds" and "Earlier".

| whole | carriers | frames | {" | ".join(tasks)} |
|{"---|" * (len(tasks) + 3)}
{rows}
"""


def _legs(state: Mapping[str, Any] | None) -> str:
    """The recipe of the run, and of the runs it began with, the latest first."""
    if state is None:
        return ""
    if "card" in state:  # of an exported model: its legs
        return "".join(f"\n## Training{leg}" for leg in state["card"].split("\n## Training")[1:])
    recipe = "\n".join(f"- {key}: {value}" for key, value in state["recipe"].items())
    began = " It began with the weights of the run below." if state.get("before") else ""
    made_on = state.get("machine") or {}
    where = ", ".join(
        f"{key} {made_on[key]}" for key in ("cpu", "gpu", "python", "torch", "transformers") if key in made_on
    )
    head = f"{state['done']} steps in {state['seconds'] / 60:.0f} minutes{f' ({where})' if where else ''}.{began}"
    return f"\n## Training\n\n{head}\n\n{recipe}\n{_legs(state.get('before'))}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, default=Path("runs/diffusion"), help="folder that holds state.pt")
    parser.add_argument("--out", type=Path, default=Path("mmserve/assets/bundled"), help="folder to write")
    parser.add_argument(
        "--block-length",
        type=int,
        default=0,
        metavar="N",
        help="of an adapter: the block length of requests that set none (0 = the model's)",
    )
    arguments = parser.parse_args()
    export(arguments.run, arguments.out, block_length=arguments.block_length)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
