"""A worker's half: what one rank does with the orders of a step, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping

from infera_vllm.faults import LoadFaults
from infera_vllm.metadata import UNABLE, InferaMetadata, InferaWorkerMetadata, LoadOrder, LoadReport
from infera_vllm.plan import EnginePlan
from infera_vllm.stats import InferaStats
from infera_vllm.worker_loads import DEADLINE_S, EndedOrder, WorkerLoads
from infera_vllm.worker_saves import WorkerSaves
from kvd.client.client import KvdClient
from kvd.client.copier import BlockCopier


class WorkerSide:
    """One rank's half. Called from the worker's thread only; copies run in two threads of their own.

    A rank that cannot copy (its `copiers` are None) reports every load as failed, so that no request waits for it.
    """

    def __init__(
        self, client: KvdClient, plan: EnginePlan, shard: int, *, is_writer: bool,
        copiers: Mapping[int, BlockCopier] | None, faults: LoadFaults, deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self._client = client
        self._first_plan = self._plan = plan
        self._is_writer = is_writer
        self._has_groups = len(plan.groups) > 1
        self._loads = WorkerLoads(client, copiers, shard, faults, deadline_s) if copiers is not None else None
        self._saves = WorkerSaves(client, copiers, shard) if copiers is not None and is_writer else None
        self._epoch = ""
        self._ended: list[EndedOrder] = []
        self._ended_saves: list[int] = []
        self._report = InferaWorkerMetadata()
        self._failed_block_ids: set[int] = set()
        self.stats = InferaStats()

    def begin_step(self, orders: InferaMetadata) -> None:
        """Before the step writes to anything."""
        if orders.epoch != self._epoch:
            self._epoch = orders.epoch
            self._plan = self._first_plan.in_epoch(orders.epoch)
            self._client.set_specs(self._plan.specs)
        if self._saves is not None:
            self._saves.give_up(orders.give_up)

    def load(self, orders: list[LoadOrder]) -> None:
        """Begin loads; they go on in the background."""
        for order in orders:
            if self._loads is not None:
                self._loads.submit(order)
            else:
                self._ended.append(EndedOrder(order, LoadReport(1, 0.0, 0, UNABLE)))

    def save(self, orders: InferaMetadata) -> None:
        """Begin to save what the step completed."""
        for order in orders.saves:
            if self._saves is not None:
                self._saves.submit(order, self._plan.groups[order.position].spec)
            else:
                self._ended_saves.append(order.save_id)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over on this rank, and those among them whose loads failed.

        In a model with one cache group a failure is told by its blocks instead: see `take_failed_blocks`.
        """
        over, failed = set(), set()
        ended, self._ended = self._ended, []
        for load in ended + (self._loads.take_ended() if self._loads is not None else []):
            over.add(load.order.request_id)
            self._report.loads[load.order.load_id] = load.report
            if load.report.failure:
                self.stats.add("damaged_blocks", len(load.report.damaged))
                if self._has_groups:
                    failed.add(load.order.request_id)
                else:
                    self._failed_block_ids |= set(load.order.block_ids[load.good_blocks :])
            else:
                self.stats.add("loaded_blocks", len(load.order.block_ids))
                self.stats.add("loaded_bytes", load.report.size_bytes)
        return over, failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks vLLM must compute again, once."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def report(self) -> InferaWorkerMetadata | None:
        """What the scheduler's half must know of this step, once."""
        saves = self._ended_saves + (self._saves.take_ended() if self._saves is not None else [])
        self._ended_saves = []
        report, self._report = self._report, InferaWorkerMetadata()
        report.saves = dict.fromkeys(saves, 1)
        return report if report.loads or report.saves else None

    def take_stats(self) -> InferaStats | None:
        """What was counted since the last call, by the threads too."""
        saved = self._saves.take_stats() if self._saves is not None else None
        if saved is not None:
            for name, amount in saved.data.items():
                self.stats.add(name, amount)
        return self.stats.take()

    def close(self) -> None:
        """End the threads; nothing is copied any more."""
        if self._loads is not None:
            self._loads.close()
        if self._saves is not None:
            self._saves.close()
