"""What a process has loaded at its start is no work for the garbage collector."""

import gc


def settle() -> None:
    """Take all objects there are out of the collector's rounds: a full one over a model's vocabulary takes 50 ms and
    more, in the middle of some request's step. Call it once everything is loaded that stays."""
    gc.collect()
    gc.freeze()
