"""The command line: ``mmserve serve | demo | generate | decide | models | adapters | cache | tune | calibrate |
train-filter | plan | export | bench | completion``.

Answers and ``--json`` go to stdout, progress and logs to stderr. Exit code 0 = done, 1 = failed, 2 = wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib import import_module
from types import ModuleType

import mmserve
from mmserve.errors import ConfigError, MMServeError
from mmserve.observe.logs import configure

#: Subcommand to the module that has ``add_arguments(parser)`` and ``run(arguments) -> exit code``.
COMMANDS = {
    "serve": "mmserve.cli.serve",
    "demo": "mmserve.cli.demo",
    "generate": "mmserve.cli.generate",
    "decide": "mmserve.cli.decide",
    "models": "mmserve.cli.models",
    "adapters": "mmserve.cli.adapters",
    "cache": "mmserve.cli.cache",
    "tune": "mmserve.cli.tune",
    "calibrate": "mmserve.cli.calibrate",
    "train-filter": "mmserve.cli.train_filter",
    "plan": "mmserve.cli.plan",
    "export": "mmserve.cli.export",
    "bench": "mmserve.cli.bench",
    "completion": "mmserve.cli.completion",
}


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """The parser of every command, and the commands' modules by name."""
    parser = argparse.ArgumentParser(prog="mmserve", description=mmserve.__doc__)
    parser.add_argument("--version", action="version", version=f"mmserve {mmserve.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: import_module(path) for name, path in COMMANDS.items()}
    for name, module in modules.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.add_argument("-v", "--verbose", action="store_true", help="log more")
    return parser, modules


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    parser, modules = build_parser()
    arguments = parser.parse_args(argv)
    form = getattr(arguments, "log_format", "text")
    configure(logging.DEBUG if arguments.verbose else _level(arguments.command), form)
    try:
        code = int(modules[arguments.command].run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 1
    except (ConfigError, MMServeError, OSError) as error:
        if form == "json":
            logging.getLogger("mmserve").error("%s", error)
        else:
            print(f"mmserve {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _level(command: str) -> int:
    return logging.INFO if command == "serve" else logging.WARNING
