"""The options of ``mmserve generate`` that describe a request, and the request that they make."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from mmserve.client import Hole, Options, Template, VideoSampling
from mmserve.errors import InvalidArgument
from mmserve.rpc.policies import Quality, policy_class

_T = TypeVar("_T")

#: How numbers of a field's type are read.
_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_POLICY = "NAME[:KEY=VALUE,…]"


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options of a request beside its prompt."""
    _add_media(parser.add_argument_group("images and videos"))
    _add_sampling(parser.add_argument_group("the answer"))
    _add_policies(
        parser.add_argument_group(
            "policies",
            "`mmserve models` lists their names. Numbers follow the name: threshold:confidence=0.8, "
            "early_commit:base=threshold,late=3",
        )
    )
    _add_constraint(parser.add_argument_group("constraint"))


def request_options(arguments: argparse.Namespace) -> Options:
    """The options of the request that ``arguments`` describe; its files are read."""
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repetition_penalty,
        "seed": arguments.seed,
        "n": arguments.n,
        "stop": arguments.stop,
        "steps": arguments.steps,
        "block_length": arguments.block_length,
        "cfg_scale": arguments.cfg_scale,
        "recompute": arguments.recompute,
        "commit": arguments.commit,
        "quality": arguments.quality,
        "videos": [path.read_bytes() for path in arguments.video],
        "video_sampling": arguments.video_sampling,
        "regex": arguments.regex,
        "choices": arguments.choice,
        "grammar": None if arguments.grammar is None else arguments.grammar.read_text(encoding="utf-8"),
        "template": _template(arguments.template),
        "schema_options": arguments.schema_option,
        "constraint_mode": arguments.constraint_mode,
        "constraint_sampling": arguments.constraint_sampling,
        "pruner": arguments.pruner,
        "min_pixels": arguments.min_pixels,
        "max_pixels": arguments.max_pixels,
        "video_min_pixels": arguments.video_min_pixels,
        "video_max_pixels": arguments.video_max_pixels,
        "keep_ratio": arguments.keep_ratio,
        "token_budget": arguments.token_budget,
        "attention_mass": arguments.attention_mass,
        "kv_reduction": arguments.kv_reduction,
        "image_reuse": arguments.image_reuse,
    }


def request_schema(arguments: argparse.Namespace) -> Any:
    """The schema in the file of ``--schema``, or None."""
    return None if arguments.schema is None else _read("schema", arguments.schema)


def _add_media(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="an image to show")
    group.add_argument("--video", action="append", default=[], type=Path, metavar="FILE", help="a video to show")
    group.add_argument(
        "--video-sampling",
        type=_video_sampling,
        metavar="KEY=VALUE,…",
        help="which frames of videos the model sees: fps, frames, scene_similarity, scene_frames, detail_every, as in "
        "'fps=2' or 'scene_frames=3,detail_every=4' (default the model's own)",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="tokens that the answer may take (default 64)"
    )
    group.add_argument("--temperature", type=float, default=0.0, help="0 (the default) = the likeliest tokens")
    group.add_argument("--top-p", type=float, help="share of the probability that tokens are drawn from (default 1)")
    group.add_argument(
        "--top-k", type=int, metavar="N", help="number of likeliest tokens that are drawn from (default all)"
    )
    group.add_argument(
        "--min-p", type=float, help="share of the highest probability that tokens drawn have at least (default 0)"
    )
    group.add_argument(
        "--repetition-penalty", type=float, help="divisor of the logits of tokens that were there (default 1)"
    )
    group.add_argument("--seed", type=int, default=0, help="what is drawn at a temperature above 0 (default 0)")
    group.add_argument("--n", type=int, default=1, metavar="N", help="samples of the answer (default 1)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; give several"
    )


