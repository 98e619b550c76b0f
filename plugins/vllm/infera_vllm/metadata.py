"""What travels between the scheduler's and the workers' side of the connector, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class LoadOrder:
    """Blocks to fill from pinned records.

    `slots[i]` (index slot) belongs to `block_ids[i]`. `lost_block_ids` were promised but their
    records are gone: they must be reported as failed.
    """

    load_id: int
    request_id: str
    instance: str
    block_ids: list[int]
    slots: list[int]
    lost_block_ids: list[int]


@dataclass
class SaveOrder:
    """Blocks that are complete when this step is done. `keys` has 16 bytes a block."""

    request_id: str
    block_ids: list[int]
    keys: bytes
    depths_grains: list[int]


@dataclass
class InferaMetadata(KVConnectorMetadata):
    """One step's orders."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)


@dataclass
class InferaWorkerMetadata(KVConnectorWorkerMetadata):
    """Which loads are over, and on how many ranks: only then may their pins go.

    `damaged` names, for a load, the positions whose bytes did not match their checksum.
    """

    loads_done: dict[int, int]
    failed_blocks: int = 0
    damaged: dict[int, set[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add up what another rank reports of the same step."""
        assert isinstance(other, InferaWorkerMetadata)
        ranks = dict(self.loads_done)
        for load_id, count in other.loads_done.items():
            ranks[load_id] = ranks.get(load_id, 0) + count
        damaged = dict(self.damaged)
        for load_id, positions in other.damaged.items():
            damaged[load_id] = damaged.get(load_id, set()) | positions
        return InferaWorkerMetadata(ranks, self.failed_blocks + other.failed_blocks, damaged)
