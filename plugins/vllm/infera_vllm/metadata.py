"""What travels between the scheduler's and the workers' side of the connector, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

UNABLE = "rank_unable"
"""The failure of every load of a rank that cannot copy."""


@dataclass
class GroupLoad:
    """Blocks of one group to fill from pinned records: `slots[i]` (index slot) belongs to `block_ids[i]`."""

    position: int
    block_ids: list[int]
    slots: list[int]


@dataclass
class LoadOrder:
    """One request's load. `lost_block_ids` were promised and their records are gone: the load fails, but of a single
    group what comes before them is loaded all the same. Without an `instance` nothing is."""

    load_id: int
    request_id: str
    instance: str
    groups: list[GroupLoad]
    lost_block_ids: list[int]

    @property
    def block_ids(self) -> list[int]:
        """All blocks that were to be filled, over all groups."""
        return [block_id for group in self.groups for block_id in group.block_ids] + self.lost_block_ids


@dataclass
class SaveOrder:
    """Blocks of one group that are complete when this step is done. `keys` has 16 bytes a block."""

    save_id: int
    position: int
    block_ids: list[int]
    keys: bytes
    depths_grains: list[int]
    retention: str
    ttl_s: int | None


@dataclass
class InferaMetadata(KVConnectorMetadata):
    """One step's orders. The step writes to the blocks in `give_up`: saves of them must not go on."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    give_up: list[int] = field(default_factory=list)
    epoch: str = ""


@dataclass
class LoadReport:
    """How a load ended on some ranks. `damaged` are (group, position in its order) whose bytes were wrong."""

    ranks: int
    seconds: float
    size_bytes: int
    failure: str = ""
    damaged: set[tuple[int, int]] = field(default_factory=set)

    def merged(self, other: LoadReport) -> LoadReport:
        """Both ranks' reports as one."""
        return LoadReport(
            self.ranks + other.ranks,
            max(self.seconds, other.seconds),
            self.size_bytes + other.size_bytes,
            self.failure or other.failure,
            self.damaged | other.damaged,
        )


@dataclass
class InferaWorkerMetadata(KVConnectorWorkerMetadata):
    """Loads and saves that are over, and on how many ranks: only then may pins go and blocks be forgotten."""

    loads: dict[int, LoadReport] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add up what another rank reports of the same step."""
        assert isinstance(other, InferaWorkerMetadata)
        loads = dict(self.loads)
        for load_id, report in other.loads.items():
            loads[load_id] = loads[load_id].merged(report) if load_id in loads else report
        saves = dict(self.saves)
        for save_id, ranks in other.saves.items():
            saves[save_id] = saves.get(save_id, 0) + ranks
        return InferaWorkerMetadata(loads, saves)
