"""The command line: ``mmserve serve | demo | generate | decide | models | adapters | cache | tune | calibrate |
train-filter | plan | export | bench | completion``.

Results and ``--json`` go to stdout, progress and logs to stderr. Exit code 0 = success, 1 = failure, 2 = usage error.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Container
from importlib import import_module
from types import ModuleType

import mmserve
from mmserve.errors import ConfigError, MMServeError

#: Commands, each with a one-line description. The module of a command has ``add_arguments(parser)`` and
#: ``run(arguments) -> exit code``; it is named like the command, with ``_`` for ``-``.
COMMANDS = {
    "serve": "Serve models over gRPC, and optionally over HTTP, until SIGTERM or Ctrl-C.",
    "demo": "Start a server with the bundled model, ask it about newly drawn images and clips, and check its answers.",
    "generate": "Ask one question, with or without images and videos, and print the answer.",
    "decide": "Answer typed questions about a context with probabilities, without generating text.",
    "models": "List the models of a server with what they support and their limits; load and unload models.",
    "adapters": "List, load and drop adapters (LoRA) of a model.",
    "cache": "List, pin, unpin and drop cached prompts and images of a server, or prefill a prompt in advance.",
    "tune": "Measure which decode policies are fastest on a model's prompts, and write them to its policy.json.",
    "calibrate": "Fit the probabilities of typed questions to known answers, and write the model's decisions.json.",
    "train-filter": "Train the filter of the commit policy 'learned' on a model's own answers.",
    "plan": "Plan a cluster: measure the costs of stages, and find the layout of workers with the highest goodput.",
    "export": "Write a model as a GGUF file for llama.cpp.",
    "bench": "Run a benchmark and print its figures.",
    "completion": 'Print the completion script of a shell, as in eval "$(mmserve completion bash)".',
}


def build_parser(names: Container[str] = COMMANDS) -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """The parser of all commands, and the imported modules of those in ``names``; the other commands get no options."""
    parser = argparse.ArgumentParser(prog="mmserve", description=mmserve.__doc__)
    parser.add_argument("--version", action="version", version=f"mmserve {mmserve.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, ModuleType] = {}
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in names:
            modules[name] = import_module(f"mmserve.cli.{name.replace('-', '_')}")
            modules[name].add_arguments(command)
            command.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    return parser, modules


def main(argv: list[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default); returns the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # also during imports
        return 130


def _run(argv: list[str]) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported: its core writes its own logs to stderr
    parser, modules = build_parser(argv[:1])  # imports only the module of this command
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}; see mmserve {arguments.command} --help")
    from mmserve.observe.logs import configure  # imported after `--help` has exited

    form = getattr(arguments, "log_format", "text")
    configure(logging.DEBUG if arguments.verbose else _level(arguments.command), form)
    try:
        code = int(modules[arguments.command].run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of stdout, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at exit
        return 1
    except (ConfigError, MMServeError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        if form == "json":
            logging.getLogger("mmserve").error("%s", text)
        else:
            print(f"mmserve {arguments.command}: {text}", file=sys.stderr)
        return 1


def _level(command: str) -> int:
    return logging.INFO if command == "serve" else logging.WARNING
