"""The options of ``mmserve generate`` that describe a request, and the request built from them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mmserve.cli.options import existing
from mmserve.client import Hole, Options, SeedCanvas, Template, VideoSampling
from mmserve.core.constraint import ConstraintMode, ConstraintSampling, SchemaOption
from mmserve.core.media_id import is_media_id, is_url
from mmserve.core.options import AMOUNTS, DIFFUSION, PIXELS, REQUEST, SAMPLING
from mmserve.core.policies import CLASSES, policy_names
from mmserve.core.tuning import Quality
from mmserve.core.values import Value, values
from mmserve.errors import InvalidArgument

_T = TypeVar("_T")

#: Parsers of numbers, by the name of the field's type.
_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_POLICY = "NAME[:KEY=VALUE,…]"
#: Defaults of the command line that differ from those of the API: a terminal shows short answers.
_DEFAULTS: dict[str, Any] = {"max_new_tokens": 64}
#: Fields whose option has another name, as it reads a file or may be repeated.
_FLAGS = {"videos": "video", "choices": "choice", "schema_options": "schema_option"}
#: Options that are another name for a field of a message.
_FIELDS = {
    "json_schema": "schema",
    "choice": "choices",
    "lark": "grammar",
    "gbnf": "grammar",
    "min_quality": "quality",
    **{name: kind for kind in ("recompute", "commit") for name in policy_names(kind)},
}
#: Options for fields at certain paths only, the longer paths first.
_PATHS = {
    r"vision$": "pruner",
    r"messages\[\d+\]\.parts\[\d+\]\.video\.sampling\b": "video_sampling",
    r"messages\[\d+\]\.parts\[\d+\]\.video\b": "video",
    r"messages\[\d+\]\.parts\[\d+\]\.image\b": "image",
}


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options of a request except its prompt."""
    _add_messages(parser.add_argument_group("messages, images and videos"))
    _add_answer(parser.add_argument_group("the answer"))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the policies have a line each
    _add_policies(
        parser.add_argument_group(
            "policies",
            "Parameters follow the name of a policy: threshold:confidence=0.8,\n"
            "early_commit:base=threshold,late=3, early_commit:base=threshold(confidence=0.8).\n"
            "`mmserve models` lists the policies of a model. Parameters with their defaults:\n  "
            + "\n  ".join(_numbers()),
        )
    )
    _add_constraint(parser.add_argument_group("constraint"))
    _add_tools(parser.add_argument_group("tools"))


def request_options(arguments: argparse.Namespace) -> Options:
    """The request options given by ``arguments``; reads the files that they name."""
    given = {name: getattr(arguments, _FLAGS.get(name, name)) for name in Options.__annotations__ if name != "model"}
    given["videos"] = [_media("videos", video) for video in arguments.video]
    given["grammar"] = None if arguments.grammar is None else _text("grammar", arguments.grammar)
    given["template"] = _template(arguments.template)
    given["tools"] = None if arguments.tools is None else _read("tools", arguments.tools)
    return given  # type: ignore[return-value]  # by the names of its keys


def request_images(arguments: argparse.Namespace) -> list[bytes | str]:
    """The images of ``--image``: the contents of files, and media ids or URLs as strings."""
    return [_media("image", image) for image in arguments.image]


def request_prompt(arguments: argparse.Namespace, prompt: str) -> str | list[dict[str, str]]:
    """``prompt``, after the messages of ``--system`` and ``--chat``; with role assistant if the answer continues it."""
    chat: list[dict[str, str]] = []
    if arguments.system is not None:
        chat.append({"role": "system", "content": arguments.system})
    if arguments.chat is not None:
        chat += _read("chat", arguments.chat)
    role = "assistant" if arguments.continue_final_message else "user"
    return [*chat, {"role": role, "content": prompt}] if chat or role != "user" else prompt


def request_schema(arguments: argparse.Namespace) -> Any:
    """The parsed JSON schema of ``--schema``, or None."""
    return None if arguments.schema is None else _read("schema", arguments.schema)


def by_flags(error: InvalidArgument) -> InvalidArgument:
    """``error`` with command-line options in place of the request fields that they set."""
    return InvalidArgument(*(replace(wrong, field=_flag_of(wrong.field)) for wrong in error.violations))


def _flag_of(path: str) -> str:
    """The option that sets the request field at ``path``; ``path`` itself if there is none."""
    for pattern, name in _PATHS.items():
        if re.match(pattern, path):
            return f"{_flag(name)} ({path})" if "." in path else _flag(name)
    *outer, last = path.split(".")
    for part in (*outer, last):
        field = re.sub(r"[\[#].*", "", part)
        name = _FIELDS.get(field, field)
        if name in REQUEST or name == "schema":
            return _flag(name) if field == last else f"{_flag(name)} ({path})"
    return path


