"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmserve import config
from mmserve.client import TLS, Client
from mmserve.config import Config
from mmserve.errors import ConfigError, InvalidArgument

#: Seconds for which a command retries an unreachable server: short, as a person waits for it.
_RECONNECT_SECONDS = 2.0
#: Environment variable that holds the bearer token for ``--server``.
TOKEN_VARIABLE = "MMSERVE_TOKEN"


def add_config(parser: argparse.ArgumentParser) -> None:
    """``--config``, ``--model``, ``--companion`` and ``--set``: the models to serve and their settings."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (TOML)")
    parser.add_argument(
        "--model",
        action="append",
        metavar="PATH",
        help="checkpoint directory, 'bundled' (the default), 'bundled-causal' or 'hub:owner/name'; may be repeated",
    )
    parser.add_argument(
        "--companion",
        metavar="PATH",
        help="autoregressive model that verifies or drafts (commit policies 'guided' and 'draft_model')",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value of the configuration, for example server.port=0; may be repeated",
    )


def read_config(arguments: argparse.Namespace) -> Config:
    """The configuration that results from ``--config``, ``--model``, ``--companion`` and ``--set``."""
    if arguments.config is not None:
        config.load(arguments.config)  # reports errors of the file alone first
    data, source = read_tables(arguments)
    return config.from_mapping(data, source=source)


def read_tables(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The same configuration as nested mappings, not validated, and the name of its source for error messages."""
    data: dict[str, Any] = {}
    source = "command line"
    if arguments.config is not None:
        data, source = config.read(arguments.config), str(arguments.config)
    if arguments.model:
        data["models"] = [{"path": path} for path in arguments.model]
    models = data.get("models", [{}])
    if arguments.companion and isinstance(models, list):  # another type is reported as an error by the validation
        beside = {"companion": arguments.companion}
        data["models"] = [{**model, **beside} if isinstance(model, dict) else model for model in models]
    for override in arguments.set:
        name, equals, value = override.partition("=")
        table, dot, key = name.partition(".")
        if not (equals and dot):
            raise ConfigError(f"--set takes TABLE.KEY=VALUE, not {_shown(override)!r}")
        values = data.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set takes TABLE.KEY=VALUE, and {table!r} is not a table: {_shown(override)!r}")
        values[key] = _value(value)
    return data, source


def _shown(override: str) -> str:
    """The part of a ``--set`` value that error messages may repeat: the key without the value, which may be a token."""
    named = re.match(r"[\w.\-]*=?", override)
    name = named.group() if named else ""
    return override if name == override else f"{name}…"


def _value(text: str) -> Any:
    """``text`` parsed as a TOML value; bare words are strings."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def existing(flag: str, path: Path) -> Path:
    """``path``, given by the option ``flag``; raises ``InvalidArgument`` if it does not exist."""
    if not path.exists():
        raise InvalidArgument.of(flag, f"there is no file {path}")
    return path


def require_plot(path: Path | None) -> None:
    """Raise ``ConfigError`` before measuring if the plot could not be drawn."""
    if path is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mmserve[plots]'")


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: one JSON object on stdout."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout; bytes are arrays of numbers."""
    print(json.dumps(value, ensure_ascii=False, default=list))


def show_progress(text: str) -> None:
    """Print a progress line on stderr; stdout holds only the result."""
    print(text, file=sys.stderr, flush=True)


def add_server(parser: argparse.ArgumentParser) -> None:
    """``--server`` and its credentials: use a running server instead of starting one."""
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="use this running server instead of starting one; --model is then the name of one of its models",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the bearer token for --server (default: the environment variable {TOKEN_VARIABLE})",
    )
    parser.add_argument("--token", action=_NoToken, help=argparse.SUPPRESS)
    parser.add_argument("--tls", action="store_true", help="use TLS, and trust the system's certificate authorities")
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="certificate authority (PEM) that signed the server's certificate"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="client certificate (PEM), for mTLS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of --tls-cert (PEM)")


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of commands that send requests: ``--server`` or the settings of a server started here, and
    ``--json``."""
    add_server(parser)
    add_config(parser)
    add_json(parser)


class _NoToken(argparse.Action):
    """Rejects a token given on the command line, without repeating it in the error."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(
            "a token on the command line is visible to every user of the machine: use --token-file or the "
            f"environment variable {TOKEN_VARIABLE}"
        )


def _token(arguments: argparse.Namespace) -> str | None:
    if arguments.token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    return str(arguments.token_file.read_text(encoding="utf-8", errors="surrogateescape").strip())


def _tls(arguments: argparse.Namespace) -> TLS | bool:
    if bool(arguments.tls_cert) != bool(arguments.tls_key):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    files = {"ca": arguments.tls_ca, "certificate": arguments.tls_cert, "key": arguments.tls_key}
    for file in files.values():
        if file is not None:
            file.read_bytes()  # fails with the file's name before any request is sent
    return TLS(**files) if any(files.values()) else bool(arguments.tls)


@dataclass(frozen=True)
class Reached:
    """A running server with its credentials; ``model``: the model of the requests, "" = the server's default."""

    target: str
    token: str | None = None
    tls: TLS | bool = False
    model: str = ""


def reached(arguments: argparse.Namespace) -> Reached:
    """The server given by ``--server``; raises ``ConfigError`` for options of a server started by the command."""
    _refuse_settings(arguments)
    if ":" not in arguments.server:
        raise ConfigError(f"--server takes HOST:PORT, such as localhost:50051, not {arguments.server!r}")
    return Reached(arguments.server, _token(arguments), _tls(arguments), requested_model(arguments))


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Client]:
    """A client of ``--server``, or of a server started here and stopped when the context exits."""
    if arguments.server:
        at = reached(arguments)
        with Client(at.target, token=at.token, tls=at.tls, reconnect_seconds=_RECONNECT_SECONDS) as client:
            yield client
        return
    settings = any_port(read_config(arguments))
    show_progress("Starting a server; this takes some seconds (--server HOST:PORT uses a running one)")
    from mmserve.assembly import BackgroundServer  # imports torch, which a running server does not need

    with BackgroundServer(settings) as server, Client(server.address) as client:
        yield client


def requested_model(arguments: argparse.Namespace) -> str:
    """The model name of the requests: the value of ``--model`` with ``--server``, else "" (the default model).

    Raises ``ConfigError`` if ``--model`` is given several times.
    """
    names = arguments.model or [""]
    if not arguments.server:
        return ""
    if len(names) > 1:
        raise ConfigError("with --server, --model can be given only once: a request uses one model")
    return str(names[0])


def _refuse_settings(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for server settings given with ``--server``: a client cannot change them."""
    for name in ("config", "companion", "set"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} cannot be used with --server: it configures a server that is started here")


def any_port(settings: Config) -> Config:
    """The settings of a server used only by this process: a free port, and no authentication."""
    server = replace(
        settings.server,
        port=0,
        metrics_port=0,
        http_port=0,
        tls_certificate="",
        tls_key="",
        tls_client_ca="",
        auth_tokens=(),
    )
    return replace(settings, server=server, tenants=())
