from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from typing import Any

import grpc
import pytest
from echo_server import PATIENCE, EchoEngine, config, late, model_info, served, threaded
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import eventually

from mmserve.client import AsyncClient, Client
from mmserve.core.events import Delta
from mmserve.core.request import Message, Request, TextPart
from mmserve.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MMServeError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from mmserve.observe.metrics import Metrics
from mmserve.observe.watch import Watch
from mmserve.rpc.generation import answered
from mmserve.rpc.server import SERVICES, Server
from mmserve.rpc.status import DEADLINE_SLACK
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc, model_pb2
from mmserve.wire.status import from_rpc_error

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def ask(text: str = "a b") -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=[{"role": "ROLE_USER", "parts": [{"text": text}]}])


def generate(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = (), **how: Any) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel).Generate(
        ask(), timeout=PATIENCE, metadata=metadata, **how
    )


def test_request_id_comes_back(channel: grpc.Channel) -> None:
    call = generate(channel, (("x-request-id", "job 7/ü".replace("ü", "u")),))
    events = list(call)
    assert dict(call.initial_metadata())["x-request-id"] == "job 7/u"
    assert events[0].admitted.request_id == "job 7/u"


@pytest.mark.parametrize("given", ["", "x" * 129])
def test_unfit_request_ids_are_replaced(channel: grpc.Channel, given: str) -> None:
    call = generate(channel, (("x-request-id", given),))
    events = list(call)
    label = dict(call.initial_metadata())["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", label) and events[0].admitted.request_id == label


def test_errors_have_the_request_id_too(channel: grpc.Channel) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    call = stub.Generate(pb.GenerateRequest(), timeout=PATIENCE, metadata=(("x-request-id", "mine"),))
    with pytest.raises(grpc.RpcError):
        list(call)
    assert dict(call.initial_metadata())["x-request-id"] == "mine"


@pytest.mark.parametrize(
    "method", ["GenerationService/Generate", "MediaService/UploadMedia", "ModelService/ListModels"]
)
def test_bytes_that_are_no_message_are_a_wrong_request(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    path = f"/mmserve.v1.{method}"
    with pytest.raises(grpc.RpcError) as refused:
        if "Media" in method:
            channel.stream_unary(path)(iter([b"\n\x01a", b"\xff"]), timeout=PATIENCE)
        else:
            list(channel.unary_stream(path)(b"\xff", timeout=PATIENCE))
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidArgument) and error.violations[0].field == "request" and method in error.message
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert list(generate(channel))[-1].HasField("finished")


def test_two_live_requests_may_share_a_label(caplog: pytest.LogCaptureFixture) -> None:
    engine = EchoEngine(pause=0.05)
    with caplog.at_level(logging.INFO, "mmserve"), threaded(engine) as address, Client(address) as client:
        both = [client.stream("a b c", request_id="same") for _ in range(2)]
        for stream in both:
            next(stream)
        texts = ["".join(e.text for e in stream if isinstance(e, Delta)) for stream in both]
    assert texts == ["a b c"] * 2
    ids = {request.id for request in engine.requests}
    assert len(ids) == 2
    assert all(f"request {i} for echo (x-request-id: same)" in caplog.text for i in ids)


def test_the_log_tells_how_each_request_ended(caplog: pytest.LogCaptureFixture) -> None:
    engine = EchoEngine(refusals=[ResourceExhausted("full\n2026-11-22 ERROR forged \x1b[2J", retry_after=3600.0)])
    with (
        caplog.at_level(logging.INFO, "mmserve"),
        threaded(engine) as address,
        Client(address, timeout=PATIENCE) as client,
    ):
        with pytest.raises(ResourceExhausted):
            client.generate("x", request_id="refused")
        with pytest.raises(NotFound):
            client.generate("x", request_id="wrong", model="m" * 900)
        assert client.generate("a b c", request_id="answered").text == "a b c"
    lines = [record.getMessage() for record in caplog.records if record.name == "mmserve.rpc"]
    assert all("\n" not in line and len(line) < 700 for line in lines)
    (refused,) = [line for line in lines if "(x-request-id: refused) failed" in line]
    assert r"RESOURCE_EXHAUSTED: full\n2026-11-22 ERROR forged \x1b[2J" in refused
    (wrong,) = [line for line in lines if "(x-request-id: wrong) failed" in line]
    assert "NOT_FOUND: no model 'mmm" in wrong and wrong.endswith("…")
    own = engine.requests[-1].id
    assert [line for line in lines if line.startswith(f"request {own} finished: sample 0, end, ")]


