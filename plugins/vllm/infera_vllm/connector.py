"""The KV connector vLLM loads: thin, it only hands its calls to the half that runs in this process.

Loads are synchronous: they run before the step that needs them, at memory speed. Saves run after
the step that completed the blocks. When the cache cannot serve this engine, the connector says why
once and does nothing; it never stops the engine.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from infera_vllm.layout import UnsupportedLayoutError, block_bytes, check_engine, segments
from infera_vllm.metadata import InferaMetadata, InferaWorkerMetadata
from infera_vllm.namespace import namespace_of
from infera_vllm.plugin import installed_version
from infera_vllm.scheduler_side import SchedulerSide
from infera_vllm.wiring import ENGINE_FACTS
from infera_vllm.worker_side import WorkerSide
from kvd.client.client import KvdClient, RecordSpec
from kvd.client.copier import CpuCopier
from kvd.program import default_socket

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.infera")  # under vLLM's logger, so that it is shown


class InferaConnector(KVConnectorBase_V1):
    """Keeps KV blocks in the host's infera-kvd. See `scheduler_side` and `worker_side`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logging.getLogger("infera").parent = logging.getLogger("vllm")
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._client: KvdClient | None = None
        self._spec: RecordSpec | None = None
        try:
            attention = check_engine(vllm_config, kv_cache_config)
        except UnsupportedLayoutError as error:
            log.warning("infera-kvd is not used by this engine: %s", error)
            return
        parallel = vllm_config.parallel_config
        shard_bytes = (block_bytes(kv_cache_config, attention),) * int(parallel.tensor_parallel_size)
        namespace = namespace_of(vllm_config, kv_cache_config, attention, installed_version())
        model = str(vllm_config.model_config.served_model_name)
        self._spec = RecordSpec(namespace, 0, shard_bytes, model)
        self._block_size_tokens = int(attention.block_size)
        if role == KVConnectorRole.SCHEDULER:
            client = self._connect("scheduler")
            self._scheduler = SchedulerSide(client, self._spec, self._block_size_tokens, len(shard_bytes))
            self._tell_agent(namespace)

    def _connect(self, part: str, saves_shard: int | None = None) -> KvdClient:
        assert self._spec is not None
        socket = Path(os.environ.get("INFERA_KVD_SOCKET") or default_socket(os.environ))
        self._client = KvdClient(socket, f"vllm-{part}", [self._spec], saves_shard)
        self._client.start()
        return self._client

    def _tell_agent(self, namespace: bytes) -> None:
        """Leave the namespace where the agent looks for it; without an agent nobody does."""
        if path := os.environ.get(ENGINE_FACTS):
            fresh = Path(path + ".new")
            fresh.write_text(json.dumps({"namespace": namespace.hex()}))
            fresh.replace(path)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss, nothing more."""
        return False

    # ---- worker side ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where this rank's blocks are."""
        if self._spec is None:
            return
        from vllm.distributed import get_tensor_model_parallel_rank

        config = self._kv_cache_config
        try:
            parts = segments(kv_caches, config.kv_cache_groups[0].layer_names, config.num_blocks)
            copier = CpuCopier(parts)
            shard = int(get_tensor_model_parallel_rank())
            expected_bytes = self._spec.shard_bytes[shard]
            if copier.object_bytes != expected_bytes:
                raise UnsupportedLayoutError(
                    f"a block has {copier.object_bytes} bytes here, the scheduler expects {expected_bytes}"
                )
        except UnsupportedLayoutError as error:
            log.warning("infera-kvd is not used by this worker: %s", error)
            return
        self._worker = WorkerSide(self._connect(f"worker-{shard}", shard), self._spec, shard, copier)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill this step's blocks."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, InferaMetadata)
        if self._worker is not None:
            self._worker.load(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Save the blocks this step completed."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, InferaMetadata)
        if self._worker is not None:
            self._worker.save(metadata.saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks vLLM must compute again."""
        return self._worker.take_failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> InferaWorkerMetadata | None:
        """Report loads that are over."""
        return self._worker.report() if self._worker is not None else None

    # ---- scheduler side ----

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded, synchronously."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Pin and order the load."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's orders."""
        return self._scheduler.orders(scheduler_output) if self._scheduler is not None else InferaMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            assert report is None or isinstance(report, InferaWorkerMetadata)
            self._scheduler.step_done(connector_output.invalid_block_ids, report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may be freed at once."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """`reset_prefix_cache?reset_external=true`: other engines' blocks are not ours to drop."""
        log.warning("reset_external leaves infera-kvd as it is: its blocks are shared; see infera-kvd drop")
        return None

    def shutdown(self) -> None:
        """Let go of pins and leave."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._client is not None:
            self._client.close()
