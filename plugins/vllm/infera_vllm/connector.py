"""The KV connector vLLM loads: thin, it only hands its calls to the half that runs in this process.

When the cache cannot serve this engine, the connector says why once and does nothing; it never stops the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from infera.hooks.facts import add_facts
from infera.hooks.switches import REQUIRE_NATIVE, is_on
from infera_vllm.faults import LoadFaults
from infera_vllm.layout import group_copiers
from infera_vllm.metadata import InferaMetadata, InferaWorkerMetadata
from infera_vllm.plan import EnginePlan, UnsupportedLayoutError, make_plan
from infera_vllm.plugin import installed_version
from infera_vllm.scheduler_side import SchedulerSide
from infera_vllm.stats import InferaPromMetrics, InferaStats
from infera_vllm.transfer_config import MODULE, NAME, inexact_connectors
from infera_vllm.worker_side import WorkerSide
from infera_vllm.worth import LoadWorth
from kvd.client.client import KvdClient
from kvd.program import default_socket

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.infera")  # under vLLM's logger, so that it is shown


class InferaConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks in the host's infera-kvd. See `scheduler_side` and `worker_side`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logging.getLogger("infera").parent = logging.getLogger("vllm")
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._client: KvdClient | None = None
        self._plan: EnginePlan | None = None
        self._stats = InferaStats()
        self._step_began_s = 0.0
        self._step_tokens = 0
        try:
            self._plan = make_plan(vllm_config, kv_cache_config, installed_version())
        except UnsupportedLayoutError as error:
            _give_up("engine", error)
            return
        if role == KVConnectorRole.SCHEDULER:
            self._begin_scheduler(vllm_config, self._plan)

    def _begin_scheduler(self, vllm_config: VllmConfig, plan: EnginePlan) -> None:
        others = inexact_connectors(vllm_config.kv_transfer_config)
        if others:
            log.warning("blocks that %s brings are not kept in infera-kvd: it may not know adapters or salts", others)
        self._worth = LoadWorth.from_environment()
        self._client = _connect(plan, "scheduler")
        self._scheduler = SchedulerSide(self._client, plan, self._stats, self._worth, other_is_inexact=bool(others))
        # For the agent, which tells the fleet, and for `infera doctor`.
        add_facts(os.environ, {"namespace": plan.namespace.hex(), "layout": plan.described()})

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss, nothing more."""
        return False

    # ---- worker side ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where this rank's blocks are."""
        if self._plan is None:
            return
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        tensor_rank = int(get_tensor_model_parallel_rank())
        shard = self._plan.shard_of(int(get_pp_group().rank_in_group), tensor_rank)
        is_writer = self._plan.is_writer(tensor_rank)
        try:
            copiers = group_copiers(self._plan.groups, shard, kv_caches, self._kv_cache_config.num_blocks)
        except UnsupportedLayoutError as error:
            _give_up("worker", error)
            copiers = None
        self._client = _connect(self._plan, f"worker-{tensor_rank}", shard if is_writer and copiers else None)
        self._worker = WorkerSide(
            self._client, self._plan, shard, is_writer=is_writer, copiers=copiers, faults=LoadFaults.from_environment()
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the step writes to anything: stop saving what it is going to write to."""
        assert isinstance(kv_connector_metadata, InferaMetadata)
        self._step_began_s = time.perf_counter()
        if self._worker is not None:
            self._worker.begin_step(kv_connector_metadata)
            self._count_worker(self._step_began_s)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads, in the background."""
        began_s = time.perf_counter()
        if self._worker is not None:
            self._worker.load(self._orders().loads)
            self._count_worker(began_s)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Begin to save the blocks this step completed, in the background."""
        began_s = time.perf_counter()
        if self._worker is not None:
            self._worker.save(self._orders())
            self._count_worker(began_s)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads are over, and which of them failed."""
        began_s = time.perf_counter()
        if self._worker is None:
            return KVConnectorTransferResults()
        over, failed = self._worker.take_loaded()
        self._count_worker(began_s)
        return KVConnectorTransferResults(finished_recving=over, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks vLLM must compute again."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> InferaWorkerMetadata | None:
        """Report loads and saves that are over."""
        began_s = time.perf_counter()
        if self._worker is None:
            return None
        report = self._worker.report()
        self._count_worker(began_s)
        stats = self._worker.stats
        stats.add("worker_steps")
        stats.add("worker_step_seconds", time.perf_counter() - self._step_began_s)
        return report

    def _orders(self) -> InferaMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, InferaMetadata)
        return metadata

    def _count_worker(self, began_s: float) -> None:
        assert self._worker is not None
        self._worker.stats.add("worker_seconds", time.perf_counter() - began_s)

    # ---- scheduler side ----

    def on_new_request(self, request: Request) -> None:
        """Begin to read what has to be read for it."""
        if self._scheduler is not None:
            self._scheduler.announced(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, in the background."""
        if self._scheduler is None:
            return 0, False
        began_s = time.perf_counter()
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        self._stats.add("scheduler_seconds", time.perf_counter() - began_s)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Pin and order the load."""
        if self._scheduler is not None:
            began_s = time.perf_counter()
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
            self._stats.add("scheduler_seconds", time.perf_counter() - began_s)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's orders."""
        if self._scheduler is None:
            return InferaMetadata()
        began_s = time.perf_counter()
        orders = self._scheduler.orders(scheduler_output)
        self._step_tokens = scheduler_output.total_num_scheduled_tokens
        self._step_began_s = time.perf_counter()
        self._stats.add("scheduler_seconds", self._step_began_s - began_s)
        self._stats.add("scheduler_steps")
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what the workers report, and how long the step took."""
        if self._scheduler is None:
            return
        began_s = time.perf_counter()
        self._worth.computed(self._step_tokens, began_s - self._step_began_s)
        self._step_tokens = 0
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, InferaWorkerMetadata)
        self._scheduler.step_done(report)
        self._stats.add("scheduler_seconds", time.perf_counter() - began_s)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may be freed at once."""
        return False, self._scheduler.finished(request) if self._scheduler is not None else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for models with several cache groups."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """`reset_prefix_cache?reset_external=true`: what was kept so far is not used any more by this engine. Other
        engines' blocks are not ours to drop."""
        if self._scheduler is not None:
            self._scheduler.begin_epoch()
            log.warning("reset_external: blocks are kept under a new name from now on; infera-kvd drop frees space")
        return True

    # ---- statistics ----

    def get_kv_connector_stats(self) -> InferaStats | None:
        """What was counted since the last call."""
        return self._worker.take_stats() if self._worker is not None else self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> InferaStats:
        """Statistics that came over a wire."""
        return InferaStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> InferaPromMetrics:
        """Their counters at /metrics."""
        return InferaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the copies, let go of pins and leave."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._client is not None:
            self._client.close()


def _give_up(what: str, reason: UnsupportedLayoutError) -> None:
    """Say why the cache is not used. Raises it where the engine must not run without."""
    add_facts(os.environ, {"refused": str(reason)})
    if is_on(os.environ, REQUIRE_NATIVE):
        raise reason
    log.warning("infera-kvd is not used by this %s: %s", what, reason)


def _connect(plan: EnginePlan, part: str, saves_shard: int | None = None) -> KvdClient:
    socket = Path(os.environ.get("INFERA_KVD_SOCKET") or default_socket(os.environ))
    client = KvdClient(socket, f"vllm-{part}", plan.specs, saves_shard)
    client.start()
    return client


# MultiConnector finds its children's classes by name alone when it puts their statistics together.
with contextlib.suppress(ValueError):  # a second copy of this module is the same to it
    KVConnectorFactory.register_connector(NAME, MODULE, NAME)