def test_models_by_name() -> None:
    engines = {"first": EchoEngine(info=model_info("first")), "second": EchoEngine(info=model_info("second"))}
    with threaded(engines) as address, Client(address) as client:
        client.generate("x")
        client.generate("x", model="second")
        with pytest.raises(NotFound, match="no model 'third' here; there is first, second"):
            client.generate("x", model="third")
    assert [len(e.requests) for e in engines.values()] == [1, 1]
    assert engines["second"].requests[0].model == "second"


def test_a_bug_is_internal_with_an_id_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    engine = EchoEngine(bug=ZeroDivisionError("secret words"))
    with threaded(engine) as address, Client(address) as client, pytest.raises(Internal) as caught:
        client.generate("x", request_id="mine")
    assert caught.value.error_id and caught.value.error_id in str(caught.value)
    assert "secret" not in str(caught.value)
    record = next(r for r in caplog.records if caught.value.error_id in r.getMessage())
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError
    assert "Generate mine" in record.getMessage()


def test_a_passed_deadline_cancels_as_such(engine: EchoEngine) -> None:
    engine.go.clear()
    with threaded(engine) as address, Client(address) as client:
        with pytest.raises(DeadlineExceeded):
            late(client, engine)
        assert engine.cancel_seen.wait(PATIENCE)
    assert [type(e) for e in engine.cancelled.values()] == [DeadlineExceeded]
    assert engine.requests[0].deadline is not None


@pytest.mark.parametrize(("timeout", "error"), [(DEADLINE_SLACK / 2, DeadlineExceeded), (PATIENCE, Cancelled)])
def test_a_client_that_leaves_near_its_deadline_has_reached_it(
    engine: EchoEngine, timeout: float, error: type[MMServeError]
) -> None:
    engine.go.clear()
    request = Request(
        id="mine", model="echo", messages=(Message("user", (TextPart("a"),)),), deadline=time.monotonic() + timeout
    )

    async def leave() -> None:
        events = answered(engine, request, Watch(Metrics({"echo": engine})))
        await anext(events)
        await events.aclose()

    asyncio.run(leave())
    assert [type(e) for e in engine.cancelled.values()] == [error]


def test_no_deadline_is_none(channel: grpc.Channel, engine: EchoEngine) -> None:
    list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(ask()))
    assert engine.requests[0].deadline is None


def test_a_client_that_disappears_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = EchoEngine(pause=0.005)
    with threaded(engine) as address:
        for _ in range(5):
            with grpc.insecure_channel(address) as channel:
                call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(ask("word " * 50_000), timeout=60)
                for _, _response in zip(range(10), call, strict=False):
                    pass
        eventually(lambda: engine.running == 0, "their requests end")
        assert len(engine.cancelled) == 5
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_client_that_does_not_read_stops_nobody() -> None:
    engine = EchoEngine()
    with threaded(engine) as address, grpc.insecure_channel(address) as channel, Client(address) as client:
        text = " ".join(["word" * 100] * 3000)
        slow = generation_pb2_grpc.GenerationServiceStub(channel).Generate(ask(text), timeout=60)
        next(slow)
        assert client.generate("quick").text == "quick"
        eventually(lambda: engine.running == 0, "the engine goes through without it")
        responses = list(slow)
        assert "".join(r.delta.text for r in responses) == text == responses[-1].finished.text


def test_health_of_every_service(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    assert len(SERVICES) == 6
    for service in ("", *SERVICES):
        assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=PATIENCE)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="nothing"), timeout=PATIENCE)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_reflection(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="mmserve.v1.GenerationService"),
    ]
    listed, file = stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE)
    names = {s.name for s in listed.list_services_response.service}
    assert names >= {*SERVICES, "grpc.health.v1.Health"}
    found = [FileDescriptorProto.FromString(f) for f in file.file_descriptor_response.file_descriptor_proto]
    assert "GenerationService" in {s.name for f in found for s in f.service}


