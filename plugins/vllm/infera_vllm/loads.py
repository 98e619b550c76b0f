"""Loads under way, as the scheduler's half keeps them: their pins, and who has not reported yet.

Pins of a load are taken together or not at all, and given back when every rank has reported it over, whatever became
of its request: a rank may still be copying from the records.
"""

from __future__ import annotations

from dataclasses import dataclass

from infera_core.keys import KEY_BYTES

from infera_vllm.metadata import GroupLoad, LoadOrder, LoadReport
from infera_vllm.plan import GroupPlan
from kvd.client.client import KvdClient, PinnedRun


@dataclass
class GroupTarget:
    """The blocks of one group that a load is to fill, and the keys of their records, 16 bytes a block."""

    group: GroupPlan
    block_ids: list[int]
    keys: bytes


@dataclass
class _Load:
    request_id: str
    targets: list[GroupTarget]
    runs: list[PinnedRun]
    report: LoadReport | None = None


@dataclass(frozen=True)
class EndedLoad:
    """A load that every rank has reported."""

    request_id: str
    report: LoadReport


class PendingLoads:
    """All of them. Belongs to the scheduler's thread."""

    def __init__(self, client: KvdClient, rank_count: int) -> None:
        self._client = client
        self._rank_count = rank_count
        self._loads: dict[int, _Load] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, request_id: str, targets: list[GroupTarget]) -> LoadOrder:
        """Pin the records and make the order. Where some are gone by now it is one that fails."""
        self._made += 1
        targets = [target for target in targets if target.block_ids]
        runs = self._pin(targets)
        self._loads[self._made] = _Load(request_id, targets, runs)
        loads = [
            GroupLoad(target.group.position, target.block_ids[: len(run.slots)], run.slots)
            for target, run in zip(targets, runs, strict=bool(runs))
        ]
        pinned = sum(len(load.block_ids) for load in loads)
        lost = [block_id for target in targets for block_id in target.block_ids][pinned:]
        return LoadOrder(self._made, request_id, runs[0].arena.instance if runs else "", loads, lost)

    def _pin(self, targets: list[GroupTarget]) -> list[PinnedRun]:
        """Runs for all targets, whole ones unless there is a single target; or none."""
        runs: list[PinnedRun] = []
        for target in targets:
            run = self._client.pin_run(target.group.spec, target.keys)
            if run is not None:
                runs.append(run)
            is_whole = run is not None and len(run.slots) == len(target.block_ids) and run.arena is runs[0].arena
            if not is_whole and len(targets) > 1:
                for taken in runs:
                    taken.release()
                return []
        return runs

    def reported(self, load_id: int, report: LoadReport) -> EndedLoad | None:
        """Take in what some ranks say; the load when that was the last word on it."""
        load = self._loads.get(load_id)
        if load is None:
            return None
        load.report = report if load.report is None else load.report.merged(report)
        if load.report.ranks < self._rank_count:
            return None
        del self._loads[load_id]
        for run in load.runs:
            run.release()
        self._tell_damage(load, load.report)
        return EndedLoad(load.request_id, load.report)

    def _tell_damage(self, load: _Load, report: LoadReport) -> None:
        """Have the daemon look at what was wrong, so that nobody runs into it again."""
        for target in load.targets:
            positions = sorted(at for position, at in report.damaged if position == target.group.position)
            if positions:
                keys = b"".join(target.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in positions)
                self._client.report_damaged(target.group.spec, keys)

    def release_all(self) -> None:
        """Give all pins back: the engine is stopping and no worker copies any more."""
        for load in self._loads.values():
            for run in load.runs:
                run.release()
        self._loads.clear()
