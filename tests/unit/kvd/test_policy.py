"""Which records go first, and who may keep what for how long: each rule by its name."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from infera_core import ffi, lib

from kvd.protocol import COMMITMENT, GRANT, WISH
from kvd.retention import RETENTIONS, retention_number
from tests.support.store_model import Client, Kind, StoreModel

MIB = 1 << 20
PAGE = 4096
NOW_S = 1_000_000


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 4


class Cache:
    """A store of one-page records, used through one client as a cache."""

    def __init__(self, *, pages: int = 256, records: int | None = None, kinds: int = 1) -> None:
        self.model = StoreModel(data_bytes=pages * PAGE, records=records or pages * 4)
        self.store = self.model.store
        self.store.set_clock(NOW_S)
        self.kinds = [self.model.open_class((PAGE,)) for _ in range(kinds)]
        self.kind = self.kinds[0]
        self.client = self.model.attach()

    def put(
        self, number: int, retention: str = "short", *, depth: int = 0, ttl_s: int = 0, tenant: int = 0,
        kind: Kind | None = None, client: Client | None = None,
    ) -> int:  # fmt: skip
        """Save one record; returns the status of its reservation."""
        kind, client = kind or self.kind, client or self.client
        wish = WISH.pack(key_of(number), depth, 0)
        answer = self.store.reserve(
            client.number, kind.class_id, 0, RETENTIONS[retention], tenant, wish, 1, 1 << 60, ttl_s
        )
        ((name, _, status, _),) = GRANT.iter_unpack(answer)
        if status == lib.STORE_OK:
            self.store.commit(client.number, COMMITMENT.pack(name, 0))
        return int(status)

    def has(self, number: int, kind: Kind | None = None) -> bool:
        return self.client.arena.probe_run((kind or self.kind).class_id, 1, key_of(number)) == 1

    def present(self, numbers: range) -> list[int]:
        return [number for number in numbers if self.has(number)]

    def touch(self, *numbers: int) -> None:
        self.store.touch(self.kind.class_id, b"".join(key_of(number) for number in numbers))

    def stat(self, name: str) -> int:
        return self.store.stats()[name]

    def retain(self, retention: str, number: int | None = None) -> int:
        key = None if number is None else key_of(number)
        return self.store.set_retention(self.kind.class_id, key, RETENTIONS[retention])

    def expire(self, now_s: int) -> None:
        self.store.set_clock(now_s)
        self.store.expire(2, 1 << 60)


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache()
    yield made
    assert made.store.audit() is None
    made.model.close()


# ---- eviction ----


def zipf_with_scans(seed: int, length: int, keys: int) -> list[int]:
    """Requests of popular records, and now and then a long run of records asked for once."""
    dice = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(keys)]
    trace = dice.choices(range(keys), weights, k=length)
    for scan in range(length // 2000):
        at = dice.randrange(len(trace))
        trace[at:at] = range(10**6 + scan * 10**4, 10**6 + scan * 10**4 + 400)
    return trace


def hits_of_lru(trace: list[int], size: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in trace:
        if key in held:
            held.move_to_end(key)
            hits += 1
        else:
            held[key] = None
            if len(held) > size:
                held.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(5))
def test_a_scan_does_not_cost_what_is_popular(seed: int) -> None:
    """The hit rate is at least that of the least-recently-used rule, with scans much better."""
    trace = zipf_with_scans(seed, 20_000, 2000)
    cache, hits = Cache(), 0
    for key in trace:
        if cache.has(key):
            hits += 1
            cache.touch(key)
        else:
            assert cache.put(key) == lib.STORE_OK
    assert cache.store.audit() is None
    lru = hits_of_lru(trace, 256)
    assert hits >= lru, (hits, lru)
    assert cache.stat("evict_steps_most") <= 64 * 34
    assert cache.stat("evict_steps_total") < 4 * len(trace)
    cache.model.close()


def test_a_record_that_comes_back_soon_goes_to_main() -> None:
    cache = Cache(pages=32)
    for number in range(40):
        cache.put(number)
    assert not cache.has(0)
    cache.put(0)
    assert cache.stat("ghost_hits_total") == 1
    for number in range(100, 150):
        cache.put(number)
    assert cache.has(0)
    cache.model.close()


def test_the_deepest_of_a_chain_go_first(cache: Cache) -> None:
    """The head of a prompt is of use without its tail, the tail not without its head."""
    for depth in range(256):
        cache.put(depth, depth=8 * depth)
    for number in range(1000, 1100):
        cache.put(number)
    left = cache.present(range(256))
    assert left == list(range(len(left)))
    assert 0 < len(left) <= 156


def test_a_touched_chain_keeps_its_head_longest(cache: Cache) -> None:
    for depth in range(256):
        cache.put(depth, depth=8 * depth)
    cache.touch(*range(256))
    for number in range(1000, 1300):
        cache.put(number)
    left = cache.present(range(256))
    assert left == list(range(len(left)))


def test_an_orphan_goes_before_what_still_has_its_head(cache: Cache) -> None:
    for number in range(200):
        cache.put(1000 + number)
    for depth in range(10):
        cache.put(depth, depth=8 * depth)
    for number in range(46):
        cache.put(2000 + number)
    cache.touch(*range(10))
    lib.store_drop(cache.store.handle, cache.kind.class_id, key_of(4))
    assert cache.stat("orphaned_total") == 1
    cache.put(3000)  # takes the dropped one's place
    for number in range(5):
        cache.put(3001 + number)
    assert cache.present(range(10)) == [0, 1, 2, 3]


def test_what_a_client_has_pinned_is_never_evicted() -> None:
    dice = random.Random(7)
    cache = Cache(pages=64)
    pinned: dict[int, int] = {}
    for number in range(4000):
        cache.put(number, dice.choice(["ephemeral", "short", "long"]), depth=dice.randrange(4))
        if dice.random() < 0.3 and len(pinned) < 20:
            slots = cache.client.arena.pin_run(cache.kind.class_id, 1, key_of(number))
            if slots:
                pinned[number] = slots[0]
        elif pinned and dice.random() < 0.1:
            cache.client.arena.unpin(pinned.pop(dice.choice(sorted(pinned))))
        assert all(cache.has(held) for held in pinned)
    assert cache.store.audit() is None
    cache.model.close()


def test_the_work_for_one_reservation_is_bounded_when_all_is_pinned() -> None:
    cache = Cache(pages=2048)
    for number in range(2048):
        cache.put(number)
    for number in range(2048):
        cache.client.arena.pin_run(cache.kind.class_id, 1, key_of(number))
    for number in range(5000, 5010):
        assert cache.put(number) == lib.STORE_NO_SPACE
    assert cache.stat("evict_steps_most") <= 64 * 34
    cache.model.close()


# ---- retention ----


def test_none_is_not_stored(cache: Cache) -> None:
    assert cache.put(1, "none") == lib.STORE_UNWANTED
    assert cache.stat("reserve_unwanted_total") == 1
    assert cache.stat("used_bytes") == 0


def test_an_unknown_class_is_refused(cache: Cache) -> None:
    for retention in (5, 7, 8, 10, 65535):
        wish = WISH.pack(key_of(1), 0, 0)
        answer = cache.store.reserve(cache.client.number, cache.kind.class_id, 0, retention, 0, wish, 1, 2)
        assert [status for _, _, status, _ in GRANT.iter_unpack(answer)] == [lib.STORE_BAD_REQUEST]
    with pytest.raises(ValueError, match="none, ephemeral, short, long, pinned"):
        retention_number("forever")


def test_ephemeral_goes_first_even_when_it_was_used(cache: Cache) -> None:
    for number in range(200):
        cache.put(number)
    for number in range(200, 256):
        cache.put(number, "ephemeral")
    cache.touch(*range(200, 256))
    for number in range(1000, 1056):
        cache.put(number)
    assert cache.present(range(256)) == list(range(200))


def test_long_goes_last_while_it_keeps_to_its_share(cache: Cache) -> None:
    for number in range(128):
        cache.put(number, "long")
    for number in range(1000, 2000):
        cache.put(number)
    assert cache.present(range(128)) == list(range(128))
    assert cache.stat("long_bytes") == 128 * PAGE


def test_long_over_its_share_gives_its_own_oldest(cache: Cache) -> None:
    for number in range(100):
        cache.put(number)
    for number in range(1000, 1400):
        cache.put(number, "long")
    assert 128 <= len(cache.present(range(1000, 1400))) <= 256 - 50
    assert cache.has(1399)
    cache.put(5000)
    assert cache.has(5000)


def test_pinned_is_never_evicted_and_refused_over_its_share(cache: Cache) -> None:
    statuses = [cache.put(number, "pinned") for number in range(80)]
    assert statuses == [lib.STORE_OK] * 64 + [lib.STORE_PINNED_FULL] * 16
    assert cache.stat("reserve_pinned_full_total") == 16
    for number in range(1000, 3000):
        assert cache.put(number) == lib.STORE_OK
    assert cache.present(range(64)) == list(range(64))
    assert cache.stat("pinned_bytes") == 64 * PAGE


def test_reservations_count_towards_the_pinned_share(cache: Cache) -> None:
    """Many begun at once cannot exceed it together."""
    wishes = b"".join(WISH.pack(key_of(number), 0, 0) for number in range(100))
    answer = cache.store.reserve(
        cache.client.number, cache.kind.class_id, 0, lib.STORE_RETAIN_PINNED, 0, wishes, 1, 1 << 60
    )
    assert sum(status == lib.STORE_OK for _, _, status, _ in GRANT.iter_unpack(answer)) == 64


def test_pinned_can_be_dropped_and_makes_room_in_the_share(cache: Cache) -> None:
    for number in range(64):
        cache.put(number, "pinned")
    assert lib.store_drop(cache.store.handle, cache.kind.class_id, key_of(5)) == lib.STORE_OK
    assert cache.put(99, "pinned") == lib.STORE_OK
    assert cache.put(100, "pinned") == lib.STORE_PINNED_FULL


def test_a_namespace_is_pinned_up_to_the_share_and_unpinned(cache: Cache) -> None:
    for number in range(100):
        cache.put(number)
    assert cache.retain("pinned") == 64
    assert cache.stat("pinned_refused_total") == 36
    assert cache.store.audit() is None
    for number in range(1000, 2000):
        cache.put(number)
    assert len(cache.present(range(100))) >= 64
    assert cache.retain("short", 9999) == 0
    assert cache.retain("none") == 0
    cache.retain("short")
    assert cache.stat("pinned_bytes") == 0
    for number in range(3000, 4000):
        cache.put(number)
        cache.touch(number)
    assert cache.present(range(100)) == []


def test_one_record_is_pinned(cache: Cache) -> None:
    cache.put(1)
    assert cache.retain("pinned", 1) == 1
    for number in range(1000, 2000):
        cache.put(number)
    assert cache.has(1)


def test_saving_again_raises_what_is_kept_and_never_lowers_it(cache: Cache) -> None:
    cache.put(1, "ephemeral", ttl_s=5)
    assert cache.put(1, "long") == lib.STORE_EXISTS
    assert cache.stat("long_records") == 1
    cache.expire(NOW_S + 100)
    assert cache.has(1)
    assert cache.put(1, "ephemeral", ttl_s=1) == lib.STORE_EXISTS
    assert cache.put(1, "none") == lib.STORE_EXISTS
    cache.expire(NOW_S + 200)
    assert cache.has(1)
    assert cache.stat("long_records") == 1


# ---- time to live ----


def test_what_has_expired_is_a_miss_at_once_and_removed(cache: Cache) -> None:
    cache.put(1, ttl_s=10)
    cache.put(2)
    cache.store.set_clock(NOW_S + 9)
    assert cache.has(1)
    cache.store.set_clock(NOW_S + 10)
    assert not cache.has(1)
    assert cache.client.arena.pin_run(cache.kind.class_id, 1, key_of(1)) == []
    assert cache.stat("records_present") == 2
    cache.expire(NOW_S + 10)
    assert cache.stat("records_present") == 1
    assert cache.stat("ttl_expired_total") == 1
    assert cache.has(2)


def test_an_expired_record_can_be_saved_again_at_once(cache: Cache) -> None:
    cache.put(1, ttl_s=10)
    cache.store.set_clock(NOW_S + 10)
    assert cache.put(1) == lib.STORE_OK
    assert cache.has(1)


def test_times_beyond_one_turn_of_the_wheel_are_kept(cache: Cache) -> None:
    for number, ttl_s in enumerate((1, 4095, 4096, 4097, 10_000, 2**32 - 1)):
        cache.put(number, ttl_s=ttl_s)
    ends_s = (1, 4095, 4096, 4097, 10_000, 1 << 40)
    for second in range(NOW_S, NOW_S + 10_002, 7):
        cache.expire(second)
        left = cache.present(range(6))
        assert left == [number for number in range(6) if ends_s[number] > second - NOW_S]
    cache.expire(NOW_S + 10_001)
    assert cache.stat("records_present") == 1


@pytest.mark.parametrize("jump_s", [100_000, -500_000])
def test_a_jump_of_the_clock_loses_nothing(cache: Cache, jump_s: int) -> None:
    cache.expire(NOW_S)
    for number in range(50):
        cache.put(number, ttl_s=60 + number)
    cache.expire(NOW_S + jump_s)
    assert cache.stat("records_present") == (0 if jump_s > 0 else 50)
    cache.put(100, ttl_s=5)
    cache.expire(NOW_S + jump_s + 5)
    assert not cache.has(100)
    cache.expire(NOW_S + 1000)
    cache.expire(NOW_S + 1001)
    assert cache.stat("records_present") == 0


def test_expiring_is_done_in_bounded_steps() -> None:
    cache = Cache(pages=8192)
    for number in range(8192):
        cache.put(number, ttl_s=1)
    cache.expire(NOW_S + 1)
    first = cache.stat("ttl_expired_total")
    assert 0 < first <= lib.STORE_EXPIRE_STEPS
    for _ in range(4):
        cache.expire(NOW_S + 1)
    assert cache.stat("ttl_expired_total") == 8192
    assert cache.store.audit() is None
    cache.model.close()


def test_what_expires_while_it_is_read_goes_when_it_is_released(cache: Cache) -> None:
    cache.put(1, ttl_s=10)
    (slot,) = cache.client.arena.pin_run(cache.kind.class_id, 1, key_of(1))
    cache.expire(NOW_S + 20)
    assert cache.stat("records_present") == 1
    cache.client.arena.unpin(slot)
    cache.expire(NOW_S + 21)
    cache.expire(NOW_S + 22)
    assert cache.stat("records_present") == 0


# ---- quotas ----


def test_a_quota_of_zero_is_no_limit(cache: Cache) -> None:
    cache.store.set_quotas(0, 0)
    for number in range(256):
        assert cache.put(number, tenant=7) == lib.STORE_OK
    assert cache.stat("records_present") == 256


def test_a_namespace_over_its_quota_gives_up_its_own_oldest() -> None:
    cache = Cache(kinds=2)
    mine, other = cache.kinds
    cache.store.set_quotas(64 * PAGE, 0)
    for number in range(50):
        cache.put(number, kind=other)
    for number in range(100):
        assert cache.put(number, kind=mine) == lib.STORE_OK
    assert cache.present(range(100)) == list(range(36, 100))
    assert all(cache.has(number, other) for number in range(50))
    assert cache.store.namespace_bytes(mine.class_id) == 64 * PAGE
    assert cache.stat("evicted_quota_total") == 36
    assert cache.store.audit() is None
    cache.model.close()


def test_a_tenant_over_its_quota_gives_up_its_own_oldest(cache: Cache) -> None:
    cache.store.set_quotas(0, 10 * PAGE)
    for number in range(20):
        cache.put(number, tenant=1)
    for number in range(100, 105):
        cache.put(number, tenant=2)
    for number in range(200, 230):
        cache.put(number)  # nobody's
    assert cache.present(range(20)) == list(range(10, 20))
    assert len(cache.present(range(100, 230))) == 35
    usage = {tenant.tag: tenant.size_bytes for tenant in cache.store.tenants()}
    assert usage == {0: 30 * PAGE, 1: 10 * PAGE, 2: 5 * PAGE}
    assert cache.stat("tenants") == 2


def test_a_quota_smaller_than_a_record_refuses_it(cache: Cache) -> None:
    cache.store.set_quotas(0, PAGE - 1)
    assert cache.put(1, tenant=3) == lib.STORE_OVER_QUOTA
    assert cache.put(2) == lib.STORE_OK
    cache.store.set_quotas(PAGE - 1, 0)
    assert cache.put(3) == lib.STORE_OVER_QUOTA
    assert cache.has(2)
    assert cache.stat("reserve_over_quota_total") == 2


def test_a_quota_full_of_what_may_not_go_refuses(cache: Cache) -> None:
    cache.store.set_quotas(0, 4 * PAGE)
    for number in range(4):
        cache.put(number, "pinned", tenant=3)
    assert cache.put(9, tenant=3) == lib.STORE_OVER_QUOTA
    assert cache.put(9, tenant=4) == lib.STORE_OK
    for number in range(20, 24):
        cache.put(number, tenant=5)
        cache.client.arena.pin_run(cache.kind.class_id, 1, key_of(number))
    assert cache.put(30, tenant=5) == lib.STORE_OVER_QUOTA


def test_reservations_count_towards_a_quota(cache: Cache) -> None:
    cache.store.set_quotas(0, 10 * PAGE)
    wishes = b"".join(WISH.pack(key_of(number), 0, 0) for number in range(20))
    answer = cache.store.reserve(
        cache.client.number, cache.kind.class_id, 0, lib.STORE_RETAIN_SHORT, 6, wishes, 1, 1 << 60
    )
    statuses = [status for _, _, status, _ in GRANT.iter_unpack(answer)]
    assert statuses == [lib.STORE_OK] * 10 + [lib.STORE_OVER_QUOTA] * 10


def test_when_the_table_of_tenants_is_full_the_rest_share_one_entry() -> None:
    cache = Cache(pages=2048)
    places = lib.STORE_TENANTS_MAX - 2
    for tenant in range(1, places + 1):
        cache.put(tenant, tenant=tenant)
    cache.store.set_quotas(0, 2 * PAGE)
    for number in range(5000, 5004):
        assert cache.put(number, tenant=number) == lib.STORE_OK
    assert cache.present(range(5000, 5004)) == [5002, 5003]
    (shared,) = [tenant for tenant in cache.store.tenants() if tenant.is_overflow]
    assert (shared.records, shared.size_bytes) == (2, 2 * PAGE)
    assert cache.put(7, tenant=7) == lib.STORE_EXISTS
    lib.store_drop(cache.store.handle, cache.kind.class_id, key_of(7))
    cache.put(6000, tenant=6000)  # has an entry of its own now
    assert {tenant.tag for tenant in cache.store.tenants() if not tenant.is_overflow} >= {6000}
    assert cache.store.audit() is None
    cache.model.close()


# ---- all together ----


@pytest.mark.parametrize("seed", range(6))
def test_random_use_of_everything_adds_up(seed: int) -> None:
    """Classes, times, tenants, quotas, chains and pins at random; the audit finds nothing at any step."""
    dice = random.Random(seed)
    cache = Cache(pages=128, records=dice.choice([64, 512]), kinds=3)
    cache.store.set_quotas(dice.choice([0, 60 * PAGE]), dice.choice([0, 20 * PAGE]))
    now_s, slots = NOW_S, []
    for step in range(1500):
        number, kind = dice.randrange(400), dice.choice(cache.kinds)
        cache.put(
            number, dice.choice(list(RETENTIONS)), depth=number % 20, ttl_s=dice.choice([0, 0, 3, 5000]),
            tenant=dice.randrange(5), kind=kind,
        )  # fmt: skip
        match dice.randrange(12):
            case 0:
                slots += cache.client.arena.pin_run(kind.class_id, 1, key_of(dice.randrange(400)))
            case 1 if slots:
                cache.client.arena.unpin(slots.pop(dice.randrange(len(slots))))
            case 2:
                now_s += dice.choice([0, 1, 2, 3000])
                cache.expire(now_s)
            case 3:
                cache.store.set_retention(kind.class_id, key_of(dice.randrange(400)), dice.randrange(6))
            case 4 if step % 100 < 10:
                cache.store.set_retention(kind.class_id, None, dice.randrange(6))
            case 5:
                cache.touch(*[dice.randrange(400) for _ in range(5)])
            case 6:
                lib.store_drop(cache.store.handle, kind.class_id, key_of(dice.randrange(400)))
        if step % 5 == 0:
            assert cache.store.audit() is None
    for slot in slots:
        cache.client.arena.unpin(slot)
    for kind in cache.kinds:
        cache.store.drop_class(kind.class_id)
    stats = cache.store.stats()
    names = ("used_bytes", "ephemeral_bytes", "short_bytes", "long_bytes", "pinned_bytes", "tenants", "records_present")
    assert [stats[name] for name in names] == [0] * len(names)
    assert cache.store.audit() is None
    cache.model.close()


def test_the_terms_of_a_record_are_those_of_its_first_reservation() -> None:
    cache = Cache()
    two = cache.model.open_class((PAGE, PAGE))
    wish = WISH.pack(key_of(1), 0, 0)
    names = []
    for shard, retention in ((0, lib.STORE_RETAIN_LONG), (1, lib.STORE_RETAIN_EPHEMERAL)):
        answer = cache.store.reserve(cache.client.number, two.class_id, shard, retention, 9, wish, 1, 1 << 60)
        names += [name for name, _, _, _ in GRANT.iter_unpack(answer)]
    for name in names:
        cache.store.commit(cache.client.number, COMMITMENT.pack(name, 0))
    assert cache.stat("long_bytes") == 2 * PAGE
    assert cache.stat("ephemeral_bytes") == 0
    assert ffi.sizeof("store_terms") == 16
    cache.model.close()