def _add_policies(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--recompute", type=_policy, metavar=_POLICY, help="cache policy (default the model's)")
    group.add_argument("--commit", type=_policy, metavar=_POLICY, help="commit policy (default the model's)")
    group.add_argument(
        "--quality",
        type=_quality,
        metavar="exact|balanced|fast|NUMBER",
        help="choose both policies by how close to plain decoding they were measured; a number is the least wanted, "
        "plain decoding being 1 (default balanced)",
    )
    group.add_argument(
        "--steps", type=int, metavar="N", help="denoising steps of the whole answer (default one for each token)"
    )
    group.add_argument("--block-length", type=int, metavar="N", help="tokens of a block (default the model's)")
    for of, flag in (("an image", "--{}-pixels"), ("a frame of a video", "--video-{}-pixels")):
        for name, meaning in (("min", "fewest"), ("max", "most")):
            said = f"{meaning} pixels that {of} is resized to, for models that take any size (default the checkpoint's)"
            group.add_argument(flag.format(name), type=int, metavar="N", help=said)
    group.add_argument(
        "--cfg-scale", type=float, metavar="S", help="classifier-free guidance, in [0, 100] (default 0: none)"
    )
    group.add_argument("--pruner", metavar="NAME", help="pruner of visual tokens (default none)")
    amounts = group.add_mutually_exclusive_group()
    amounts.add_argument("--keep-ratio", type=float, help="share of the visual tokens that --pruner keeps, in (0, 1]")
    amounts.add_argument("--token-budget", type=int, metavar="N", help="visual tokens kept of an image or video")
    amounts.add_argument("--attention-mass", type=float, help="share of the attention that those kept draw, in (0, 1]")
    group.add_argument(
        "--kv-reduction",
        type=_policy,
        metavar=_POLICY,
        help="which K/V an autoregressive model keeps while it decodes, as in heavy_hitters:budget=64 (default all)",
    )
    group.add_argument(
        "--image-reuse",
        type=_policy,
        metavar=_POLICY,
        help="take images' K/V from where they stood alone, but for positions that this rule has run again, as in "
        "blend:recompute=0.3 (default none)",
    )


def _add_constraint(group: argparse._ArgumentGroup) -> None:
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="a JSON schema that the answer must satisfy, alone or as OpenAI's {name, strict, schema}",
    )
    kinds.add_argument("--regex", help="a regular expression that all of the answer must match")
    kinds.add_argument("--choice", action="append", metavar="TEXT", help="an answer to choose from; give several")
    kinds.add_argument("--grammar", type=Path, metavar="FILE", help="a grammar (Lark or GBNF) that the answer obeys")
    kinds.add_argument("--template", type=Path, metavar="FILE", help="a JSON array of texts and holes (objects)")
    group.add_argument(
        "--schema-option",
        action="append",
        metavar="NAME",
        help="how --schema is read, and answers are written: unknown_formats, one_of_as_any_of, closed_objects, "
        "white_space, exponents or any_order; give several",
    )
    group.add_argument(
        "--constraint-mode",
        choices=("strict", "validate", "lenient"),
        help="refuse what no grammar can express (strict, the default), check it afterwards, or ignore it",
    )
    group.add_argument(
        "--constraint-sampling",
        choices=("mask", "awrs", "asap"),
        help="what constrained samples are drawn from; 'awrs' and 'asap' are true to the model, and weighted",
    )


def _policy(text: str) -> Any:
    """A policy's name, or its class with the numbers that follow the name."""
    name, colon, numbers = text.partition(":")
    if not colon:
        return name  # the server knows more of them than have a class here
    kind = policy_class(name)
    if kind is None:
        raise argparse.ArgumentTypeError(f"{name!r} is no policy with numbers")
    return _made(kind, numbers)


def _video_sampling(text: str) -> VideoSampling:
    return _made(VideoSampling, text)


def _made(kind: type[_T], text: str) -> _T:
    """The dataclass ``kind`` with the values that ``text`` (``KEY=VALUE,…``) gives its fields."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in known or name in values:
            raise argparse.ArgumentTypeError(f"must be pairs KEY=VALUE of {', '.join(known)}, not {pair!r}")
        values[name] = _value(name, str(known[name].type), value)
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise argparse.ArgumentTypeError(f"{missing[0]} is missing: {missing[0]}=VALUE")
    return kind(**values)


def _value(name: str, kind: str, text: str) -> Any:
    """``text`` as a value of the field ``name``, whose type is called ``kind``."""
    if kind == "bool":
        if text not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{name} must be true or false, not {text!r}")
        return text == "true"
    try:
        return _READERS.get(kind.removesuffix(" | None"), str)(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name} must be a number, not {text!r}") from None


def _quality(text: str) -> Quality:
    """The number in ``text``, or the name that it is."""
    try:
        return float(text)
    except ValueError:
        names: dict[str, Quality] = {"exact": "exact", "balanced": "balanced", "fast": "fast"}
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be {', '.join(names)} or a number, not {text!r}") from None
        return names[text]


def _template(path: Path | None) -> Template | None:
    """The template in the file at ``path``: strings, and for each hole an object of ``Hole``'s fields."""
    if path is None:
        return None
    parts = _read("template", path)
    try:
        return [Hole(**part) if isinstance(part, dict) else part for part in parts]
    except TypeError as error:
        raise InvalidArgument.of("template", f"{path} holds no template: {error}") from error


def _read(name: str, path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument.of(name, f"{path} is no JSON: {error}") from error
