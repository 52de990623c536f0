"""The decoding policies as a client names them: by a string, or by a class that has their numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from mmserve.core.request import Policy
from mmserve.errors import InvalidArgument


@dataclass(frozen=True)
class DkvDecode:
    """dKV-Cache-Decode (arXiv 2505.15781); ``refresh`` = steps between full refreshes, 1 = never cached."""

    refresh: int = 8


@dataclass(frozen=True)
class DkvGreedy:
    """dKV-Cache-Greedy (arXiv 2505.15781), for ``commit="random"``; ``window`` = neighbours of each position run."""

    refresh: int = 2
    window: int = 4


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """dLLM-Cache (arXiv 2506.06295) with one choice of positions for all layers.

    Prompt and response are run every so many steps; between, the ``ratio`` of the response whose values changed most at
    the second layer.
    """

    prompt_refresh: int = 100
    response_refresh: int = 7
    ratio: float = 0.25


@dataclass(frozen=True)
class Threshold:
    """Every candidate at least this confident becomes final (arXiv 2505.22618); above 1 = one token a step."""

    confidence: float = 0.9


@dataclass(frozen=True)
class Factor:
    """The n most confident, n the largest with the n-th at least ``1 - factor / (n + 1)`` (arXiv 2505.22618)."""

    factor: float = 1.0


@dataclass(frozen=True)
class Confident:
    """All candidates more confident than this, or else as many as reach the schedule's time grid (arXiv 2505.16990)."""

    confidence: float = 0.95


@dataclass(frozen=True)
class EntropyBound:
    """The most of lowest entropy whose entropies, but for the largest, sum to at most ``bound`` (arXiv 2505.24857)."""

    bound: float = 0.1


@dataclass(frozen=True)
class Learned:
    """What a filter trained for the model trusts more than ``threshold``, and as many as the schedule says.

    With ``end_of_text``, an accepted end of text settles everything right of it (Learn2PD and EoTP, arXiv 2509.25188).
    """

    threshold: float = 0.96
    end_of_text: bool = True


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Commit above ``confidence``, and replace committed tokens of the current block by others above
    ``edit_confidence``, in at most ``passes`` passes after it is full (LLaDA2.1)."""

    confidence: float = 0.95
    edit_confidence: float = 0.9
    passes: int = 16


@dataclass(frozen=True, kw_only=True)
class Ngram:
    """Prompt-lookup speculation for autoregressive models: drafts of ``length`` tokens that followed the last
    ``longest`` (or as few as ``shortest``) before. Greedy, the answer is the same, in fewer passes, but for ties
    in the last bits of logits."""

    length: int = 8
    longest: int = 4
    shortest: int = 2


@dataclass(frozen=True)
class Guided:
    """The server's companion of the model judges the drafted block from left to right (arXiv 2505.21467): it keeps
    what it would have chosen itself, or, with ``top_k``, what is among its most probable so many tokens and at least
    ``ratio`` times as probable as the first."""

    top_k: int = 0
    ratio: float = 0.5


@dataclass(frozen=True)
class DraftModel:
    """Speculation for autoregressive models: the server's companion of the model drafts ``length`` tokens a pass
    (arXiv 2211.17192). Greedy, the answer is the same, in fewer passes, but for ties in the last bits of logits."""

    length: int = 4


@dataclass(frozen=True)
class Scheduler:
    """The discrete scheduler that the server's configuration has under ``[schedulers.NAME]``."""

    name: str


@dataclass(frozen=True, kw_only=True)
class EarlyCommit:
    """What is left is committed at once when the model is sure of the answer (Prophet, arXiv 2508.19982).

    Sure: the two highest logits lie at least ``early`` (later ``middle``, ``late``) apart on average over the answer's
    positions, final ones that a pass runs included: ``answer_length`` of them from ``answer_start`` on, or, with a
    length of 0, the current block. With ``answer_after`` they begin after that text, once it is among the final tokens.
    With ``mistakes`` above 0 sure is something else: that no more of them than that are expected to be wrong.
    ``base`` is what is committed until then.
    """

    early: float = 7.5
    middle: float = 5.0
    late: float = 2.5
    mistakes: float = 0.0
    answer_start: int = 0
    answer_length: int = 0
    answer_after: str = ""
    base: BaseCommit | None = None


@dataclass(frozen=True)
class HeavyHitters:
    """H2O (arXiv 2306.14048): of ``budget`` K/V positions the ``recent`` share are the latest, the others those that
    drew the most attention."""

    budget: int
    recent: float = 0.5


@dataclass(frozen=True)
class ExpectedAttention:
    """``budget`` K/V positions: the first ``sinks``, and those that queries at the next ``future`` positions are
    expected to attend to most (arXiv 2510.00636)."""

    budget: int
    sinks: int = 4
    future: int = 512


@dataclass(frozen=True)
class SinkWindow:
    """StreamingLLM (arXiv 2309.17453): ``budget`` K/V positions, the first ``sinks`` and the latest."""

    budget: int
    sinks: int = 4


@dataclass(frozen=True)
class VisualCache:
    """Of the visual K/V positions the ``budget`` that the first ``outputs`` answer tokens attended to most, and all
    others (MustDrop, arXiv 2411.10803)."""

    budget: int
    outputs: int = 4


