"""What an engine keeps for later requests, to be listed and managed: prompts' beginnings, and visual tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.core.cached import Block
from mmserve.prefixes import Prefixes
from mmserve.tiers.memory import TensorCache


class Kept:
    """Of one engine's ``model``; visual tokens are in ``tokens``, which engines share. For any thread, and slow."""

    def __init__(self, model: str, prefixes: Prefixes, tokens: TensorCache) -> None:
        self._model, self._prefixes, self._tokens = model, prefixes, tokens

    def blocks(self) -> list[Block]:
        """All of it, tier by tier."""
        return self._prefixes.blocks() + [b for _key, b in self._tokens.blocks() if b.label.model == self._model]

    def pin(self, ids: Sequence[str], pinned: bool) -> int:
        """Keep entries whatever else comes, or no longer; how many of their blocks are there.

        Raises ``FailedPrecondition`` where pages are kept nowhere but in the pool, ``ResourceExhausted`` where too
        much is pinned.
        """
        visual, prefixes = self._sorted(ids)
        found = self._tokens.pin([bytes.fromhex(each) for each in visual], pinned) if visual else 0
        return found + (self._prefixes.pin(prefixes, pinned) if prefixes else 0)

    def drop(self, ids: Sequence[str]) -> int:
        """Forget entries, but for pages that others begin with; how many blocks that were."""
        visual, prefixes = self._sorted(ids)
        found = self._tokens.drop([bytes.fromhex(each) for each in visual]) if visual else 0
        return found + (self._prefixes.drop(prefixes) if prefixes else 0)

    def forget(self, visual: Sequence[str], pages: Sequence[str]) -> int:
        """Forget visual tokens and pages by the names of their blocks, whatever else begins with them; how many of them
        were given."""
        self._tokens.drop([bytes.fromhex(each) for each in visual])
        self._prefixes.forget(pages)
        return len(visual) + len(pages)

    def prefix_of(self, request: str) -> str:
        """The id of the beginning of the prompt of a request that ended a moment ago; empty where none is kept."""
        return self._prefixes.latest.get(request, "")

    def _sorted(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those of visual tokens, and those of prefixes; unknown ones are left out."""
        kinds = {block.label.name: block.label.kind for block in self.blocks()}
        known = [each for each in ids if each in kinds]
        return [i for i in known if kinds[i] == "visual"], [i for i in known if kinds[i] == "prefix"]
