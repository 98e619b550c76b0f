"""What is assumed about engines before anything is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Seconds for each token: of computing a prompt, and of loading it from each tier below the engine's memory.

    With these alone, workers are ranked by uncached tokens plus load. Only the ratios between them matter then.
    """

    prefill_s_per_token: float = 1 / 5_000
    ram_s_per_token: float = 1 / 200_000
    disk_s_per_token: float = 1 / 50_000
    peer_s_per_token: float = 1 / 50_000


PRIOR: Final = CostPrior()
