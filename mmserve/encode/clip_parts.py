"""Parts of a clip shared between encoders, as tensors: their names, serialization, and joining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmserve.encode.clip_encoder import ClipPart
from mmserve.models.picture import Tile
from mmserve.prune.base import GridView


def name_of(key: bytes, part: int) -> str:
    """The name of part ``part`` of the clip with this key; the whole clip's name is the hex of its key."""
    return f"{key.hex()}/{part}"


def whole_of(name: str) -> tuple[str, int] | None:
    """The name of the whole clip, and the part number, from a result of ``name_of``; None for other names."""
    key, slash, part = name.partition("/")
    return (key, int(part)) if slash else None


def to_tensors(part: ClipPart, of: int) -> dict[str, Tensor]:
    """``part``, one of ``of`` parts, as tensors."""
    tiles, planned = part.tiles, part.planned or ()
    return {
        "of": torch.tensor(of),
        "tokens": torch.cat([tile.tokens for tile in tiles]) if tiles else torch.empty(0, 0),
        "patches": torch.cat([tile.patches for tile in tiles]) if tiles else torch.empty(0, dtype=torch.int64),
        "sizes": torch.tensor(
            [[len(tile.tokens), len(tile.patches), tile.view.rows, tile.view.columns] for tile in tiles]
        ).reshape(-1, 4),
        "seconds": torch.tensor(part.seconds, dtype=torch.float64),
        "details": torch.tensor(part.details, dtype=torch.bool),
        "length": torch.tensor(part.length, dtype=torch.float64),
        "planned": torch.tensor(planned, dtype=torch.float64),
    }


def joined_parts(parts: Mapping[int, Mapping[str, Tensor]], device: torch.device) -> Sequence[ClipPart] | None:
    """The parts of a clip, from tensors by part number, in order; None if some are missing or inconsistent."""
    of = {int(part["of"]) for part in parts.values()}
    if len(of) != 1 or sorted(parts) != list(range(of.pop())):
        return None
    found = [_part(parts[number], device) for number in sorted(parts)]
    seconds = tuple(at for part in found for at in part.seconds)
    one = len({(part.length, part.planned) for part in found}) == 1
    # A damaged or unusual file may have other frames than planned, and then its batches differ.
    return found if one and seconds and seconds == found[0].planned else None


def _part(tensors: Mapping[str, Tensor], device: torch.device) -> ClipPart:
    sizes = tensors["sizes"].tolist()
    tokens = tensors["tokens"].to(device).split([size[0] for size in sizes]) if sizes else ()
    patches = tensors["patches"].split([size[1] for size in sizes]) if sizes else ()
    tiles = [
        Tile(own, of_own, GridView(rows, columns, {}))
        for own, of_own, (_tokens, _patches, rows, columns) in zip(tokens, patches, sizes, strict=True)
    ]
    planned = tuple(tensors["planned"].tolist())
    seconds, details = tuple(tensors["seconds"].tolist()), tuple(tensors["details"].tolist())
    return ClipPart(tuple(tiles), seconds, details, float(tensors["length"]), planned)
