"""Rows of a long benchmark, stored on disk as they are measured, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmserve.bench.measures import Figures
from mmserve.errors import ConfigError


class Kept:
    """Rows of the benchmark ``name``, measured with ``settings``, including those of earlier runs in the file ``path``.

    A ``path`` of None = rows of this run only. ``keys`` are the columns that identify a row.

    The file has one JSON object a line; a truncated last line is measured again. Raises ``ConfigError`` if the file has
    other contents, or rows measured with other settings.
    """

    def __init__(self, path: Path | None, name: str, settings: Mapping[str, Any], keys: Sequence[str]) -> None:
        self._path, self._settings, self._keys = path, dict(settings), tuple(keys)
        whole = path.read_bytes() if path is not None and path.exists() else b""
        lines, cut = whole.split(b"\n")[:-1], whole.rpartition(b"\n")[2]
        try:
            found = [(line["settings"], line["row"]) for line in map(json.loads, lines)]
            if cut and not found:
                raise ValueError
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--resume: {path} holds no rows of `bench {name}`; name a new file") from error
        for theirs, _row in found:
            if other := [each for each in self._settings if theirs.get(each) != self._settings[each]]:
                raise ConfigError(
                    f"--resume: {path} has rows with another {other[0]} ({theirs.get(other[0])!r}, and now "
                    f"{self._settings[other[0]]!r}); name a new file, or give the same settings"
                )
        if path is not None and cut:
            with path.open("r+b") as file:
                file.truncate(len(whole) - len(cut))
        self._rows = {self._key(row): row for _settings, row in found}

    def row(self, of: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row whose key columns equal those of ``of``; None if there is none."""
        return self._rows.get(self._key(of))

    def add(self, row: dict[str, Any]) -> Figures:
        """Store a row; returns it."""
        self._rows[self._key(row)] = row
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"settings": self._settings, "row": row}) + "\n")
        return row

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self._keys)
