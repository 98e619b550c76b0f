"""Faults put into loads on purpose, so that a test can see the engine recover.

INFERA_TEST_LOAD_FAULTS="fail@3,delay:6@5,corrupt@7": the third load of this worker fails, the fifth takes six seconds
longer, a byte of the seventh's first record is taken for wrong. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "INFERA_TEST_LOAD_FAULTS"
_FAULT: Final = re.compile(r"(fail|corrupt|delay:(?P<delay_s>\d+(?:\.\d+)?))@(?P<load>[1-9]\d*)")


@dataclass(frozen=True)
class Fault:
    """What is to happen to one load."""

    fails: bool = False
    corrupts: bool = False
    delay_s: float = 0.0


NONE: Final = Fault()


class LoadFaults:
    """The faults of this worker's loads, counted from 1."""

    def __init__(self, faults: Mapping[int, Fault]) -> None:
        self._faults = dict(faults)
        self._loads = 0

    @classmethod
    def from_environment(cls) -> LoadFaults:
        """Raises ValueError for a variable that is not understood."""
        faults = {}
        for word in filter(None, os.environ.get(VARIABLE, "").split(",")):
            match = _FAULT.fullmatch(word.strip())
            if match is None:
                raise ValueError(f"{VARIABLE}: {word!r} is none of fail@N, corrupt@N, delay:SECONDS@N")
            kind = match[1].partition(":")[0]
            faults[int(match["load"])] = Fault(kind == "fail", kind == "corrupt", float(match["delay_s"] or 0))
        return cls(faults)

    def next(self) -> Fault:
        """What happens to the load that begins now."""
        self._loads += 1
        return self._faults.get(self._loads, NONE)