def _flag(name: str) -> str:
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


def _add(group: argparse._ActionsContainer, name: str, **how: Any) -> None:
    """Add the option ``name`` of a request, with its meaning, range and default as help."""
    repeated = "; may be repeated" if how.get("action") == "append" else ""
    group.add_argument(_flag(name), help=_help(REQUEST[name]) + repeated, **how)


def _help(option: Value) -> str:
    default = _DEFAULTS.get(option.name)
    text = re.sub(r"(, by name or class)? \(``[^)]*\)", "", option.sentence).replace("``", "")  # for Python
    return (text if default is None else f"{text} ({default} on the command line)").replace("%", "%%")


def _add_numbers(group: argparse._ActionsContainer, options: Mapping[str, Value]) -> None:
    for name, option in options.items():
        kind = option.kind.removesuffix(" | None")
        if kind in ("int", "float"):
            default = _DEFAULTS.get(name)
            _add(group, name, type=_READERS[kind], default=default, metavar="N" if kind == "int" else "X")


def _add_messages(group: argparse._ArgumentGroup) -> None:
    files = {"action": "append", "default": [], "metavar": "FILE|ID"}
    _add(group, "raw", action="store_true")
    _add(group, "continue_final_message", action="store_true")
    _add(group, "template_options", type=json.loads, metavar="JSON")
    _add(group, "slo_class", metavar="NAME")
    _add(group, "adapter", metavar="NAME")
    group.add_argument("--system", metavar="TEXT", help="system message before the prompt; default none")
    group.add_argument(
        "--chat",
        type=Path,
        metavar="FILE",
        help='messages before the prompt: a JSON array of {"role": …, "content": …}; default none',
    )
    shown = "an image: a file, the media id of an upload, or a URL that the server may fetch; may be repeated"
    group.add_argument("--image", help=shown, **files)  # type: ignore[arg-type]
    _add(group, "videos", **files)
    sampling = ", ".join(f"{name} ({value.sentence})" for name, value in values(VideoSampling).items())
    group.add_argument(
        "--video-sampling",
        type=lambda text: _made(VideoSampling, text),
        metavar="KEY=VALUE,…",
        help=f"which frames of videos the model sees: {sampling}",
    )
    _add_numbers(group, PIXELS)
    _add(group, "pruner", choices=policy_names("pruner"))
    _add_numbers(group.add_mutually_exclusive_group(), AMOUNTS)


def _add_answer(group: argparse._ArgumentGroup) -> None:
    _add_numbers(group, SAMPLING)
    _add(group, "stop", action="append", default=[], metavar="TEXT")
    _add(group, "logit_bias", type=_biases, metavar="ID=BIAS,…")
    _add(group, "ignore_end", action="store_true")
    _add(group, "tokens", action="store_true")
    _add(group, "alternatives", type=int, metavar="N")
    _add(group, "return_prompt", action="store_true")
    _add(group, "prompt_tokens", action="store_true")
    _add(group, "prompt_alternatives", type=int, metavar="N")


def _add_policies(group: argparse._ArgumentGroup) -> None:
    _add(group, "recompute", type=partial(_policy, "recompute"), metavar=_POLICY)
    _add(group, "commit", type=partial(_policy, "commit"), metavar=_POLICY)
    _add(group, "quality", type=_quality, metavar="exact|balanced|fast|X")
    _add_numbers(group, DIFFUSION)
    _add(group, "seed_canvas", type=_seed_canvas, metavar="JSON")
    _add(group, "kv_reduction", type=partial(_policy, "kv_reduction"), metavar=_POLICY)
    _add(group, "image_reuse", type=partial(_policy, "image_reuse"), metavar=_POLICY)


def _numbers() -> list[str]:
    """The policies with parameters, each in the option's syntax with its default values."""
    shown = []
    for name, kind in CLASSES.items():
        pairs = (f"{v.name}={v.default_words or v.name.upper()}" for v in values(kind).values() if v.default != "")
        shown.append(f"{name}:{','.join(pairs)}")
    return shown


