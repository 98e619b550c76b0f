"""All places that could serve one request, with the numbers a policy decides by."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from infera.router.place import Option, Place
from infera.router.scoring import ROW_COLUMNS, CostTable, Row, Weights, score


class Field:
    """Places and their rows, in the same order; there is always at least one."""

    __slots__ = ("_scored", "options", "rows")

    def __init__(self, options: Sequence[Option], rows: array[float]) -> None:
        self.options = options
        self.rows = rows
        self._scored: dict[Weights, CostTable] = {}

    def __len__(self) -> int:
        return len(self.options)

    def place(self, index: int) -> Place:
        """Where candidate ``index`` is."""
        return self.options[index].place

    def row(self, index: int) -> Row:
        """What is known of candidate ``index``."""
        start = index * ROW_COLUMNS
        return Row(*self.rows[start : start + ROW_COLUMNS])

    def costs(self, weights: Weights) -> CostTable:
        """The predicted costs of all candidates."""
        found = self._scored.get(weights)
        if found is None:
            found = self._scored[weights] = score(weights, self.rows)
        return found

    def only(self, indexes: Sequence[int]) -> Field:
        """A field of some of the candidates."""
        rows = array("d")
        for index in indexes:
            rows.extend(self.rows[index * ROW_COLUMNS : (index + 1) * ROW_COLUMNS])
        return Field([self.options[index] for index in indexes], rows)