@dataclass(frozen=True)
class Blend:
    """CacheBlend (arXiv 2405.16444): of the images' positions the ``recompute`` share is run again whose keys and
    values this prompt changes most at the last of the first ``layers``, at least 2; share 1 = no reuse."""

    recompute: float = 0.15
    layers: int = 2


@dataclass(frozen=True)
class KvShare:
    """KVShare (arXiv 2503.16525): of the images' positions the ``recompute`` share is run again whose values this
    prompt changes most at the last of the first ``layers``, weighed by the attention that they draw there, and
    ``each_step`` more, in [0, 64], in each pass that decodes."""

    recompute: float = 0.15
    layers: int = 2
    each_step: int = 3


@dataclass(frozen=True)
class LegoLink:
    """EPIC (arXiv 2410.15332): the first ``recompute`` share of each image's positions is run again."""

    recompute: float = 0.15


@dataclass(frozen=True)
class RandomReuse:
    """A baseline: the ``recompute`` share that is run again is drawn by the request's seed."""

    recompute: float = 0.15


Recompute = (
    Literal["none", "prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache", "adaptive", "block", "last"]
    | DkvDecode
    | DkvGreedy
    | Adaptive
)
BaseCommit = (
    Literal["low_confidence", "random", "threshold", "factor", "confident", "entropy_bound", "learned"]
    | Threshold
    | Factor
    | Confident
    | EntropyBound
    | Learned
)
Commit = (
    BaseCommit
    | Literal["early_commit", "edit", "ngram", "guided", "draft_model"]
    | EarlyCommit
    | Edit
    | Ngram
    | Guided
    | DraftModel
    | Scheduler
)
#: Plain decoding, the model's default, the fastest within three points; or the least that is wanted (plain = 1).
Quality = Literal["exact", "balanced", "fast"] | float
KvReduction = HeavyHitters | ExpectedAttention | SinkWindow | VisualCache
ImageReuse = Blend | KvShare | LegoLink | RandomReuse
Pruner = Literal[
    "none",
    "random",
    "resize",
    "cls_attention",
    "hired",
    "visionzip",
    "mustdrop",
    "tome",
    "column_attention",
    "fastv",
    "redvtp",
]
#: Policies with numbers, and the names that they go by without.
_POLICIES: dict[type, str] = {
    DkvDecode: "dkv_decode",
    DkvGreedy: "dkv_greedy",
    Adaptive: "adaptive",
    Threshold: "threshold",
    Factor: "factor",
    Confident: "confident",
    EntropyBound: "entropy_bound",
    Learned: "learned",
    EarlyCommit: "early_commit",
    Edit: "edit",
    Ngram: "ngram",
    Guided: "guided",
    DraftModel: "draft_model",
    Scheduler: "scheduler",
    HeavyHitters: "heavy_hitters",
    ExpectedAttention: "expected_attention",
    SinkWindow: "sink_window",
    VisualCache: "visual_cache",
    Blend: "blend",
    KvShare: "kv_share",
    LegoLink: "lego_link",
    RandomReuse: "random_reuse",
}
#: Policies whose message goes by another name.
_POLICY_FIELDS = {"none": "no_cache"}


def policy_class(name: str) -> type[Any] | None:
    """The class of the policy ``name``; None where it has no numbers."""
    return next((kind for kind, known in _POLICIES.items() if known == name), None)


def named(policy: Policy) -> Any:
    """``policy`` as ``generate`` takes it: its name, or its class with its numbers; ``KeyError`` where it has none."""
    if not policy.options and policy.base is None:
        return policy.name
    kinds = {name: kind for kind, name in _POLICIES.items()}
    base = {} if policy.base is None else {"base": named(policy.base)}
    return kinds[policy.name](**policy.options, **base)


def put_policy(message: Any, oneof: str, policy: Any, path: str) -> None:
    """Choose ``policy`` in the message's ``oneof``: a name, or one of the classes with its numbers."""
    if policy is None:
        return
    name = policy if isinstance(policy, str) else _POLICIES.get(type(policy), "")
    known = {field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields}
    field = name if name in known else _POLICY_FIELDS.get(name, name)
    if field not in known or name in _POLICY_FIELDS.values():
        names = sorted(known - set(_POLICY_FIELDS.values()) | {n for n, f in _POLICY_FIELDS.items() if f in known})
        classes = [kind.__name__ for kind, of in _POLICIES.items() if of in known]
        wanted = " or one of ".join(filter(None, [", ".join(map(repr, names)), ", ".join(classes)]))
        raise InvalidArgument.of(f"{path}{oneof}", f"must be {wanted}, not {policy!r}")
    chosen = getattr(message, field)
    chosen.SetInParent()
    numbers = {} if isinstance(policy, str) else {f.name: getattr(policy, f.name) for f in fields(policy)}
    base = numbers.pop("base", None)
    put(chosen, f"{path}{field}.", **numbers)
    if base is not None:
        put_policy(chosen, "base", base, f"{path}{field}.")


def put(message: Any, path: str, **values: Any) -> None:
    """Set the fields of ``message`` that have a value; ``InvalidArgument`` names the one that cannot be."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument.of(f"{path}{name}", f"cannot be {value!r}: {error}") from error
