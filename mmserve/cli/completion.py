"""Print the completion script of a shell: eval "$(mmserve completion bash)"."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from mmserve.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve completion``."""
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    """Print the script, generated from the parser of all commands."""
    from mmserve.cli import build_parser

    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion needs shtab: pip install 'mmserve[completion]'") from error
    parser = build_parser()[0]
    for action in _actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined] # where shtab looks for it
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of ``parser`` and of its subcommands."""
    for action in parser._actions:
        yield action
        for command in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _actions(command)
