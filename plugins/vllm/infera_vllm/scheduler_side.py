"""The scheduler's half: what is cached, what to load, what to save. Nothing here waits.

Look-ups read the shared index in this process. A load's pins are taken when vLLM has allocated its
blocks and given back when every rank has reported the load done, whatever became of the request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from infera_core.keys import KEY_BYTES

from infera_vllm.metadata import InferaMetadata, InferaWorkerMetadata, LoadOrder, SaveOrder
from infera_vllm.request_keys import RequestKeys
from kvd.client.client import KvdClient, PinnedRun, RecordSpec
from kvd.client.lookups import RepeatedLookups

log = logging.getLogger("infera.vllm")


@dataclass
class RequestState:
    """What is known of one request: its keys, its block table, and how far it has been saved."""

    request: Any
    keys: RequestKeys
    block_ids: list[int]
    next_save_block: int = 0
    match_start_block: int = 0
    question: tuple[str, int, int] = ("", 0, 0)
    question_keys: bytes = b""


@dataclass
class PendingLoad:
    """A load whose pins are held. `ranks_missing` counts down to the last report."""

    run: PinnedRun
    keys: bytes
    ranks_missing: int
    damaged: set[int] = field(default_factory=set)


class SchedulerSide:
    """One engine's scheduler half. Called from the scheduler's thread only."""

    def __init__(self, client: KvdClient, spec: RecordSpec, block_size_tokens: int, ranks: int) -> None:
        self._client = client
        self._lookups = RepeatedLookups(client)
        self._spec = spec
        self._block_size = block_size_tokens
        self._ranks = ranks
        self._states: dict[str, RequestState] = {}
        self._pending_orders: list[LoadOrder] = []
        self._loads: dict[int, PendingLoad] = {}
        self._next_load_id = 1
        self.failed_blocks_total = 0

    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """Tokens beyond `computed_tokens` that can be loaded: whole blocks, leaving one to compute."""
        state = self._state_of(request)
        if state is None:
            return 0
        usable_blocks = (request.num_tokens - 1) // self._block_size
        start = computed_tokens // self._block_size
        known = min(state.keys.extend(request.all_token_ids), usable_blocks)
        if computed_tokens % self._block_size or start >= known:
            return 0
        state.match_start_block = start
        # vLLM asks for every waiting request at every step: the same question has the same answer until
        # a record is stored or removed.
        question = (request.request_id, start, known)
        if question != state.question:
            self._lookups.forget(state.question)
            state.question = question
            state.question_keys = state.keys.blocks(start, known)
        return self._lookups.probe_run(question, self._spec, state.question_keys) * self._block_size

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """Blocks are there: pin what was promised and order the load."""
        state = self._states.get(request.request_id)
        if state is None or external_tokens == 0:
            return
        start = state.match_start_block
        stop = start + external_tokens // self._block_size
        targets = block_ids[start:stop]
        keys = state.keys.blocks(start, stop)
        run = self._client.pin_run(self._spec, keys)
        slots = run.slots if run else []
        load_id, self._next_load_id = self._next_load_id, self._next_load_id + 1
        if run:
            self._loads[load_id] = PendingLoad(run, keys, self._ranks)
        self._pending_orders.append(
            LoadOrder(
                load_id,
                request.request_id,
                run.arena.instance if run else "",
                targets[: len(slots)],
                slots,
                targets[len(slots) :],
            )
        )

    def orders(self, scheduler_output: Any) -> InferaMetadata:
        """Everything the workers have to do in this step."""
        loads, self._pending_orders = self._pending_orders, []
        scheduled = scheduler_output.num_scheduled_tokens
        saves: list[SaveOrder] = []
        for new in scheduler_output.scheduled_new_reqs:
            if state := self._states.get(new.req_id):
                state.block_ids = list(new.block_ids[0])
                self._add_save(saves, state, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for position, request_id in enumerate(cached.req_ids):
            if state := self._states.get(request_id):
                self._update_blocks(state, cached.new_block_ids[position], request_id in cached.resumed_req_ids)
                self._add_save(saves, state, cached.num_computed_tokens[position] + scheduled[request_id])
        return InferaMetadata(loads, saves)

    def _update_blocks(self, state: RequestState, new_block_ids: Any, is_resumed: bool) -> None:
        if is_resumed:  # after a preemption the whole table comes anew
            state.block_ids = []
            state.next_save_block = 0
        if new_block_ids is not None:
            state.block_ids.extend(new_block_ids[0])

    def _add_save(self, saves: list[SaveOrder], state: RequestState, computed_tokens: int) -> None:
        """Order what this step completes. Tokens past `num_tokens` are unverified drafts."""
        tokens = min(computed_tokens, state.request.num_tokens)
        start, stop = state.next_save_block, min(tokens // self._block_size, len(state.block_ids))
        session = self._client.session()
        if stop <= start or session is None:
            return
        state.keys.extend(state.request.all_token_ids)
        state.next_save_block = stop
        present = session.arena.present(
            session.class_ids[self._spec], self._spec.full_mask, state.keys.blocks(start, stop)
        )
        missing = [start + i for i, is_present in enumerate(present) if not is_present]
        if missing:
            saves.append(
                SaveOrder(
                    state.request.request_id,
                    [state.block_ids[block] for block in missing],
                    b"".join(state.keys.blocks(block, block + 1) for block in missing),
                    [state.keys.depth_grains(block) for block in missing],
                )
            )

    def step_done(self, invalid_block_ids: set[int], worker: InferaWorkerMetadata | None) -> None:
        """Take in the workers' reports of a step."""
        if worker is not None:
            self.failed_blocks_total += worker.failed_blocks
            for load_id, ranks in worker.loads_done.items():
                self._load_reported(load_id, ranks, worker.damaged.get(load_id, set()))
        if invalid_block_ids:
            # The step's saves were held back, and vLLM computes some blocks again: look at all anew.
            for state in self._states.values():
                state.next_save_block = 0

    def _load_reported(self, load_id: int, ranks: int, damaged: set[int]) -> None:
        pending = self._loads.get(load_id)
        if pending is None:
            return
        pending.ranks_missing -= ranks
        pending.damaged |= damaged
        if pending.ranks_missing > 0:
            return
        pending.run.release()
        del self._loads[load_id]
        if pending.damaged:
            positions = sorted(pending.damaged)
            keys = b"".join(pending.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in positions)
            self._client.report_damaged(self._spec, keys)

    def finished(self, request_id: str) -> None:
        """Forget a request. Its loads in flight keep their pins until reported."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._lookups.forget(state.question)

    def close(self) -> None:
        """Give all pins back: the engine is stopping and no worker copies any more."""
        for pending in self._loads.values():
            pending.run.release()
        self._loads.clear()
        self._states.clear()

    def _state_of(self, request: Any) -> RequestState | None:
        state = self._states.get(request.request_id)
        if state is None and is_cacheable(request):
            state = RequestState(request, RequestKeys(self._block_size, request.cache_salt), [])
            self._states[request.request_id] = state
        return state


def is_cacheable(request: Any) -> bool:
    """Whether token ids and salt are all that shapes this request's blocks."""
    return (
        request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and request.pooling_params is None
        and request.prompt_token_ids is not None
    )
