"""The load of a cluster: a mix of kinds of requests, and arrivals drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmserve.errors import ConfigError
from mmserve.plan.costs import read_part


@dataclass(frozen=True)
class Kind:
    """A kind of identical requests. Counts are for one image, or for one request.

    ``steps``: decode passes after prefill, 0 = one for each output token except the first. ``rows``: positions run by a
    pass, 0 = all of prompt and answer, as in a diffusion model without a cache.
    """

    weight: float = 1.0
    images: int = 0
    patches: int = 0  # of one image
    megapixels: float = 0.0  # of one image
    visual_tokens: int = 0  # of one image, in prefill
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
        """Positions run by prefill: including those of the answer if a decode pass runs more than one."""
        return self.prompt + (0 if self.rows == 1 else self.output_tokens)

    @property
    def passes(self) -> int:
        """Decode passes after prefill."""
        return self.steps or max(0, self.output_tokens - 1)

    @property
    def step_rows(self) -> int:
        """Positions run by one decode pass."""
        return self.rows or self.prompt + self.output_tokens


@dataclass(frozen=True)
class Ask:
    """One request: its kind, and its arrival time (seconds)."""

    number: int
    arrival: float
    kind: Kind


@dataclass(frozen=True)
class Targets:
    """Latency targets: time to first token and time per further token (seconds), for a share of requests."""

    ttft: float
    tpot: float
    share: float = 0.9


@dataclass(frozen=True)
class Workload:
    """Kinds of requests by weight."""

    name: str
    kinds: tuple[Kind, ...]

    def draw(self, count: int, rate: float, seed: int) -> list[Ask]:
        """``count`` requests of a Poisson process with ``rate`` a second; all simultaneous if ``rate`` is infinite.

        The same seed with another rate gives the same requests with scaled arrival times.
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
        """The probability of each kind."""
        whole = sum(kind.weight for kind in self.kinds)
        return [kind.weight / whole for kind in self.kinds]

    @property
    def most_images(self) -> int:
        """Maximum number of images of a request."""
        return max(kind.images for kind in self.kinds)

    def to_json(self) -> dict[str, Any]:
        """As plain data for ``read``."""
        return {"name": self.name, "kinds": [asdict(kind) for kind in self.kinds]}


def from_json(data: Any, where: str) -> Workload:
    """A workload from plain data. Raises ``ConfigError`` with ``where`` and the key for invalid data."""
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
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < float("inf"):
                raise ConfigError(f"{at}: {key} must be a {'whole ' if whole else 'finite '}number of at least 0")
        made.append(Kind(**kind))
        if made[-1].prompt < 1 or made[-1].output_tokens < 1:
            raise ConfigError(f"{at} must have a prompt and an answer of at least one token")
    if not sum(kind.weight for kind in made) > 0:
        raise ConfigError(f"{where}: one kind at least must have a weight above 0")
    return Workload(str(data.get("name", where)), tuple(made))


def read(path: str) -> Workload:
    """The workload of a JSON file, or a shipped one with a name in ``costs.SHIPPED``."""
    return from_json(read_part(path, "workload"), path)
