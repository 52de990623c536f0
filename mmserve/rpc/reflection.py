"""Server reflection under both names: ``grpc.reflection.v1`` and ``grpc.reflection.v1alpha``.

Their messages are the same on the wire, so one servicer answers both. ``grpcio-reflection`` has only the older one; the
newer file descriptor is derived from it, so that it can be looked up as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE_NAMES = (f"{_NEW}.ServerReflection", reflection.SERVICE_NAME)


def add_reflection(services: Iterable[str], server: Any) -> None:
    """Add reflection of ``services``, and of itself, to ``server`` (``grpc.aio``)."""
    names = (*services, *SERVICE_NAMES)
    pool = descriptor_pool.Default()
    _describe(pool)
    reflection.enable_server_reflection(names, server, pool)
    answer = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names, pool).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    new = grpc.method_handlers_generic_handler(SERVICE_NAMES[0], {"ServerReflectionInfo": answer})
    server.add_generic_rpc_handlers((new,))


def _describe(pool: Any) -> None:
    """Add the file descriptor of ``grpc.reflection.v1`` to ``pool`` if it is missing."""
    try:
        pool.FindFileContainingSymbol(SERVICE_NAMES[0])
        return
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = f"{_NEW.replace('.', '/')}/reflection.proto", _NEW
    for message in file.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(_OLD, _NEW)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_OLD, _NEW)
            method.output_type = method.output_type.replace(_OLD, _NEW)
    pool.Add(file)
