"""The caches of a cluster's workers, managed as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mmserve.cluster.asking import Answers, ask_all
from mmserve.cluster.workers import Worker
from mmserve.core.cached import Block, alone, named
from mmserve.engine.prefixes import own


class ClusterLeftover:
    """As ``tiers.leftover.Leftover``, on all workers; ``ask`` calls them."""

    def __init__(self, ask: Callable[..., Answers], served: tuple[str, ...], model: str) -> None:
        self._ask, self._of = ask, (served, model)

    def blocks(self) -> list[Block]:
        """All blocks, with the worker of each."""
        return _of_workers(self._ask("others.blocks", *self._of))

    def pin(self, ids: Sequence[str], pinned: bool) -> int:
        """See ``Leftover.pin``; the most blocks that any worker has."""
        return max(self._ask("others.pin", *self._of, list(ids), pinned).returned.values())

    def drop(self, ids: Sequence[str]) -> int:
        """See ``Leftover.drop``; blocks in the memory of several workers count for each."""
        return sum(self._ask("others.drop", *self._of, list(ids)).returned.values())


def _of_workers(answers: Answers) -> list[Block]:
    """The blocks that workers returned, with the worker of each."""
    return [block for worker, blocks in answers.returned.items() for block in own(blocks, worker)]


class ClusterCaches:
    """``EngineCachesLike`` of ``model``. Thread-safe, and slow: every call asks all ``workers`` and waits for them.

    Raises ``Unavailable`` if there are none, and the errors of ``engine.prefixes.EngineCaches``, with the name of the
    worker. ``dropped`` is called with the names of pages that no worker has any more.
    """

    def __init__(
        self, model: str, workers: Callable[[], Sequence[Worker]], dropped: Callable[[Sequence[bytes]], None]
    ) -> None:
        self._model, self._workers, self._dropped = model, workers, dropped

    def blocks(self) -> list[Block]:
        """All blocks, with the worker of each."""
        return _of_workers(self._ask("blocks"))

    def pin(self, ids: Sequence[str], pinned: bool) -> int:
        """Pin entries, or unpin them, on each worker that has them. Returns how many of their blocks are there, each
        counted once. If it raises, some workers may have done so."""
        visual, prefixes, blocks = self._sorted(ids)
        if not visual and not prefixes:
            return 0
        self._ask("pin", [*visual, *prefixes], pinned)
        return len(visual) + len(named(blocks, prefixes))

    def drop(self, ids: Sequence[str]) -> int:
        """Drop entries on all workers, without pages shared with others on any of them. Returns the number of blocks,
        each counted once."""
        visual, prefixes, blocks = self._sorted(ids)
        pages = alone([block for block in blocks if block.label.kind == "prefix"], prefixes)
        if not visual and not pages:
            return 0
        self._ask("drop", visual, pages)
        self._dropped([bytes.fromhex(name) for name in pages])
        return len(visual) + len(pages)

    def others(self, served: Collection[str], model: str = "") -> ClusterLeftover:
        """See ``Leftover``."""
        return ClusterLeftover(self._ask, tuple(served), model)

    def unpin_in_memory(self, successor: object = None) -> None:
        """Does nothing: the memory of a model's workers is freed when they end."""

    def prefix_of(self, request: str) -> str:
        """The id of the prompt prefix of a recently ended request; empty if none is cached."""
        return next(filter(None, self._ask("prefix_of", request).returned.values()), "")

    def _sorted(self, ids: Sequence[str]) -> tuple[list[str], list[str], list[Block]]:
        """``ids`` of visual tokens, those of prefixes, and all blocks; unknown ones are left out."""
        blocks = self.blocks()
        kinds = {block.label.name: block.label.kind for block in blocks}
        known = list(dict.fromkeys(each for each in ids if each in kinds))
        visual = [each for each in known if kinds[each] == "visual"]
        return visual, [each for each in known if kinds[each] == "prefix"], blocks

    def _ask(self, question: str, *arguments: object) -> Answers:
        answers = ask_all(self._workers(), self._model, question, *arguments)
        if (error := answers.error()) is not None:
            raise error
        return answers
