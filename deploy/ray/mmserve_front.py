"""The front of a cluster as an application of Ray Serve, for KubeRay's RayService.

Serve starts the front on a node, checks its health and replaces it. The front is a separate process, `mmserve serve
--cluster …`, with its own ports: no call and no token passes through Serve.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from healthcheck import problem


class FrontProcess:
    """A process that serves on ``target``, from its start to its end.

    Raises ``RuntimeError`` if it does not serve within ``start_seconds``.
    """

    def __init__(self, command: Sequence[str], target: str, start_seconds: float = 600.0) -> None:
        self._target = target
        self._process = subprocess.Popen(command)
        end = time.monotonic() + start_seconds
        while why := self._problem(1.0):
            if time.monotonic() > end or self._process.poll() is not None:
                self.stop()
                raise RuntimeError(why)
            time.sleep(0.5)

    def check(self) -> None:
        """Raise ``RuntimeError`` if it has ended or does not serve."""
        if why := self._problem(4.0):
            raise RuntimeError(why)

    def stop(self, seconds: float = 90.0) -> None:
        """Let it drain for at most ``seconds``, then kill it."""
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _problem(self, seconds: float) -> str:
        code = self._process.poll()
        if code is not None:
            return f"the front has ended with exit code {code}"
        why = problem(self._target, seconds)
        return why and f"the front does not serve on {self._target}: {why}"


def app(args: dict[str, str]):
    """The application of ``import_path: mmserve_front:app``; ``args``: the files ``cluster`` and
    ``config``, and ``target``, the address of the front."""
    from ray import serve

    @serve.deployment(
        name="front",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {"mmserve-front": 1}},
        health_check_period_s=5,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=100,
    )
    class Front:
        """Owns the process for the lifetime of the replica."""

        def __init__(self) -> None:
            files = ["--cluster", args["cluster"], "--config", args["config"]]
            command = ["mmserve", "serve", *files, "--log-format", "json"]
            # the front ends with this replica, however that ends, so that its port is free for the next one
            self._front = FrontProcess(["setpriv", "--pdeathsig", "TERM", *command], args["target"])

        def check_health(self) -> None:
            """Called by Serve, which replaces the replica if this raises."""
            self._front.check()

        def __del__(self) -> None:
            front = getattr(self, "_front", None)
            if front is not None:
                front.stop()

        async def __call__(self, _request: object) -> str:
            """The answer of Serve's own HTTP port: the address of the front."""
            return f"mmserve serves gRPC on {args['target']}\n"

    return Front.bind()
