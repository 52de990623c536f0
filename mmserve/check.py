"""Validation of a configuration in seconds: binds no port for serving, and reads no weights except adapters'."""

from __future__ import annotations

import copy
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmserve.config import Config, ModelConfig, SchedulerConfig, ServerConfig, from_mapping
from mmserve.config.engine import check_pages, resolve
from mmserve.config.ports import try_port
from mmserve.errors import ConfigError
from mmserve.http import require_packages
from mmserve.models.names import HUB, served_name, served_names
from mmserve.observe import traces
from mmserve.tenants import accepted_tokens

#: Tables of caches that may be on disk.
_CACHES = ("encoder_cache", "kv_cache")
#: OpenSSL's message for an expired certificate in a handshake of two contexts within this process.
_OUT_OF_DATE = {9: "is not valid yet", 10: "has expired"}


@dataclass(frozen=True)
class Finding:
    """One result: ``part`` of the configuration, and its ``problem``; "" = none."""

    part: str
    problem: str = ""


def check(data: Mapping[str, Any], source: str) -> Iterator[Finding]:
    """Findings about a configuration as nested mappings, read from ``source``; all problems, not only the first.

    Checked are the tables, ports, certificates, cache folders, schedulers, and every model's files: ``config.json``,
    tokenizer, chat template, names, shapes and dtypes of all tensors, and adapters. Models of the hub are reported as
    not checked. No finding is repeated, for example if a model is given twice.
    """
    reported = set[Finding]()
    for finding in _findings(data, source):
        if finding not in reported:
            reported.add(finding)
            yield finding


def _findings(data: Mapping[str, Any], source: str) -> Iterator[Finding]:
    problems, sound = _settle(data, source)
    yield from (Finding("configuration", problem) for problem in problems)
    if not problems:
        yield Finding("configuration")
    try:
        config = from_mapping(sound, source=source)
    except ConfigError:  # reported above, and not caused by a single key
        return
    yield from findings("names of models", lambda: served_names(config.models))
    if config.tenants:
        yield from findings("tenants", lambda: accepted_tokens(config.tenants, config.server.auth_tokens))
    yield from _server(config.server)
    if config.server.otlp_endpoint:
        yield from findings("traces", lambda: traces.configure(config.server.otlp_endpoint)())
    if folders := [table for table in _CACHES if getattr(config, table).disk_folder]:
        yield from findings("caches on disk", *(partial(_folder, config, table) for table in folders))
    if config.schedulers:
        yield from findings("schedulers", *(partial(_scheduler, each) for each in config.schedulers))
    for model in config.models:
        yield from _model(model, config)


def _settle(data: Mapping[str, Any], source: str) -> tuple[list[str], dict[str, Any]]:
    """All errors of ``data``, and ``data`` without the keys that cause them."""
    sound: dict[str, Any] = copy.deepcopy(dict(data))
    problems: list[str] = []
    while problem := _error(sound, source):
        problems.append(problem)
        left = _without_blamed(sound, source, problem)
        if left is None:
            break
        sound = left
    return problems, sound


def _without_blamed(data: dict[str, Any], source: str, problem: str) -> dict[str, Any] | None:
    """``data`` without the key that causes ``problem`` by itself, else without one of the keys that cause it
    together."""
    pieces = list(_pieces(data))
    for alone, left in pieces:
        if _error(alone, source) == problem and _error(left, source) != problem:
            return left
    ways = {_error(left, source): left for _alone, left in reversed(pieces)}
    return ways.get("") or next((left for error, left in ways.items() if error != problem), None)


def _error(data: Mapping[str, Any], source: str) -> str:
    try:
        from_mapping(data, source=source)
    except ConfigError as error:
        return str(error)
    return ""


def _pieces(data: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs for each key of a table: the key alone, and ``data`` without it; then the same for each table."""
    for name, table in data.items():
        entries = table if isinstance(table, list) else [table]
        for index, entry in enumerate(entries):
            for key in entry if isinstance(entry, dict) else ():
                alone, left = {name: copy.deepcopy(table)}, copy.deepcopy(dict(data))
                in_alone, in_left = (
                    part[name][index] if isinstance(table, list) else part[name] for part in (alone, left)
                )
                for other in entry:
                    del (in_left if other == key else in_alone)[other]
                for other_index in range(len(entries)):
                    if isinstance(table, list) and other_index != index:
                        alone[name][other_index] = {}
                yield alone, left
    for name, table in data.items():
        yield {name: table}, {other: kept for other, kept in data.items() if other != name}


def findings(part: str, *checks: Callable[[], Any]) -> Iterator[Finding]:
    """The errors raised by ``checks``; one finding without a problem if there are none."""
    problems = []
    for each in checks:
        try:
            each()
        except ConfigError as error:
            problems.append(str(error))
    yield from (Finding(part, problem) for problem in problems or [""])


def _server(server: ServerConfig) -> Iterator[Finding]:
    from mmserve.rpc.certificates import check_certificates

    yield from findings(f"port {server.port}", lambda: try_port(server.host, server.port, "port"))
    if server.http_port:
        yield from findings(
            f"port {server.http_port}",
            lambda: try_port(server.host, server.http_port, "http_port"),
            require_packages,
        )
    if server.metrics_port:
        yield from findings(
            f"port {server.metrics_port}", lambda: try_port(server.metrics_host, server.metrics_port, "metrics_port")
        )
    if server.tls_key:
        yield from findings("certificates", lambda: check_certificates(server), lambda: _in_date(server))


def _in_date(server: ServerConfig) -> None:
    """Raise ``ConfigError`` if the server's certificate has expired, as reported by a client that trusts it."""
    try:
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(server.tls_certificate, server.tls_key, password="")
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        trusting.load_verify_locations(server.tls_certificate)
    except OSError:  # unreadable or mismatched files are reported elsewhere
        return
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    ends = client, serving.wrap_bio(to_server, to_client, server_side=True)
    for end in ends * 3:  # hello; certificate; verdict
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _OUT_OF_DATE:
                problem = f"[server] tls_certificate: {server.tls_certificate} {_OUT_OF_DATE[error.verify_code]}"
                raise ConfigError(problem) from error
            return


def _folder(config: Config, table: str) -> None:
    """Raise ``ConfigError`` if the folder of a cache cannot be written or created; changes nothing."""
    folder = Path(getattr(config, table).disk_folder)
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        raise ConfigError(f"[{table}] disk_folder {folder} cannot be used: {place} is no folder")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"[{table}] disk_folder {folder} cannot be used: {place} cannot be written to")


def _scheduler(scheduler: SchedulerConfig) -> None:
    from mmserve.decode.schedulers import load_schedulers  # imports torch, which takes seconds

    load_schedulers((scheduler,))


def _model(model: ModelConfig, config: Config) -> Iterator[Finding]:
    part = f"model {served_name(model)}"
    if model.path.startswith(HUB) or model.companion.startswith(HUB):
        yield Finding(f"{part} (not checked: it is on the hub)")
        return
    from mmserve.models.adapters import check_adapters  # imports torch, which takes seconds
    from mmserve.models.registry import sketch_model

    def whole() -> None:
        sketch = sketch_model(model)
        check_adapters(sketch, config.engine.adapter_bytes)
        engine, positions = config.engine, sketch.spec.max_tokens
        resolved = resolve(engine, positions=positions)
        check_pages(resolved, min(resolved.max_tokens, positions))

    yield from findings(part, whole)
