"""Garbage collector settings: objects loaded at start are frozen, and collections are rarer, as steps create few."""

import gc

#: Net allocations between collections (generation 0). With Python's default of 700, most of the objects visited belong
#: to active searches and are visited repeatedly: 4% of their time, now 1%.
_YOUNG = 5_000


def settle() -> None:
    """Freeze all present objects, so that the garbage collector skips them: a full collection over a model's vocabulary
    takes 50 ms and more, within some request's step. To be called once all long-lived objects are loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
