from __future__ import annotations

import grpc
import pytest
from echo_server import EchoEngine, model_info, threaded
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from mmserve.client import Client
from mmserve.errors import (
    BY_CODE,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    Internal,
    InvalidArgument,
    MMServeError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc
from mmserve.wire.status import from_rpc_error, from_status, to_status

ERRORS = [
    InvalidArgument(FieldViolation("a.b", "is wrong"), FieldViolation("c[0]", "ist ungültig")),
    Unauthenticated("who?"),
    PermissionDenied("not you"),
    NotFound("no such thing"),
    FailedPrecondition("not now"),
    Unimplemented("no images"),
    ResourceExhausted("full", retry_after=1.25),
    ResourceExhausted("full for good"),
    Unavailable("draining"),
    DeadlineExceeded("late"),
    Cancelled("gone"),
    Internal("a bug, see 17", error_id="17"),
]


def same(left: MMServeError, right: MMServeError) -> bool:
    return type(left) is type(right) and str(left) == str(right) and vars(left) == vars(right)


def test_every_kind_is_tested() -> None:
    assert {type(e) for e in ERRORS} == set(BY_CODE.values())


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_there_and_back(error: MMServeError) -> None:
    status = to_status(error)
    assert code_pb2.Code.Name(status.code) == error.code == type(error).code
    assert same(from_status(status), error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_over_the_wire(error: MMServeError) -> None:
    engine = EchoEngine(failure=error)
    with threaded(engine) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        message = pb.GenerateRequest(messages=[{"role": "ROLE_USER", "parts": [{"text": "a b"}]}])
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(message, timeout=10))
        assert rpc_status.from_call(caught.value) == to_status(error)
        assert same(from_rpc_error(caught.value), error)
        with Client(address) as client, pytest.raises(type(error)) as raised:
            client.generate("a b")
        assert same(raised.value, error)


def test_details_are_the_fitting_messages_of_google_rpc() -> None:
    def detail(error: MMServeError) -> str:
        return to_status(error).details[0].TypeName()

    assert detail(ERRORS[0]) == "google.rpc.BadRequest"
    assert detail(ERRORS[6]) == "google.rpc.RetryInfo"
    assert detail(ERRORS[-1]) == "google.rpc.RequestInfo"
    assert not to_status(ERRORS[7]).details


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNKNOWN", Internal),
        ("DATA_LOSS", Internal),
        ("ABORTED", Unavailable),
        ("INVALID_ARGUMENT", InvalidArgument),
    ],
)
def test_codes_of_others(code: str, kind: type[MMServeError]) -> None:
    error = from_status(status_pb2.Status(code=code_pb2.Code.Value(code), message="said a proxy"))
    assert type(error) is kind
    assert "said a proxy" in str(error)


def test_details_that_cannot_be_read_are_passed_over() -> None:
    status = to_status(ERRORS[0])
    status.details[0].value = b"\xff\xff"
    assert "is wrong" in str(from_status(status))


@given(st.lists(st.tuples(st.text(max_size=400), st.text(max_size=400)), min_size=1, max_size=60))
def test_a_status_always_fits_into_metadata(fields: list[tuple[str, str]]) -> None:
    status = to_status(InvalidArgument(*(FieldViolation(*f) for f in fields)))
    on_the_wire = 3 * len(status.message.encode()) + 4 / 3 * status.ByteSize()
    assert on_the_wire < 8000
    assert isinstance(from_status(status), InvalidArgument)


def test_a_thousand_violations_arrive_as_some_and_a_count() -> None:
    with threaded(EchoEngine(info=model_info())) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        message = pb.GenerateRequest(messages=[pb.ChatMessage()] * 1000)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(message, timeout=10))
    bad = error_details_pb2.BadRequest()
    assert rpc_status.from_call(caught.value).details[0].Unpack(bad)
    assert "more fields are not acceptable" in bad.field_violations[-1].description
    shown = len(bad.field_violations) - 1
    assert bad.field_violations[-1].description.startswith(str(2000 - shown))
