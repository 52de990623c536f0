"""What is asked of a cluster: kinds of requests in a mix, and arrivals drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmserve.errors import ConfigError
from mmserve.plan.costs import read_part


@dataclass(frozen=True)
class Kind:
    """Requests that are alike. Counts are of one image, or of one request.

    ``steps``: decode passes after prefill, 0 = one for each output token but the first. ``rows``: positions that a
    pass runs, 0 = all of prompt and answer, as a diffusion model without a cache does.
    """

    weight: float = 1.0
    images: int = 0
    patches: int = 0  # of one image
    megapixels: float = 0.0  # of one image
    visual_tokens: int = 0  # of one image, as prefill sees them
    text_tokens: int = 32
    output_tokens: int = 16
    steps: int = 0
    rows: int = 1

    @property
    def prompt(self) -> int:
        """Positions of the prompt."""
        return self.text_tokens + self.images * self.visual_tokens

    @property
    def prefilled(self) -> int:
        """Positions that prefill runs: those of the answer, too, where a decode pass runs more than one."""
        return self.prompt + (0 if self.rows == 1 else self.output_tokens)

    @property
    def passes(self) -> int:
        """Decode passes after prefill."""
        return self.steps or max(0, self.output_tokens - 1)

    @property
    def step_rows(self) -> int:
        """Positions that one decode pass runs."""
        return self.rows or self.prompt + self.output_tokens


@dataclass(frozen=True)
class Ask:
    """One request: its kind, and when it arrives (seconds)."""

    number: int
    arrival: float
    kind: Kind


@dataclass(frozen=True)
class Targets:
    """What a client is promised: time to first token and time per further token (seconds), for a share of requests."""

    ttft: float
    tpot: float
    share: float = 0.9


@dataclass(frozen=True)
class Workload:
    """Kinds of requests by weight."""

    name: str
    kinds: tuple[Kind, ...]

    def draw(self, count: int, rate: float, seed: int) -> list[Ask]:
        """``count`` requests of a Poisson process of ``rate`` a second; all at once where ``rate`` is infinite.

        The same seed at another rate gives the same requests, closer together.
        """
        chooser, gaps = random.Random(f"kinds {seed}"), random.Random(f"gaps {seed}")
        weights = [kind.weight for kind in self.kinds]
        asks, at = list[Ask](), 0.0
        for number in range(count):
            at += gaps.expovariate(1.0) / rate
            asks.append(Ask(number, at, chooser.choices(self.kinds, weights)[0]))
        return asks

    @property
    def shares(self) -> Sequence[float]:
        """The share of each kind."""
        whole = sum(kind.weight for kind in self.kinds)
        return [kind.weight / whole for kind in self.kinds]

    @property
    def most_images(self) -> int:
        """Images of the request with the most."""
        return max(kind.images for kind in self.kinds)

    def to_json(self) -> dict[str, Any]:
        """As plain data, which ``read`` reads."""
        return {"name": self.name, "kinds": [asdict(kind) for kind in self.kinds]}


def from_json(data: Any, where: str) -> Workload:
    """A workload from plain data. Raises ``ConfigError`` that names ``where`` and the key."""
    kinds = data.get("kinds") if isinstance(data, dict) else None
    if not isinstance(kinds, list) or not kinds:
        raise ConfigError(f"{where} must be a JSON object with 'kinds', a list of at least one kind of request")
    made = []
    for number, kind in enumerate(kinds):
        at = f"{where}: kinds[{number}]"
        if not isinstance(kind, dict):
            raise ConfigError(f"{at} must be a JSON object")
        if unknown := set(kind) - set(Kind.__dataclass_fields__):
            known = ", ".join(Kind.__dataclass_fields__)
            raise ConfigError(f"{at}: unknown key {min(unknown)!r}; known are {known}")
        for key, value in kind.items():
            whole = isinstance(getattr(Kind(), key), int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < 0:
                raise ConfigError(f"{at}: {key} must be a {'whole ' if whole else ''}number of at least 0")
        made.append(Kind(**kind))
        if made[-1].prompt < 1 or made[-1].output_tokens < 1:
            raise ConfigError(f"{at} must have a prompt and an answer of at least one token")
    if not sum(kind.weight for kind in made) > 0:
        raise ConfigError(f"{where}: one kind at least must have a weight above 0")
    return Workload(str(data.get("name", where)), tuple(made))


def read(path: str) -> Workload:
    """The workload of a JSON file, or one shipped under a name of ``costs.SHIPPED``."""
    return from_json(read_part(path, "workload"), path)