def _add_constraint(group: argparse._ArgumentGroup) -> None:
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="JSON schema of the answer, alone or as OpenAI's {name, strict, schema}; default none",
    )
    _add(kinds, "regex")
    _add(kinds, "choices", action="append", metavar="TEXT")
    _add(kinds, "grammar", type=Path, metavar="FILE")
    kinds.add_argument(
        "--template",
        type=Path,
        metavar="FILE",
        help="JSON array of texts and holes; a hole is an object with max_tokens, schema, regex, choices, grammar, "
        "constraint_mode and schema_options; default none",
    )
    _add(group, "schema_options", action="append", choices=[str(option) for option in SchemaOption])
    _add(group, "constraint_mode", choices=[str(mode) for mode in ConstraintMode])
    _add(group, "constraint_sampling", choices=[str(sampling) for sampling in ConstraintSampling])


def _add_tools(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="tools that the answer can call: a JSON array of objects {name, description, parameters}, where "
        "parameters is a JSON schema, or of tools in the form of OpenAI's API; default none",
    )
    _add(group, "tool_choice", metavar="auto|none|required|NAME")
    _add(group, "allowed_tools", action="append", metavar="NAME")
    _add(group, "parallel_tool_calls", action=argparse.BooleanOptionalAction)


def _policy(option: str, text: str) -> Any:
    """A policy's name, or an instance of its class if parameters follow the name."""
    name, colon, numbers = text.partition(":")
    if not colon:
        if name not in policy_names(option):
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(sorted(policy_names(option)))}, not {name!r}")
        return name
    kind = CLASSES.get(name)
    if kind is None:
        raise argparse.ArgumentTypeError(f"{name!r} is not a policy with parameters; these are: {', '.join(CLASSES)}")
    return _made(kind, numbers)


def _made(kind: type[_T], text: str) -> _T:
    """An instance of the dataclass ``kind`` with the fields set in ``text`` (``KEY=VALUE,…``)."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for pair in re.split(r",(?![^(]*\))", text):
        name, _, value = pair.partition("=")
        if name not in known or name in given:
            raise argparse.ArgumentTypeError(f"must be pairs KEY=VALUE of {', '.join(known)}, not {pair!r}")
        given[name] = _value(name, str(known[name].type), value)
    missing = [name for name, field in known.items() if field.default is MISSING and name not in given]
    if missing:
        raise argparse.ArgumentTypeError(f"{missing[0]} is missing: add {missing[0]}=VALUE")
    return kind(**given)


def _value(name: str, kind: str, text: str) -> Any:
    """``text`` parsed as a value of the field ``name`` with the type name ``kind``."""
    if name == "base":
        policy, numbers, rest = text.partition("(")
        return _policy("commit", f"{policy}:{rest.removesuffix(')')}" if numbers else policy)
    if kind == "bool":
        if text not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{name} must be true or false, not {text!r}")
        return text == "true"
    try:
        return _READERS.get(kind.removesuffix(" | None"), str)(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name} must be a number, not {text!r}") from None


def _seed_canvas(text: str) -> SeedCanvas:
    """The seed canvas in ``text``: a JSON object with ``tokens`` and ``pinned``."""
    try:
        return SeedCanvas(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f'must be {{"tokens": [...], "pinned": [...]}}: {error}') from None


def _biases(text: str) -> dict[int, float]:
    """The logit biases in ``text``, by token id."""
    try:
        pairs = (pair.split("=") for pair in text.split(","))
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be pairs ID=BIAS, not {text!r}") from None


def _quality(text: str) -> Quality:
    """The quality in ``text``: a number or a name."""
    try:
        return float(text)
    except ValueError:
        names: dict[str, Quality] = {"exact": "exact", "balanced": "balanced", "fast": "fast"}
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be {', '.join(names)} or a number, not {text!r}") from None
        return names[text]


def _template(path: Path | None) -> Template | None:
    """The template in the file at ``path``: a list of strings and, for holes, objects with the fields of ``Hole``."""
    if path is None:
        return None
    parts = _read("template", path)
    try:
        return [Hole(**part) if isinstance(part, dict) else part for part in parts]
    except TypeError as error:
        raise InvalidArgument.of("template", f"{path} is not a template: {error}") from error


def _read(name: str, path: Path) -> Any:
    try:
        return json.loads(_text(name, path))
    except ValueError as error:
        raise InvalidArgument.of(name, f"{path} is not valid JSON: {error}") from error


def _text(name: str, path: Path) -> str:
    return existing(_flag(name), path).read_text(encoding="utf-8")


def _media(name: str, given: str) -> bytes | str:
    """``given`` if it is a media id or URL, else the contents of the file at that path."""
    return given if is_media_id(given) or is_url(given) else existing(_flag(name), Path(given)).read_bytes()
