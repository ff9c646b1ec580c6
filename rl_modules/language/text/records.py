"""Records with the place they come from, for errors."""

from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]


class PlacedRecord(dict[str, Any]):
    """A record with its file and line, or dataset and row, for errors; copies are plain dicts."""

    def __init__(self, record: Record, place: str) -> None:
        super().__init__(record)
        self.place = place


def place_of(record: Mapping[str, Any], source: str) -> str:
    """A record's file and line, or dataset and row; where it has none, the name of its source."""
    return record.place if isinstance(record, PlacedRecord) else source