def test_an_unknown_method_is_unimplemented(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_unary("/mmserve.v1.ModelService/Other", request_serializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            method(b"", timeout=PATIENCE)
    assert caught.value.code().name == Unimplemented.code


def test_drain_lets_running_requests_end() -> None:
    engine = EchoEngine()
    engine.go.clear()

    async def main() -> None:
        async with (
            served(engine, config({"drain_seconds": 300.0})) as server,
            AsyncClient(f"127.0.0.1:{server.port}") as client,
            AsyncClient(client.target, retries=False) as refusing,
            grpc.aio.insecure_channel(client.target) as channel,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest(service=s)) for s in ("", "", SERVICES[0])]
            assert [(await w.read()).status for w in watches] == [SERVING] * 3
            watches[0].cancel()  # one watcher gone, the others are still told
            running = asyncio.create_task(client.generate("word " * 100))
            assert await asyncio.to_thread(engine.run_seen.wait, PATIENCE)
            draining = asyncio.create_task(server.drain())
            assert [(await w.read()).status for w in watches[1:]] == [NOT_SERVING] * 2
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            with pytest.raises(Unavailable, match="draining"):
                await refusing.generate("too late")
            engine.go.set()
            assert (await running).usage.completion_tokens == 101
            await asyncio.wait_for(draining, 60)  # as soon as nothing runs, not after 300 seconds
            await server.drain()  # again is nothing

    asyncio.run(main())
    assert engine.calls == ["start", "drain 300", "stop"]


def test_drain_ends_what_takes_too_long() -> None:
    engine = EchoEngine()
    engine.go.clear()

    async def main() -> None:
        settings = config({"drain_seconds": 0.2})
        async with served(engine, settings) as server, AsyncClient(f"127.0.0.1:{server.port}") as client:
            running = asyncio.create_task(client.generate("word"))
            assert await asyncio.to_thread(engine.run_seen.wait, PATIENCE)
            await server.drain()
            with pytest.raises(Unavailable, match="the server stops"):
                await running

    asyncio.run(main())
    assert engine.running == 0


def test_signals() -> None:
    """The first one drains, the second one stops at once."""
    engine = EchoEngine()
    engine.go.clear()

    async def main() -> None:
        server = Server(config({"drain_seconds": 60.0}), {"echo": engine})
        async with AsyncClient(f"127.0.0.1:{await server.start()}") as client:
            serving = asyncio.create_task(server.serve_until_signal())
            running = asyncio.create_task(client.generate("word"))
            assert await asyncio.to_thread(engine.run_seen.wait, PATIENCE)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.to_thread(eventually, lambda: "drain 60" in engine.calls, "it drains")
            assert not running.done() and not serving.done()
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(Unavailable):
                await running
            await asyncio.wait_for(serving, 30)

    asyncio.run(main())
    assert engine.calls == ["start", "drain 60", "drain 0", "stop"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_serving_ends_when_the_server_is_stopped_otherwise(engine: EchoEngine) -> None:
    async def main() -> None:
        async with served(engine) as server:
            serving = asyncio.create_task(server.serve_until_signal())
            await asyncio.sleep(0.05)
            await server.drain()
            await asyncio.wait_for(serving, 30)

    asyncio.run(main())


def test_a_port_in_use_is_a_config_error(engine: EchoEngine) -> None:
    async def main() -> None:
        async with served(engine) as server:
            second = Server(config({"port": server.port}), {"echo": EchoEngine()})
            told = f"cannot listen on 127.0.0.1:{server.port}: another program uses the port; choose one with --set "
            told += "server.port=N"
            with pytest.raises(ConfigError, match=re.escape(told)):
                await second.start()
            with pytest.raises(RuntimeError, match="once"):
                await server.start()

    asyncio.run(main())


def test_an_engine_that_does_not_start_stops_the_others() -> None:
    class Broken(EchoEngine):
        def start(self) -> None:
            raise MemoryError("no room")

    good = EchoEngine()

    async def main() -> None:
        server = Server(config(), {"good": good, "broken": Broken()})
        with pytest.raises(MemoryError):
            await server.start()
        await server.drain()

    asyncio.run(main())
    assert good.calls[:2] == ["start", "stop"]


def test_a_server_needs_a_model_and_may_end_unstarted() -> None:
    with pytest.raises(ConfigError):
        Server(config(), {})
    asyncio.run(Server(config(), {"echo": EchoEngine()}).drain())


def test_many_at_once(engine: EchoEngine) -> None:
    engine.pause = 0.002
    with threaded(engine) as address, Client(address) as client:
        texts: dict[int, str] = {}

        def work(n: int) -> None:
            texts[n] = client.generate(f"number {n} of many").text

        threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {n: f"number {n} of many" for n in range(32)}


def test_list_models_is_plain(channel: grpc.Channel) -> None:
    method = channel.unary_unary("/mmserve.v1.ModelService/ListModels", None, model_pb2.ListModelsResponse.FromString)
    assert method(b"", timeout=PATIENCE).models[0].limits.max_tokens == 1024
