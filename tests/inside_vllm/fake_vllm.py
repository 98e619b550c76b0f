"""vLLM's side of the connector, as far as blocks go: a pool, tables, a prefix cache, chunked prefill, preemption.

Every block's content follows from the tokens it ends, its group and its rank, so that any block can be checked.
What is freed may be written to by others in the next step, as in vLLM.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.inside_vllm.rig import BLOCK_TOKENS, BLOCKS, WINDOW_TOKENS, Engine, request

CHUNK_TOKENS = 3 * BLOCK_TOKENS
GARBAGE = -7.0


def content(tokens: tuple[int, ...], group: int, rank: int) -> float:
    """What fills the block that ends these tokens."""
    digest = hashlib.blake2b(repr((tokens, group, rank)).encode(), digest_size=4).digest()
    return float(int.from_bytes(digest, "little") % (1 << 23))


@dataclass
class Running:
    """A request, its tables by group, and how much of it is computed."""

    asked: Any
    output_tokens: int
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    is_known: bool = False
    """Whether the workers have been told of it."""
    has_new_tables: bool = False
    """Its tables are not what the connector was told before: it was preempted."""
    is_loading: bool = False
    is_gone: bool = False
    """Aborted while loading: its blocks wait for the report."""


class FakeVllm:
    """One engine. Everything random comes from `dice`."""

    def __init__(self, engine: Engine, dice: random.Random) -> None:
        self.engine = engine
        self.dice = dice
        self.groups = len(engine.plan.groups)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, BLOCKS))
        self.users: dict[int, int] = {}
        self.cached: dict[tuple[int, tuple[int, ...]], int] = {}
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.waiting: list[Running] = []
        self.loading: dict[str, Running] = {}
        self.running: list[Running] = []
        self.loads_right = self.loads_failed = 0
        self.to_spoil: list[tuple[int, list[int]]] = []
        """Blocks given to loads, written to with the next step, as a load would."""

    # ---- blocks ----

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            if (key := self.key_of.pop(block_id, None)) and self.cached.get(key) == block_id:
                del self.cached[key]
            self.users[block_id] = 1
        return taken

    def give_back(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            if block_id == 0:
                continue
            self.users[block_id] -= 1
            if self.users[block_id] == 0:
                self.free[block_id] = None

    def local_hit(self, tokens: list[int]) -> list[list[int]]:
        """Tables of the longest prefix that every group has all blocks of."""
        count = 0
        while (count + 1) * BLOCK_TOKENS < len(tokens) and all(
            (g, tuple(tokens[: (count + 1) * BLOCK_TOKENS])) in self.cached for g in range(self.groups)
        ):
            count += 1
        return [
            [self.cached[g, tuple(tokens[: (b + 1) * BLOCK_TOKENS])] for b in range(count)] for g in range(self.groups)
        ]

    def use(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.free.pop(block_id, None)
            self.users[block_id] = self.users.get(block_id, 0) + 1

    def fill(self, block_ids: list[int], value: float | None, group: int, tokens: tuple[int, ...] = ()) -> None:
        for rank, cache in enumerate(self.engine.caches):
            for name in self.engine.plan.groups[group].layers:
                cache[name][block_ids] = content(tokens, group, rank) if value is None else value

    def check(self, block_id: int, group: int, tokens: tuple[int, ...]) -> None:
        for rank, cache in enumerate(self.engine.caches):
            for name in self.engine.plan.groups[group].layers:
                wanted = content(tokens, group, rank)
                assert torch.all(cache[name][block_id] == wanted), f"block {block_id} of group {group} is not its own"

    # ---- requests ----

    def add(self, tokens: list[int], output_tokens: int) -> None:
        self.waiting.append(Running(request(tokens), output_tokens))

    def abort_one(self) -> None:
        everybody = self.waiting + list(self.loading.values()) + self.running
        if everybody:
            self.end(self.dice.choice(everybody))

    def end(self, one: Running) -> None:
        self.engine.scheduler.finished(one.asked)
        if one.is_loading:
            one.is_gone = True
            return
        for group in (self.waiting, self.running):
            if one in group:
                group.remove(one)
        for table in one.tables:
            self.give_back(table)

    def preempt_one(self) -> None:
        if self.running:
            one = self.running.pop(self.dice.randrange(len(self.running)))
            for table in one.tables:
                self.give_back(table)
            one.tables, one.computed, one.has_new_tables = [], 0, True
            self.waiting.insert(0, one)

    # ---- a step ----

    def step(self) -> None:
        self.admit()
        entries = [(one, min(len(one.asked.all_token_ids) - one.computed, CHUNK_TOKENS)) for one in self.running]
        given = {one.asked.request_id: self.grow(one, tokens) for one, tokens in entries}
        entries = [(one, tokens) for one, tokens in entries if given[one.asked.request_id] is not None]
        orders = self.engine.scheduler.orders(self.output(entries, given))
        self.engine.step(orders, lambda: self.forward(entries))
        self.take_reports()
        for one, tokens in entries:
            if one in self.running:
                self.advance(one, tokens)

    def admit(self) -> None:
        """Move waiting requests on: to run, or to load."""
        while self.waiting and len(self.running) < 4:
            one = self.waiting[0]
            tokens = one.asked.all_token_ids
            hit = self.local_hit(tokens)
            local = len(hit[0]) * BLOCK_TOKENS
            external = self.engine.scheduler.matched_tokens(one.asked, local)
            for table in hit:
                self.use(table)
            needed = (local + external) // BLOCK_TOKENS - len(hit[0])
            fresh = self.take(needed * self.groups)
            if fresh is None:
                for table in hit:
                    self.give_back(table)
                break
            self.waiting.pop(0)
            one.tables = [table + fresh[g * needed : (g + 1) * needed] for g, table in enumerate(hit)]
            one.computed = local + external
            self.engine.scheduler.allocated(one.asked, tuple(map(list, one.tables)), external)
            if external:
                one.is_loading = True
                self.loading[one.asked.request_id] = one
                self.to_spoil += [(group, table[len(hit[0]) :]) for group, table in enumerate(one.tables)]
            else:
                self.running.append(one)

    def grow(self, one: Running, tokens: int) -> list[list[int]] | None:
        """Blocks for what the step computes; None when there are none left."""
        more = -(-(one.computed + tokens) // BLOCK_TOKENS) - len(one.tables[0])
        fresh = self.take(more * self.groups)
        if fresh is None:
            return None
        parts = [fresh[g * more : (g + 1) * more] for g in range(self.groups)]
        for table, part in zip(one.tables, parts, strict=True):
            table.extend(part)
        return parts

    def output(self, entries: Any, given: dict[str, Any]) -> Any:
        new, known, resumed = [], [], set()
        for one, _ in entries:
            name = one.asked.request_id
            if not one.is_known:
                facts = {"req_id": name, "block_ids": tuple(map(list, one.tables)), "num_computed_tokens": one.computed}
                new.append(SimpleNamespace(**facts))
                one.is_known = True
            else:
                known.append(one)
                if one.has_new_tables:
                    resumed.add(name)
            one.has_new_tables = False
        return SimpleNamespace(
            scheduled_new_reqs=new,
            num_scheduled_tokens={one.asked.request_id: tokens for one, tokens in entries},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.asked.request_id for one in known],
                new_block_ids=[
                    tuple(map(list, one.tables)) if one.asked.request_id in resumed
                    else (tuple(given[one.asked.request_id]) if given[one.asked.request_id][0] else None)
                    for one in known
                ],
                num_computed_tokens=[one.computed for one in known],
                resumed_req_ids=resumed,
            ),
        )  # fmt: skip

    def forward(self, entries: Any) -> None:
        for group, block_ids in self.to_spoil:
            self.fill(block_ids, GARBAGE, group)
        self.to_spoil.clear()
        for one, count in entries:
            tokens = one.asked.all_token_ids
            for group, table in enumerate(one.tables):
                for block in range(one.computed // BLOCK_TOKENS, -(-(one.computed + count) // BLOCK_TOKENS)):
                    end = (block + 1) * BLOCK_TOKENS
                    is_whole = end <= one.computed + count
                    prefix = tuple(tokens[:end]) if is_whole else ()
                    self.fill([table[block]], None if is_whole else GARBAGE, group, prefix)

    def advance(self, one: Running, count: int) -> None:
        tokens = one.asked.all_token_ids
        for group, table in enumerate(one.tables):
            for block in range(one.computed // BLOCK_TOKENS, (one.computed + count) // BLOCK_TOKENS):
                key = (group, tuple(tokens[: (block + 1) * BLOCK_TOKENS]))
                self.cached.setdefault(key, table[block])
                self.key_of[table[block]] = key
        one.computed += count
        self.leave_window(one)
        if one.computed < len(tokens):
            return
        if one.output_tokens == 0:
            self.end(one)
            return
        one.output_tokens -= 1
        tokens.append(self.dice.randrange(50))
        one.asked.num_tokens = len(tokens)

    def leave_window(self, one: Running) -> None:
        """What a window has left behind is freed while the request runs."""
        keep_from = max(0, one.computed - WINDOW_TOKENS + 1) // BLOCK_TOKENS
        for table in one.tables[1:]:
            behind = [block_id for block_id in table[:keep_from] if block_id]
            table[:keep_from] = [0] * min(keep_from, len(table))
            self.give_back(behind)

    def take_reports(self) -> None:
        for name in self.engine.loaded():
            one = self.loading.pop(name)
            one.is_loading = False
            bad = self.engine.invalid & set(one.tables[0])
            failed = name in self.engine.failed or bool(bad)
            # Not before: another rank may have told of the failure steps ago.
            self.engine.failed.discard(name)
            self.engine.invalid -= bad
            if one.is_gone:
                for table in one.tables:
                    self.give_back(table)
            else:
                self.verify(one, failed, bad)

    def verify(self, one: Running, failed: bool, bad: set[int]) -> None:
        tokens = one.asked.all_token_ids
        if failed:
            self.loads_failed += 1
            good = 0 if self.groups > 1 else next((b for b, i in enumerate(one.tables[0]) if i in bad), 0)
        else:
            self.loads_right += 1
            good = one.computed // BLOCK_TOKENS
        for group, table in enumerate(one.tables):
            first = self.engine.plan.groups[group].first_needed_block(good * BLOCK_TOKENS)
            for block in range(first, good):
                self.check(table[block], group, tuple(tokens[: (block + 1) * BLOCK_TOKENS]))
        if good == 0 or (self.groups > 1 and failed):
            for table in one.tables:
                self.give_back(table)
            one.tables, one.computed = [], 0
            self.waiting.insert(0, one)
            return
        for table in one.tables:
            self.give_back(table[good:])
            del table[good:]
        one.computed = good * BLOCK_TOKENS
        self.running.append(one)
