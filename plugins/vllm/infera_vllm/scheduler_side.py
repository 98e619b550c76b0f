"""The scheduler's half: what is cached, what to load, what to save. Nothing here waits.

Look-ups read the shared index in this process. Loads are asynchronous: vLLM parks the request until every rank has
reported. A request whose load failed is computed and never loads again, else it could go round for ever.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any, Final

from infera.engine.adapters import AdapterError
from infera_vllm.adapters import AdapterDigests, AdapterPendingError
from infera_vllm.hits import blocks_to_load, usable_tokens
from infera_vllm.loads import GroupTarget, PendingLoads
from infera_vllm.metadata import UNABLE, InferaMetadata, InferaWorkerMetadata, LoadOrder, SaveOrder
from infera_vllm.plan import EnginePlan, GroupPlan, Need
from infera_vllm.request_keys import RequestKeys, is_cacheable
from infera_vllm.saves import PendingSaves
from infera_vllm.stats import InferaStats
from infera_vllm.terms import Terms, terms_of
from infera_vllm.worth import LoadWorth
from kvd.client.client import KvdClient
from kvd.client.lookups import RepeatedLookups

log = logging.getLogger("infera.vllm")

ADAPTER_WAIT_S: Final = 5.0
"""For the files of a request's adapter to be read, once for each adapter."""
SAID_MAX: Final = 64
RECHECKS: Final = 8
"""Steps after a failed load: the daemon takes a moment to drop what was damaged."""
UNCACHEABLE_MAX: Final = 4096
"""Ids of requests remembered as not cacheable; at the limit they are looked at again, which costs a little time."""


@dataclass(slots=True)
class Question:
    """What was last asked about a request, and the answer; the same question is asked at every step it waits."""

    computed_tokens: int
    limit_tokens: int
    is_worth: bool | None = None


@dataclass
class RequestState:
    """What is known of one request: its keys, its block tables by group, and how far each has been saved."""

    request: Any
    keys: RequestKeys
    adapter: bytes | None
    terms: Terms
    tables: list[list[int]]
    saved_blocks: list[int]
    may_load: bool
    may_save: bool
    question: Question | None = None
    hbm_tokens: int = 0
    ram_tokens: int = 0
    loading_tokens: int = 0
    rechecks: int = 0
    """Steps at which all blocks are looked at again, since what seemed present may be dropped by now."""
    due_tokens: int = 0
    """Before so many tokens are computed there is nothing more to save: most requests of most steps end here."""


