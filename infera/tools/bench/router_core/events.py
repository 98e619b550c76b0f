"""Event frames as vLLM writes them, and what applying them costs."""

from __future__ import annotations

import random
import time
from typing import Final

import msgspec

from infera.cachemap.interface import Tier
from infera.cachemap.native_map import EngineDecoder, NativeCacheMap

BLOCKS_PER_EVENT: Final = 64
BLOCK_TOKENS: Final = 16
VOCABULARY: Final = 150_000
_encode = msgspec.msgpack.Encoder().encode


def stored_frame(dice: random.Random, names: list[int]) -> bytes:
    """One frame with a prompt that nobody has seen, in blocks of these names."""
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": [dice.randrange(VOCABULARY) for _ in range(len(names) * BLOCK_TOKENS)],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return _encode([1.5, [event], 0])


def removed_frame(names: list[int]) -> bytes:
    """One frame that says these blocks are gone, one event a block as engines do."""
    events = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0} for name in names]
    return _encode([1.5, events, 0])


def apply_rounds(blocks: int, rounds: int, seed: int) -> tuple[list[float], float]:
    """Blocks applied a second from raw frames, once a round, and bytes for each block of the one worker.

    Between rounds everything is forgotten and swept, so that each stores fresh entries into used memory.
    """
    dice = random.Random(seed)
    cache_map = NativeCacheMap(blocks + BLOCKS_PER_EVENT)
    decoder = EngineDecoder(cache_map, cache_map.add_holder("worker"))
    frames = [
        stored_frame(dice, [dice.getrandbits(64) for _ in range(BLOCKS_PER_EVENT)])
        for _ in range(blocks // BLOCKS_PER_EVENT)
    ]
    rates = []
    for _ in range(rounds):
        decoder.reset()
        while cache_map.tick(0):
            pass
        started_s = time.perf_counter()
        for frame in frames:
            decoder.apply(frame)
        rates.append(len(frames) * BLOCKS_PER_EVENT / (time.perf_counter() - started_s))
    assert cache_map.entry_count == len(frames) * BLOCKS_PER_EVENT
    # Holders are a fixed 512 KiB; everything else grows with the entries.
    size_bytes = cache_map.touched_bytes() - 4096 - 4096 * 128
    return rates, size_bytes / cache_map.entry_count


def key_rounds(keys: int, rounds: int, seed: int) -> tuple[list[float], list[float]]:
    """Stores and removals a second with keys given."""
    dice = random.Random(seed)
    cache_map = NativeCacheMap(keys)
    holder = cache_map.add_holder("kvd", counts_copies=False)
    stores, removals = [], []
    for _ in range(rounds + 1):
        packed = dice.randbytes(16 * keys)
        started_s = time.perf_counter()
        cache_map.store(holder, Tier.RAM, packed)
        stored_s = time.perf_counter()
        cache_map.remove(holder, Tier.RAM, packed)
        removals.append(keys / (time.perf_counter() - stored_s))
        stores.append(keys / (stored_s - started_s))
    return stores[1:], removals[1:]  # the first one touches fresh memory


def soak(cycles: int, seed: int) -> tuple[list[float], str | None]:
    """Resident MiB along ``cycles`` blocks stored and removed under names and tokens never used before, and what
    the audit of the books says at the end. At most 65,536 blocks are held at a time."""
    held_max, samples_wanted = 65_536, 20
    dice = random.Random(seed)
    cache_map = NativeCacheMap(2 * held_max)
    decoder = EngineDecoder(cache_map, cache_map.add_holder("worker"))
    held: list[list[int]] = []
    samples: list[float] = []
    rounds = cycles // BLOCKS_PER_EVENT
    # Tokens cost more to make than to apply: a stock of prompts is told apart by its first token.
    stock = [[dice.randrange(65_536, VOCABULARY) for _ in range(BLOCKS_PER_EVENT * 16)] for _ in range(64)]
    event = msgspec.msgpack.Decoder().decode(stored_frame(dice, [1]))[1][0]
    packer = msgspec.msgpack.Encoder()
    tails = [packer.encode(tokens)[3:] for tokens in stock]
    for number in range(rounds):
        names = [number * BLOCKS_PER_EVENT + place for place in range(BLOCKS_PER_EVENT)]
        fresh = b"\xce" + number.to_bytes(4, "big")
        decoder.apply(_with_tokens(event, names, fresh + tails[number % 64][5:]))
        held.append(names)
        if len(held) * BLOCKS_PER_EVENT > held_max:
            decoder.apply(removed_frame(held.pop(0)))
        if number % max(1, rounds // samples_wanted) == 0:
            samples.append(round(resident_mib(), 2))
    return samples, cache_map.audit()


def _with_tokens(event: dict[str, object], names: list[int], tokens: bytes) -> bytes:
    fields = event | {"block_hashes": names, "extra_keys": None}
    head = array_head(BLOCKS_PER_EVENT * BLOCK_TOKENS)
    return _encode([1.5, [fields | {"token_ids": msgspec.Raw(head + tokens)}], 0])


def array_head(count: int) -> bytes:
    """The head of an array of 16 to 65,535 elements."""
    return b"\xdc" + count.to_bytes(2, "big")


def resident_mib() -> float:
    """Resident memory of this process in MiB, shared memory included."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    raise OSError("no VmRSS in /proc/self/status")
