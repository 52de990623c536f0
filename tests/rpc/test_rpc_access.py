"""What a server tells its operators about calls: the access log, JSON lines, metrics; and reflection."""

from __future__ import annotations

import io
import json
import logging
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from echo_server import EchoEngine, config, late, threaded
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client.parser import text_string_to_metric_families

import mmserve
from mmserve.client import Client
from mmserve.errors import DeadlineExceeded, InvalidArgument, MMServeError, Unauthenticated
from mmserve.observe.logs import Json

GENERATE = "/mmserve.v1.GenerationService/Generate"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@contextmanager
def json_log() -> Iterator[io.StringIO]:
    """What mmserve logs meanwhile, as ``--log-format json`` writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Json())
    logger = logging.getLogger("mmserve")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_every_call_has_a_line_and_is_counted_whatever_becomes_of_it() -> None:
    port = free_port()
    settings = config({"metrics_port": port, "auth_tokens": ("known",)})
    with (
        json_log() as stream,
        threaded(EchoEngine(), settings) as address,
        Client(address, token="known", timeout=60) as client,
        Client(address, token="other", timeout=60) as stranger,
    ):
        client.wait_ready()
        client.generate("one two three", request_id="mine")
        with pytest.raises(InvalidArgument):
            client.generate("x", temperature=-1.0)
        client.upload(b"x" * 1000)
        client.upload(b"x" * 1000)
        with pytest.raises(InvalidArgument):
            client.upload(b"")
        with pytest.raises(Unauthenticated):
            stranger.models()
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/no/such\nmethod")(b"", metadata=(("authorization", "Bearer known"),))
        seen = scrape(port)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    calls = [line for line in lines if line["logger"] == "mmserve.access"]
    assert [(c["method"].rpartition("/")[2], c["code"]) for c in calls] == [
        ("Generate", "OK"),
        ("Generate", "INVALID_ARGUMENT"),
        ("UploadMedia", "OK"),
        ("UploadMedia", "OK"),
        ("UploadMedia", "INVALID_ARGUMENT"),
        ("ListModels", "UNAUTHENTICATED"),
        ("such\nmethod", "UNIMPLEMENTED"),
    ], "the health check went well, and has no line"
    first = calls[0]
    assert (first["model"], first["prompt_tokens"], first["completion_tokens"]) == ("echo", 3, 3)
    assert first["request_id"] == "mine" and first["peer"].startswith("ipv4:127.0.0.1:")
    assert first["received_bytes"] > 0 and first["sent_bytes"] > 0 and first["ms"] > 0
    assert calls[2]["received_bytes"] > 1000 and calls[2]["sent_bytes"] > 0
    assert any(line["logger"] == "mmserve.rpc" and line.get("request_id") == "mine" for line in lines)
    assert "\\nmethod" in calls[-1]["message"] and "\n" not in calls[-1]["message"]

    def handled(service: str, method: str, code: str) -> float:
        labels = (("grpc_code", code), ("grpc_method", method), ("grpc_service", service))
        return seen.get(("grpc_server_handled_total", labels), 0)

    assert handled("mmserve.v1.GenerationService", "Generate", "OK") == 1
    assert handled("mmserve.v1.GenerationService", "Generate", "INVALID_ARGUMENT") == 1
    assert handled("mmserve.v1.ModelService", "ListModels", "UNAUTHENTICATED") == 1
    assert handled("unknown", "unknown", "UNIMPLEMENTED") == 1, "a client's word is no label"
    uploads = {k[1][0][1]: v for k, v in seen.items() if k[0] == "mmserve:media_uploads_total"}
    assert uploads == {"stored": 1, "deduplicated": 1, "INVALID_ARGUMENT": 1}
    assert seen["mmserve:media_upload_bytes_total", ()] == 2000
    [build] = [dict(labels) for name, labels in seen if name == "mmserve:build_info"]
    assert build["version"] == mmserve.__version__ and build["torch"]
    [model] = [dict(labels) for name, labels in seen if name == "mmserve:model_info"]
    assert (model["model_name"], model["dtype"], model["kernel_cached_attention"]) == ("echo", "float32", "pytorch")
    assert seen["mmserve:model_parameters", (("model_name", "echo"),)] == 12_345


def test_prometheus_reads_the_names_that_dashboards_ask_for() -> None:
    """What Prometheus 2 accepts, in its order: in OpenMetrics the names would have no colons."""
    port = free_port()
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain"
    with threaded(EchoEngine(), config({"metrics_port": port, "metrics_prefixes": ("vllm:",)})) as address:
        with Client(address, timeout=60) as client:
            client.generate("one two")
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    for prefix in ("mmserve:", "vllm:"):
        assert f'{prefix}generation_tokens_total{{model_name="echo"}} 2.0' in lines
    assert not any(line.startswith(("mmserve_", "vllm_", "vllm:requests_shed")) for line in lines)


def test_the_access_log_can_be_turned_off() -> None:
    settings = config({"access_log": False})
    with json_log() as stream, threaded(EchoEngine(), settings) as address, Client(address, timeout=60) as client:
        client.generate("x")
    assert "mmserve.rpc" in stream.getvalue() and "mmserve.access" not in stream.getvalue()


def test_a_client_that_leaves_and_a_failure_have_their_codes() -> None:
    engine = EchoEngine(pause=0.01)
    with json_log() as stream, threaded(engine) as address, Client(address, timeout=60) as client:
        events = client.stream("word " * 1000)
        next(events)
        events.close()
        assert engine.cancel_seen.wait(60)
        engine.go.clear()
        with pytest.raises(DeadlineExceeded):
            late(client, engine)
        engine.go.set()
        engine.bug = RuntimeError("a bug")
        with pytest.raises(MMServeError):
            client.generate("x")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    codes = [line["code"] for line in lines if line["logger"] == "mmserve.access"]
    assert codes[-1] == "INTERNAL" and {*codes[:-1]} == {"CANCELLED", "DEADLINE_EXCEEDED"}
    [failed] = [line for line in lines if "exception" in line]
    assert "RuntimeError: a bug" in failed["exception"] and failed["level"] == "ERROR" and failed["request_id"]


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
def test_both_versions_of_reflection_describe_the_services(package: str) -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"{package}.ServerReflection"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="mmserve.v1.GenerationService"),
    ]
    with threaded(EchoEngine()) as address, grpc.insecure_channel(address) as channel:
        reflect = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        listed, itself, ours = reflect(iter(asked), timeout=60)
    names = {service.name for service in listed.list_services_response.service}
    assert {f"{p}.ServerReflection" for p in ("grpc.reflection.v1", "grpc.reflection.v1alpha")} <= names
    assert "mmserve.v1.GenerationService" in names
    assert itself.file_descriptor_response.file_descriptor_proto and ours.file_descriptor_response.file_descriptor_proto
