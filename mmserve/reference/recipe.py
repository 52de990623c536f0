"""Training recipes: every number that decides what comes out."""

from __future__ import annotations

from dataclasses import dataclass

OBJECTIVES = ("diffusion", "causal")
TRAINED = ("all", "decoder", "adapter")

#: Kinds of subject and their shares of the batches. The first steps have scenes as JSON, which describes every cell,
#: and as listings, which lead from a shape to its place; the last ones mostly what is hardest: comparing pictures and
#: moments, or long descriptions.
MIXES: dict[str, dict[str, float]] = {
    "scenes": {"json": 0.5, "listing": 0.5},
    "broad": {
        "image": 0.25,
        "listing": 0.15,
        "json": 0.1,
        "video": 0.12,
        "narration": 0.1,
        "text": 0.1,
        "pair": 0.08,
        "cells": 0.1,
    },
    "comparing": {
        "image": 0.12,
        "listing": 0.05,
        "json": 0.06,
        "video": 0.25,
        "narration": 0.15,
        "text": 0.05,
        "pair": 0.22,
        "cells": 0.1,
    },
    "telling": {
        "image": 0.12,
        "listing": 0.04,
        "json": 0.34,
        "video": 0.14,
        "narration": 0.06,
        "text": 0.16,
        "pair": 0.09,
        "cells": 0.05,
    },
    "finishing": {
        "image": 0.17,
        "listing": 0.03,
        "json": 0.18,
        "video": 0.2,
        "narration": 0.07,
        "text": 0.14,
        "pair": 0.16,
        "cells": 0.05,
    },
    "settling": {
        "image": 0.17,
        "listing": 0.02,
        "json": 0.25,
        "video": 0.16,
        "narration": 0.04,
        "text": 0.2,
        "pair": 0.12,
        "cells": 0.04,
    },
    "perfecting": {
        "image": 0.2,
        "listing": 0.02,
        "json": 0.3,
        "video": 0.12,
        "narration": 0.03,
        "text": 0.22,
        "pair": 0.08,
        "cells": 0.03,
    },
    "reckoning": {
        "image": 0.15,
        "listing": 0.02,
        "json": 0.2,
        "video": 0.1,
        "narration": 0.02,
        "text": 0.42,
        "pair": 0.07,
        "cells": 0.02,
    },
    "streaming": {
        "stream": 0.5,
        "image": 0.11,
        "listing": 0.02,
        "json": 0.1,
        "video": 0.07,
        "narration": 0.02,
        "text": 0.07,
        "pair": 0.07,
        "cells": 0.02,
        "watch": 0.02,
    },
    # A diffusion model forgets sums and single frames sooner than a causal one: more of both.
    "streaming_diffusion": {
        "stream": 0.38,
        "image": 0.12,
        "listing": 0.02,
        "json": 0.11,
        "video": 0.07,
        "narration": 0.02,
        "text": 0.14,
        "pair": 0.07,
        "cells": 0.01,
        "watch": 0.06,
    },
    "calling": {
        "calls": 0.46,
        "image": 0.1,
        "listing": 0.02,
        "json": 0.08,
        "video": 0.06,
        "narration": 0.02,
        "text": 0.06,
        "pair": 0.05,
        "cells": 0.01,
        "watch": 0.02,
        "stream": 0.12,
    },
    # Those of adapters.
    "streams_alone": {"stream": 1.0},
    "decisions_alone": {"decisions": 0.5, "decisions_named": 0.3, "decisions_text": 0.08, "decisions_video": 0.12},
    # With a larger share of what needs more steps: descriptions in words, and clips.
    "decisions_balanced": {
        "decisions": 0.4,
        "decisions_named": 0.15,
        "decisions_text": 0.22,
        "decisions_video": 0.23,
    },
    "calls_alone": {"calls": 1.0},
    "copies_alone": {"copies": 1.0},
    "dictated_and_copies": {"dictated": 0.35, "copies": 0.65},
    "calls_and_dictated": {"calls": 0.65, "dictated": 0.25, "copies": 0.1},
    # The last one of the diffusion model: streams, tools, and typed questions.
    "deciding": {
        "calls": 0.27,
        "stream": 0.25,
        "decisions": 0.12,
        "decisions_text": 0.03,
        "decisions_video": 0.04,
        "watch": 0.03,
        "image": 0.05,
        "listing": 0.01,
        "json": 0.07,
        "video": 0.035,
        "text": 0.06,
        "pair": 0.035,
    },
}
#: Tasks that a mix asks more often than the others of their kind, once more for each time named here.
REPEATED: dict[str, tuple[str, ...]] = (
    dict.fromkeys(("perfecting", "reckoning"), ("count", "count", "comparison", "yes_no"))
    | dict.fromkeys(("calls_alone", "calls_and_dictated"), ("call", "two_calls"))
    | dict.fromkeys(("copies_alone", "dictated_and_copies"), ("reorder",))
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result; recorded in the checkpoint."""

    objective: str = "diffusion"
    tower_steps: int = 1000
    scene_steps: int = 1200  # steps of stage 2 with scenes as JSON and as listings only
    mix: str = "broad"  # of the steps after those
    packed_steps: int = 5500  # up to this step, questions about one picture share a row
    steps: int = 7500
    scale: float = 1.0  # rows of a batch over those of the CPU recipe
    muon_lr: float = 2.5e-3
    adam_lr: float = 1.8e-3
    warmup: int = 150
    auxiliary_weight: float = 0.3
    ema: float = 0.998
    lowest_rate: float = 0.08
    seed: int = 0
    #: or "decoder": tower and projector stay as they are, which windows of streams need; or "adapter": all stays as it
    #: is, and what is trained is added to the decoder's layers
    trained: str = "all"
    rank: int = 0  # of the adapter
    adapter_muon: bool = False  # whether Muon trains its matrices, by muon_lr, rather than AdamW
    #: weight decay of what Muon trains; a low-rank adapter needs far more than whole matrices: without, the first layer
    #: adds so much to the embeddings that tokens become alike
    muon_decay: float = 0.01
    #: weight of the loss on attention when a token is copied (``copying``); diffusion only, in rows of one question
    guide: float = 0.0
    output: bool = False  # whether the adapter changes the output layer, for tokens that the model has never given


#: The recipes by name: a CPU takes hours for the first, one data-centre GPU minutes for the second.
RECIPES = {"cpu": Recipe(), "gpu": Recipe(scale=4.0, steps=20000, muon_lr=3e-3, adam_lr=2e-3)}
