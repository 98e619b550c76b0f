"""Random event streams with loss, duplicates, reordering and restarts, against the engine's own truth.

Never a ghost after a resync; never a missed block when the stream is whole.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infera_core.keys import chain_keys, root_key

from infera.cachemap.interface import Target, Tier
from infera.cachemap.native_map import EngineDecoder, NativeCacheMap
from infera.cachemap.sequence import SequenceTracker, Step
from tests.support.engine_events import CLEARED, frame, removed, stored

MEDIA = {Tier.HBM: "GPU", Tier.RAM: "CPU"}


class Engine:
    """An engine that stores and evicts blocks of a few branching prompts at random and numbers what it says."""

    def __init__(self, dice: random.Random, size: int, parents_stay: bool) -> None:
        self.dice = dice
        self.size = size
        self.parents_stay = parents_stay
        self.salt = dice.randrange(2**62)
        self.frames: list[bytes] = []
        # (path of choices, tier) -> copies; a path is one block of a prompt.
        self.held: dict[tuple[tuple[int, ...], Tier], int] = {}

    def name(self, path: tuple[int, ...]) -> int | bytes:
        """What the engine calls a block: unlike any other engine's name for it."""
        value = hash((path, self.salt)) % 2**64
        return value if self.salt % 2 else value.to_bytes(8, "big") * 4

    def tokens(self, path: tuple[int, ...]) -> list[int]:
        """The tokens of the path's last block."""
        return [path[-1] * 1000 + len(path)] * self.size

    def step(self) -> None:
        """Do one thing and say it."""
        roll = self.dice.random()
        events = [self._evict() if self.held and roll < 0.4 else self._store()]
        if roll > 0.995:
            self.held.clear()
            events.append(CLEARED)
        self.frames.append(frame(*[event for event in events if event]))

    def _store(self) -> dict[str, Any] | None:
        tier = self.dice.choice((Tier.HBM, Tier.HBM, Tier.RAM))
        parents = [(), *(path for path, where in self.held if where == Tier.HBM and len(path) < 5)]
        path = (*self.dice.choice(parents), self.dice.randrange(2))
        parent = self.name(path[:-1]) if len(path) > 1 else None
        if tier is Tier.RAM and self.size < 16 and len(path) * self.size % 16 != self.size % 16 and parent is not None:
            tier = Tier.HBM  # a page in RAM follows the pages of its grain in RAM
        self.held[path, tier] = self.held.get((path, tier), 0) + 1
        return stored([self.name(path)], parent, self.tokens(path), self.size, medium=MEDIA[tier])

    def _evict(self) -> dict[str, Any] | None:
        path, tier = self.dice.choice(list(self.held))
        if self.parents_stay:
            while any(other[:-1] == path for other, _ in self.held):
                path, tier = self.dice.choice([key for key in self.held if key[0][:-1] == path])
        self.held[path, tier] -= 1
        if not self.held[path, tier]:
            del self.held[path, tier]
        return removed([self.name(path)], medium=MEDIA[tier])

    def keys(self) -> set[tuple[bytes, Tier]]:
        """Content keys of everything that is held as whole grains."""
        found = set()
        for path, tier in self.held:
            tokens = [token for end in range(1, len(path) + 1) for token in self.tokens(path[:end])]
            if len(tokens) % 16 == 0 and self._is_whole(path, tier):
                found.add((chain_keys(root_key(), tokens)[-16:], tier))
        return found

    def _is_whole(self, path: tuple[int, ...], tier: Tier) -> bool:
        pages = max(1, 16 // self.size)
        return all((path[:end], tier) in self.held for end in range(len(path), len(path) - pages, -1))


class Follower:
    """What the subscriber does with a tracker, without sockets."""

    def __init__(self, cache_map: NativeCacheMap) -> None:
        self.map = cache_map
        self.holder = cache_map.add_holder("w")
        self.decoder = EngineDecoder(cache_map, self.holder)
        self.tracker = SequenceTracker()

    def take(self, step: Step) -> int | None:
        if step.resync:
            self.decoder.reset()
        for payload in step.frames:
            assert self.decoder.apply(payload)
        return step.replay_from

    def heal(self, start: int | None, engine: Engine, window: int) -> None:
        """Replays of the last ``window`` frames, as often as the tracker asks."""
        while start is not None:
            for sequence in range(max(start, len(engine.frames) - window), len(engine.frames)):
                self.take(self.tracker.replayed(sequence, engine.frames[sequence]))
            start = self.take(self.tracker.replay_ended())

    def leave(self) -> None:
        """The worker is gone."""
        self.decoder.close()
        self.map.drop_holder(self.holder)


def held_keys(follower: Follower, engine: Engine, universe: set[tuple[bytes, Tier]]) -> set[tuple[bytes, Tier]]:
    """What the map says of this worker, key by key."""
    found = set()
    for key, tier in universe:
        match = follower.map.match(key, [Target(1, follower.holder)])[0]
        if tier in match.tokens_by_tier:
            found.add((key, tier))
    return found


@pytest.mark.parametrize("size", [1, 4, 8, 16, 32])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(st.sampled_from(["lose", "twice", "swap", "restart", *["none"] * 6]), min_size=5, max_size=120),
    window=st.integers(0, 130),
)
def test_never_a_ghost_and_never_a_missed_block_when_the_stream_is_whole(
    size: int, seed: int, faults: list[str], window: int
) -> None:
    dice = random.Random(seed)
    cache_map = NativeCacheMap(4096, seed=(seed, 1))
    engine, follower = Engine(dice, size, size < 16), Follower(cache_map)
    follower.heal(follower.take(follower.tracker.join()), engine, window)
    late: list[int] = []
    for fault in faults:
        if fault == "restart":
            # A new incarnation on the same address: another topic, so a new feed and a new holder.
            follower.leave()
            engine, follower, late = Engine(dice, size, size < 16), Follower(cache_map), []
            follower.heal(follower.take(follower.tracker.join()), engine, window)
            continue
        engine.step()
        sequence = len(engine.frames) - 1
        arriving = {"lose": [], "twice": [sequence, sequence], "swap": []}.get(fault, [sequence])
        if fault == "swap":
            late.append(sequence)
        elif late:
            arriving, late = [*arriving, *late], []
        for number in arriving:
            follower.heal(follower.take(follower.tracker.live(number, engine.frames[number])), engine, window)
        if dice.random() < 0.2:
            cache_map.tick(0)
    engine.step()
    last = len(engine.frames) - 1
    follower.heal(follower.take(follower.tracker.live(last, engine.frames[last])), engine, window)
    # A replay that reaches back to every frame makes a stream whole, whatever happened on the way.
    _check(follower, engine, window >= len(engine.frames))


def _check(follower: Follower, engine: Engine, is_whole: bool) -> None:
    truth = engine.keys()
    assert follower.map.audit() is None
    assert follower.map.entry_count <= len(truth), "a ghost"
    # Lower tiers are seen behind the first miss in HBM, so ask for both kinds by themselves.
    hbm = held_keys(follower, engine, {entry for entry in truth if entry[1] is Tier.HBM})
    only_ram = {(key, tier) for key, tier in truth if tier is Tier.RAM and (key, Tier.HBM) not in truth}
    ram = held_keys(follower, engine, only_ram)
    blocks = follower.map.blocks_by_tier(follower.holder)
    assert blocks.get(Tier.HBM, 0) == len(hbm), "a ghost in HBM"
    assert blocks.get(Tier.RAM, 0) <= len({key for key, tier in truth if tier is Tier.RAM}), "a ghost in RAM"
    if is_whole and follower.tracker.resyncs == 0 and not follower.map.counters("engine")["unknown_parent"]:
        assert hbm == {entry for entry in truth if entry[1] is Tier.HBM}
        assert ram == only_ram
        assert follower.map.entry_count == len(truth)
