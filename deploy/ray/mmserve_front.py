"""The front of a cluster as an application of Ray Serve, which is what KubeRay's RayService looks after.

Serve starts the front on a node, watches it and replaces it. It is a process of its own, `mmserve serve --cluster …`,
with its own ports: no call and no token passes Serve.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from healthcheck import problem


class FrontProcess:
    """A process that serves on ``target``, from its start to its end.

    Raises ``RuntimeError`` where it does not serve within ``start_seconds``.
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
        """Raise ``RuntimeError`` where it has ended or does not serve."""
        if why := self._problem(4.0):
            raise RuntimeError(why)

    def stop(self, seconds: float = 90.0) -> None:
        """Let it drain for so many seconds, then end it."""
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
    """The application of ``import_path: mmserve_front:app``; ``args``: ``config`` and ``target``."""
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
        """Holds the process as long as Serve holds the replica."""

        def __init__(self) -> None:
            command = ["mmserve", "serve", "--cluster", args["config"], "--log-format", "json"]
            # However this replica ends, its front ends with it, and leaves the port to the next one.
            self._front = FrontProcess(["setpriv", "--pdeathsig", "TERM", *command], args["target"])

        def check_health(self) -> None:
            """Called by Serve; what it raises has the replica replaced."""
            self._front.check()

        def __del__(self) -> None:
            front = getattr(self, "_front", None)
            if front is not None:
                front.stop()

        async def __call__(self, _request: object) -> str:
            """What Serve's own HTTP port answers: where to go."""
            return f"mmserve serves gRPC on {args['target']}\n"

    return Front.bind()