class SchedulerSide:
    """One engine's scheduler half. Called from the scheduler's thread only."""

    def __init__(
        self,
        client: KvdClient,
        plan: EnginePlan,
        stats: InferaStats,
        worth: LoadWorth,
        *,
        other_is_inexact: bool = False,
    ) -> None:
        """`other_is_inexact`: another connector beside this one may deliver blocks that are not what their keys say."""
        self._client = client
        self._plan = plan
        self._stats = stats
        self._worth = worth
        self._other_is_inexact = other_is_inexact
        self._lookups = RepeatedLookups(client)
        self._loads = PendingLoads(client, plan.rank_count)
        self._saves = PendingSaves(plan.rank_count)
        self._states: dict[str, RequestState] = {}
        self._uncacheable: set[str] = set()
        self._adapters = AdapterDigests()
        self._awaited: dict[str, float] = {}
        """Requests whose adapters are being read, and since when."""
        self._said: set[str] = set()
        self._orders: list[LoadOrder] = []
        self._written: list[int] = []
        """Blocks given to requests since the last step: somebody is going to write to them, maybe in the background."""
        self._epoch = ""
        self._is_off = False
        """A rank cannot copy: nothing is loaded or saved any more."""
        self._block_sizes = {group.block_size_tokens for group in plan.groups}

    # ---- looking up ----

    def announced(self, request: Any) -> None:
        """A request came in: what has to be read of its adapter can be read while it waits."""
        if request.lora_request is not None:
            self.matched_tokens(request, 0)

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded: whole blocks, leaving one token to compute. None: not
        known yet, because the request's adapter is being read."""
        try:
            state = self._state_of(request)
        except AdapterPendingError:
            return self._wait_for_adapter(request)
        if state is None or not state.may_load or self._is_off:
            return 0
        state.keys.extend(request.all_token_ids)
        limit = min(request.num_tokens - 1, self._known_tokens(state))
        question = state.question
        if question is None or (question.computed_tokens, question.limit_tokens) != (computed_tokens, limit):
            self._forget_question(state)
            question = state.question = Question(computed_tokens, limit)
        length = usable_tokens(
            self._plan,
            computed_tokens,
            limit,
            lambda group, first, end: self._run(state, group, first, end),
            lambda group, first, end: self._present(state, group, first, end),
        )
        if length <= computed_tokens:
            return 0
        if question.is_worth is None:
            question.is_worth = self._worth.is_worth(length - computed_tokens, self._bytes(computed_tokens, length))
            if not question.is_worth:
                self._stats.add("hits_unused", kind="not_worth_it")
        return length - computed_tokens if question.is_worth else 0

    def _wait_for_adapter(self, request: Any) -> int | None:
        """None for a while; a folder that cannot be read in time costs the request its cache, nothing else."""
        began_s = self._awaited.setdefault(request.request_id, time.monotonic())
        if time.monotonic() - began_s < ADAPTER_WAIT_S:
            return None
        self._uncacheable.add(request.request_id)
        self._stats.add("uncacheable_requests", kind="its adapter could not be read in time")
        return 0

    def _known_tokens(self, state: RequestState) -> int:
        return min(state.keys.block_count(size) * size for size in self._block_sizes)

    def _run(self, state: RequestState, group: GroupPlan, first: int, end: int) -> int:
        name = (state.request.request_id, group.position)
        return self._lookups.probe_run(name, group.spec, state.keys.block_keys(group.block_size_tokens, first, end))

    def _present(self, state: RequestState, group: GroupPlan, first: int, end: int) -> bytes:
        session = self._client.session()
        if session is None or group.spec not in session.class_ids:
            return bytes(end - first)
        keys = state.keys.block_keys(group.block_size_tokens, first, end)
        return session.arena.present(session.class_ids[group.spec], group.spec.full_mask, keys)

    def _bytes(self, computed_tokens: int, length: int) -> int:
        total = 0
        for group in self._plan.groups:
            first, end = blocks_to_load(group, computed_tokens, length)
            total += (end - first) * sum(group.spec.shard_bytes)
        return total

    def _forget_question(self, state: RequestState) -> None:
        for group in self._plan.groups:
            self._lookups.forget((state.request.request_id, group.position))
        state.question = None

    # ---- loading ----

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """Blocks are there: pin what was promised and order the load."""
        state = self._states.get(request.request_id)
        if state is None or state.question is None:
            self._written += self._beyond(block_ids, request.num_computed_tokens)
            return
        computed = state.question.computed_tokens
        self._written += self._beyond(block_ids, computed)
        self._forget_question(state)
        state.hbm_tokens = max(state.hbm_tokens, computed)
        self._touch(state, computed)
        if external_tokens:
            length = computed + external_tokens
            self._orders.append(
                self._loads.begin(request.request_id, self._targets(state, block_ids, computed, length))
            )
            state.loading_tokens = external_tokens
            state.may_load = False  # until this load is known to have ended well

    def _targets(
        self, state: RequestState, block_ids: tuple[list[int], ...], computed: int, length: int
    ) -> list[GroupTarget]:
        targets = []
        for group in self._plan.groups:
            first, end = blocks_to_load(group, computed, length)
            ids = block_ids[group.position][first:end]
            # The null block stands for what a window has left behind.
            skipped = next((at for at, block_id in enumerate(ids) if block_id), len(ids))
            keys = state.keys.block_keys(group.block_size_tokens, first + skipped, end)
            targets.append(GroupTarget(group, ids[skipped:], keys))
        return targets

    def _touch(self, state: RequestState, computed_tokens: int) -> None:
        """Tell kvd of what this engine's own cache served, else kvd takes it for unused."""
        for group in self._plan.groups:
            if stop := computed_tokens // group.block_size_tokens:
                self._client.touch(group.spec, state.keys.block_keys(group.block_size_tokens, 0, stop))

    # ---- a step's orders ----

    def orders(self, scheduler_output: Any) -> InferaMetadata:
        """Everything the workers have to do in this step."""
        loads, self._orders = self._orders, []
        written, self._written = self._written, []
        saves: list[SaveOrder] = []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            written += self._beyond(new.block_ids, new.num_computed_tokens)
            if state := self._states.get(new.req_id):
                state.tables = [list(table) for table in new.block_ids]
                self._note_other_loads(state, new.num_computed_tokens)
                self._add_saves(saves, state, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for position, request_id in enumerate(cached.req_ids):
            new_blocks, computed = cached.new_block_ids[position], cached.num_computed_tokens[position]
            state = self._states.get(request_id)
            if request_id in cached.resumed_req_ids:
                written += self._beyond(new_blocks, computed)
                if state:
                    self._resume(state, new_blocks, computed)
            elif new_blocks is not None:
                written += self._beyond(new_blocks, 0)
                if state:
                    for table, more in zip(state.tables, new_blocks, strict=True):
                        table.extend(more)
            if state and computed + scheduled[request_id] >= state.due_tokens:
                self._add_saves(saves, state, computed, scheduled[request_id])
        given_up = self._saves.among(written)
        for order in saves:
            order.save_id = self._saves.begin(order.block_ids)
        return InferaMetadata(loads, saves, given_up, self._epoch)

    def _beyond(self, tables: tuple[list[int], ...], computed_tokens: int) -> list[int]:
        """Blocks of tables beyond what is computed: steps or loads will write to them."""
        return [
            block_id
            for group in self._plan.groups
            for block_id in tables[group.position][computed_tokens // group.block_size_tokens :]
        ]

    def _resume(self, state: RequestState, tables: tuple[list[int], ...], computed_tokens: int) -> None:
        """After a preemption the whole tables come anew."""
        state.tables = [list(table) for table in tables]
        self._look_at_all_again(state)
        self._note_other_loads(state, computed_tokens)

    def _note_other_loads(self, state: RequestState, computed_tokens: int) -> None:
        """Blocks that another connector brought are saved only when it is known to bring what was asked for."""
        ours = state.hbm_tokens + state.ram_tokens
        if self._other_is_inexact and computed_tokens - computed_tokens % self._plan.align_tokens > ours:
            state.may_save = False
            self._stats.add("saves_dropped_blocks", len(state.tables[0]), "other_connector")

    def _add_saves(self, saves: list[SaveOrder], state: RequestState, computed_tokens: int, scheduled: int) -> None:
        """Order what this step completes. Tokens past `num_tokens` are unverified drafts."""
        if not state.may_save or self._is_off:
            return
        if state.adapter is not None and not self._adapters.is_current(state.request.lora_request, state.adapter):
            state.may_save = False  # replaced in place: from here on it is computed with other weights
            return
        tokens = min(computed_tokens + scheduled, state.request.num_tokens)
        session = self._client.session()
        due_tokens = []
        for group, table in zip(self._plan.groups, state.tables, strict=True):
            start, size = state.saved_blocks[group.position], group.block_size_tokens
            if group.need is not Need.ALL:
                # What a window left behind before this step may be somebody else's by now.
                start = max(start, computed_tokens // size)
            stop = min(tokens // size, len(table))
            if stop > start and session is not None and group.spec in session.class_ids:
                # Without a daemon it is looked at again, when it is back.
                state.keys.extend(state.request.all_token_ids)
                self._add_save(saves, state, group, start, stop)
                start = stop
            state.saved_blocks[group.position] = start
            due_tokens.append((start + 1) * size)
        state.due_tokens = min(due_tokens)
        if state.rechecks:
            state.rechecks -= 1
            self._look_at_all_again(state)

    def _look_at_all_again(self, state: RequestState) -> None:
        state.saved_blocks = [0] * len(self._plan.groups)
        state.due_tokens = 0

    def _add_save(self, saves: list[SaveOrder], state: RequestState, group: GroupPlan, start: int, stop: int) -> None:
        table = state.tables[group.position]
        found = self._present(state, group, start, stop)
        missing = [start + at for at, is_found in enumerate(found) if not is_found and table[start + at]]
        if missing:
            saves.append(self._save_order(state, group, table, missing))

    def _save_order(self, state: RequestState, group: GroupPlan, table: list[int], blocks: list[int]) -> SaveOrder:
        size = group.block_size_tokens
        return SaveOrder(
            0,
            group.position,
            [table[block] for block in blocks],
            b"".join(state.keys.block_keys(size, block, block + 1) for block in blocks),
            [state.keys.depth_grains(size, block) for block in blocks],
            state.terms.retention,
            state.terms.ttl_s,
        )

    # ---- what came of it ----

    def step_done(self, worker: InferaWorkerMetadata | None) -> None:
        """Take in the workers' reports of a step."""
        if worker is None:
            return
        for save_id, ranks in worker.saves.items():
            self._saves.reported(save_id, ranks)
        for load_id, report in worker.loads.items():
            ended = self._loads.reported(load_id, report)
            if ended is None:
                continue
            self._stats.add("loads", kind=ended.report.failure or "loaded")
            if not ended.report.failure:
                self._worth.loaded(ended.report.size_bytes, ended.report.seconds)
                self._stats.add("hit_tokens", self._note_loaded(ended.request_id), "ram")
            elif ended.report.failure == UNABLE:
                self._turn_off()
            else:
                if state := self._states.get(ended.request_id):
                    state.rechecks = RECHECKS
                log.warning(
                    "request %s: its cached blocks could not be used (%s) and are computed again",
                    ended.request_id, ended.report.failure,
                )  # fmt: skip

    def _note_loaded(self, request_id: str) -> int:
        """The tokens that the load brought; 0 when the request is gone."""
        state = self._states.get(request_id)
        if state is None:
            return 0
        state.may_load = True
        tokens, state.loading_tokens = state.loading_tokens, 0
        state.ram_tokens += tokens
        return tokens

    def _turn_off(self) -> None:
        if not self._is_off:
            self._is_off = True
            log.error("infera-kvd is not used any more: a worker cannot copy its blocks (its own log says why)")

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request. Its loads in flight keep their pins until reported. Returns what to tell the client."""
        self._uncacheable.discard(request.request_id)
        self._awaited.pop(request.request_id, None)
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        self._forget_question(state)
        return {"infera_hit_tokens": {"hbm": state.hbm_tokens, "ram": state.ram_tokens}}

    def begin_epoch(self) -> None:
        """The weights may be others now: what is computed from here on is kept under another name, and what runs is
        not kept at all. Nothing of anybody else's is touched."""
        self._epoch = secrets.token_hex(8)
        self._plan = self._plan.in_epoch(self._epoch)
        self._client.set_specs(self._plan.specs)
        for state in self._states.values():
            self._forget_question(state)
            state.may_save = False
            state.may_load = False

    def close(self) -> None:
        """Give all pins back: the engine is stopping and no worker copies any more."""
        self._loads.release_all()
        self._states.clear()

    def _state_of(self, request: Any) -> RequestState | None:
        """The request's state, made when it is first asked for; None where its blocks are not kept.

        Raises:
            AdapterPendingError: when its adapter's files are being read.
        """
        state = self._states.get(request.request_id)
        if state is not None or request.request_id in self._uncacheable:
            return state
        reason, adapter = is_cacheable(request), None
        if reason is None and request.lora_request is not None:
            try:
                adapter = self._adapters.adapter_digest(request.lora_request)
            except AdapterPendingError:
                raise
            except AdapterError as error:
                self._say_adapter(str(error))
                reason = "its adapter cannot be told by content"
        if reason is not None:
            self._stats.add("uncacheable_requests", kind=reason)
            if len(self._uncacheable) >= UNCACHEABLE_MAX:
                self._uncacheable.clear()
            self._uncacheable.add(request.request_id)
            return None
        terms = terms_of(request.kv_transfer_params)
        groups = len(self._plan.groups)
        state = self._states[request.request_id] = RequestState(
            request, RequestKeys(request, adapter), adapter, terms, [[] for _ in range(groups)], [0] * groups,
            may_load=not terms.no_load, may_save=terms.saves,
        )  # fmt: skip
        return state

    def _say_adapter(self, problem: str) -> None:
        """Once for each problem, as far as they are remembered."""
        if problem not in self._said and len(self._said) < SAID_MAX:
            self._said.add(problem)
            log.warning("blocks of its requests are not kept: %s", problem)
