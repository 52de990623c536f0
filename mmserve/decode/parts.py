"""Objects that prefill and decode of a masked diffusion or next-token model share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.decode.extensions.base import Extension
from mmserve.decode.graphs import Graphs
from mmserve.decode.passes import Passes
from mmserve.decode.policies import Offered
from mmserve.decode.propose import Proposer
from mmserve.decode.runner import Runner
from mmserve.decode.scores import scores_for
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.models.adapters import Adapters
from mmserve.models.base import LoadedModel


@dataclass(frozen=True)
class Parts:
    """One model over one K/V store, with its runner and policies; holds no state of any request.

    ``extensions`` are called in this order.
    """

    model: LoadedModel
    store: KVStore
    extensions: tuple[Extension, ...]
    offered: Offered
    passes: Passes
    runner: Runner
    proposer: Proposer
    adapters: Adapters

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        store: KVStore,
        extensions: Sequence[Extension] = (),
        *,
        chunk: int = 0,
        offered: Offered | None = None,
        sparse: Sparse | None = None,
        graphs: Graphs | None = None,
        runs_ahead: bool = True,
        adapters: Adapters | None = None,
    ) -> Parts:
        """The parts for ``model`` over ``store``.

        ``chunk``: maximum prompt rows of a prefill pass, if attention allows chunked prefill; 0 = unlimited.
        ``offered``: inputs of policies; None = those that the model offers. ``sparse``, ``graphs``: see ``Runner``.
        ``runs_ahead``: whether several tokens that a constraint forces may run in one pass.
        """
        passes = Passes(model, store.page_size, chunk, runs_ahead)
        adapters = adapters or Adapters(model)
        runner = Runner(model, store, sparse=sparse, graphs=graphs, stacks=adapters.stacks)
        proposer = Proposer(model.spec, scores_for(model, store))
        return cls(model, store, tuple(extensions), offered or Offered.by(model), passes, runner, proposer, adapters)
