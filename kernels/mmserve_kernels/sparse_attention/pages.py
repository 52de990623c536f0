"""Which pages a decoding request looks at, by the smallest and the largest of their keys (Quest, arXiv 2406.10774).

Shapes in names: R rows of a request, L its positions, C its pages, H query heads, G key/value heads, K head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def page_bounds(k_LGK: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest keys ``[C, G, K]`` of each page of a request, channel by channel."""
    missing = -len(k_LGK) % page
    padded = torch.cat([k_LGK, k_LGK[-1:].expand(missing, -1, -1)]) if missing else k_LGK
    pages = padded.unflatten(0, (-1, page))
    return pages.amin(1), pages.amax(1)


def best_pages(q_RHK: Tensor, low_CGK: Tensor, high_CGK: Tensor, count: int) -> Tensor:
    """Boolean ``[G, 1, C]``: the ``count`` pages that the rows may attend to most, of each key/value head.

    No key of a page has a larger product with a query than the bounds allow: channel by channel the larger of both
    products. What these make of attention over pages is summed over the rows and the query heads that share the pages;
    with one row a head the order is Quest's. The last page, which holds the newest position, is always there.
    """
    groups = low_CGK.shape[1]
    q_GUK = q_RHK.float().unflatten(1, (groups, -1)).permute(1, 0, 2, 3).flatten(1, 2)
    up, down = q_GUK.clamp_min(0), q_GUK.clamp_max(0)
    most = up @ high_CGK.float().permute(1, 2, 0) + down @ low_CGK.float().permute(1, 2, 0)
    mass = (most * q_RHK.shape[-1] ** -0.5).softmax(-1).sum(1)
    mass[:, -1] = torch.inf
    at = mass.topk(min(count, mass.shape[1]), -1).indices
    return F.one_hot(at, mass.shape[1]).any(1)[:, None]
