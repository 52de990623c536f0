"""Whether the server at HOST:PORT serves: exit code 0 or 1. For containers; Kubernetes has its own gRPC probes."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def problem(target: str, seconds: float = 4.0) -> str:
    """Why the health service of ``target`` does not report SERVING within ``seconds``; "" if it does."""
    with grpc.insecure_channel(target) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serving else health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


if __name__ == "__main__":
    if found := problem(sys.argv[1]):
        sys.exit(f"{sys.argv[1]}: {found}")
