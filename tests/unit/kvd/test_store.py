"""The store against a naive model, and its limits by name."""

from __future__ import annotations

import mmap
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from infera_core import ffi, lib

from kvd.protocol import GRANT, WISH
from kvd.store import RECORDS_MAX, Store, StoreRefusedError, index_bytes, ledger_bytes, record_capacity
from tests.support.store_model import INSTANCE, LIFETIME_NS, Client, Kind, StoreModel

MIB = 1 << 20
GEOMETRIES = {
    # Names say what runs out first.
    "space": {"data_bytes": MIB, "records": 1024},
    "records": {"data_bytes": 4 * MIB, "records": 32},
    "one bucket": {"data_bytes": MIB, "records": 8},
    "odd size": {"data_bytes": MIB + 5 * 4096, "records": 256},
}
SHAPES: list[tuple[int, ...]] = [
    (4096,), (100, 5000), (1, 1, 1), (40_000,), (100_000, 3), (4096,) * 8, (300_000,), (12_288, 12_288)
]  # fmt: skip


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 4


class Driver:
    """Random operations. What they led to is counted, so that a test can see that all of it happened."""

    def __init__(self, geometry: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.model = StoreModel(**GEOMETRIES[geometry], seed=seed)  # type: ignore[arg-type]
        shapes = self.dice.sample(SHAPES, 4)
        for shape in shapes:
            self.model.open_class(shape)
        for _ in range(3):
            self.model.attach()
        self.keys = [key_of(i) for i in range(self.dice.choice([12, 60, 300]))]

    def client(self) -> Client:
        if not self.model.clients:
            self.model.attach()
        return self.dice.choice(list(self.model.clients.values()))

    def kind(self) -> Kind:
        return self.dice.choice(self.model.kinds)

    def known(self) -> tuple[Kind, bytes]:
        """A class and a key, mostly of something present."""
        if self.model.told_present and self.dice.random() < 0.8:
            class_id, key = self.dice.choice(sorted(self.model.told_present))
            return next(kind for kind in self.model.kinds if kind.class_id == class_id), key
        return self.kind(), self.dice.choice(self.keys)

    def step(self) -> None:
        actions = [self.save] * 6 + [self.reserve] * 3 + [self.finish] * 4 + [self.pin] * 3 + [self.unpin] * 3
        actions += [self.touch, self.drop, self.expire, self.give_up, self.come_and_go]
        self.dice.choice(actions)()

    def save(self) -> None:
        client, kind = self.client(), self.kind()
        keys = self.dice.sample(self.keys, self.dice.randint(1, 4))
        for shard in range(len(kind.shard_bytes)):
            before = set(client.reservations)
            self.model.reserve(client, kind, shard, keys)
            for name in set(client.reservations) - before:
                self.model.commit(client, name)

    def reserve(self) -> None:
        kind = self.kind()
        shard = self.dice.randrange(len(kind.shard_bytes))
        self.model.reserve(self.client(), kind, shard, self.dice.sample(self.keys, self.dice.randint(1, 3)))

    def finish(self) -> None:
        client = self.client()
        if client.reservations:
            self.model.commit(client, self.dice.choice(list(client.reservations)))
        elif self.dice.random() < 0.1:
            self.model.commit(client, self.dice.getrandbits(64))

    def give_up(self) -> None:
        client = self.client()
        name = self.dice.choice(list(client.reservations)) if client.reservations else 12345
        self.model.give_up(client, name)

    def pin(self) -> None:
        client = self.client()
        if len(client.pins) < 6:
            self.model.pin(client, *self.known())

    def unpin(self) -> None:
        client = self.client()
        if client.pins:
            self.model.unpin(client, self.dice.randrange(len(client.pins)))

    def touch(self) -> None:
        self.model.touch(self.kind(), self.dice.sample(self.keys, 5))

    def drop(self) -> None:
        if self.dice.random() < 0.1:
            self.model.drop_class(self.kind())
        else:
            self.model.drop(*self.known())

    def expire(self) -> None:
        self.model.expire(self.dice.randrange(LIFETIME_NS))

    def come_and_go(self) -> None:
        if len(self.model.clients) < 5 and self.dice.random() < 0.5:
            self.model.attach()
        else:
            self.model.detach(self.client())


HAPPENED: Counter[str] = Counter()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_random_operations_agree_with_the_model(geometry: str, seed: int) -> None:
    driver = Driver(geometry, seed)
    for number in range(300):
        driver.step()
        driver.model.check()
        if number % 20 == 0:
            driver.model.check_look_ups()
    driver.model.check(all_bytes=True)
    driver.model.check_look_ups()
    for client in list(driver.model.clients.values()):
        driver.model.detach(client)
    driver.model.check(all_bytes=True)
    assert not driver.model.quarantine
    HAPPENED.update(driver.model.counts)
    driver.model.close()


def test_the_random_operations_met_every_case() -> None:
    if not HAPPENED:
        pytest.skip("needs the tests before it")
    cases = [f"reserve {status}" for status in (lib.STORE_OK, lib.STORE_EXISTS, lib.STORE_BUSY, lib.STORE_NO_SPACE)]
    cases += [f"commit {lib.STORE_OK}", f"commit {lib.STORE_STALE}", f"drop {lib.STORE_PINNED}"]
    cases += [f"drop {lib.STORE_OK}", "pinned", "removed", "expired"]
    assert all(HAPPENED[case] for case in cases), HAPPENED


@pytest.fixture
def model() -> Iterator[StoreModel]:
    made = StoreModel(data_bytes=4 * MIB, records=1024)
    yield made
    made.check(all_bytes=True)
    made.check_look_ups()
    made.close()


def save(model: StoreModel, client: Client, kind: Kind, keys: list[bytes]) -> list[int]:
    statuses: list[int] = []
    for shard in range(len(kind.shard_bytes)):
        before = set(client.reservations)
        statuses = model.reserve(client, kind, shard, keys)
        for name in set(client.reservations) - before:
            model.commit(client, name)
    return statuses


# ---- limits ----


def test_a_client_has_a_largest_number_of_reservations(model: StoreModel) -> None:
    """Held reservations are counted; the first over the limit is refused, and one given up makes room."""
    kind = model.open_class((1,) * 8)
    number = model.attach().number
    most, held = lib.STORE_RESERVATIONS_PER_CLIENT_MAX, []
    statuses: Counter[int] = Counter()
    for i in range(most // 8 // 64 + 1):
        for shard in range(8):
            wishes = b"".join(WISH.pack(key_of(i * 64 + j), 1, 0) for j in range(64))
            answer = model.store.reserve(number, kind.class_id, shard, lib.STORE_RETAIN_SHORT, 0, wishes, 1000, 1100)
            held += [name for name, _, status, _ in GRANT.iter_unpack(answer) if status == lib.STORE_OK]
            statuses.update(status for _, _, status, _ in GRANT.iter_unpack(answer))
    # 4 MiB hold 1024 shards of one unit: space runs out first here, and says so.
    assert set(statuses) == {lib.STORE_OK, lib.STORE_NO_SPACE}
    model.store.give_up(number, b"".join(name.to_bytes(8, "little") for name in held))


def test_reservations_over_the_limit_are_refused() -> None:
    model = StoreModel(data_bytes=64 * MIB, records=16384)
    kind = model.open_class((1,))
    client, other = model.attach(), model.attach()
    most = lib.STORE_RESERVATIONS_PER_CLIENT_MAX
    wishes = b"".join(WISH.pack(key_of(i), 1, 0) for i in range(most + 1))
    grants = model.store.reserve(client.number, kind.class_id, 0, lib.STORE_RETAIN_SHORT, 0, wishes, 1000, 1100)
    answer = list(GRANT.iter_unpack(grants))
    assert [status for _, _, status, _ in answer] == [lib.STORE_OK] * most + [lib.STORE_LIMIT]
    assert model.store.stats()["reserve_limit_total"] == 1
    assert model.reserve(other, kind, 0, [key_of(most + 7)]) == [lib.STORE_OK]
    model.store.give_up(client.number, answer[0][0].to_bytes(8, "little"))
    last = WISH.pack(key_of(most), 1, 0)
    ((_, _, status, _),) = GRANT.iter_unpack(
        model.store.reserve(client.number, kind.class_id, 0, lib.STORE_RETAIN_SHORT, 0, last, 1000, 1100)
    )
    assert status == lib.STORE_OK
    model.detach(client)
    assert model.store.stats()["reservations"] == 1
    assert model.store.audit() is None
    model.close()


def test_quarantined_reservations_count_against_the_limit() -> None:
    """One client cannot put more space out of use than its reservations cover."""
    model = StoreModel(data_bytes=64 * MIB, records=16384)
    kind = model.open_class((1,))
    client = model.attach()
    most = lib.STORE_RESERVATIONS_PER_CLIENT_MAX
    wishes = b"".join(WISH.pack(key_of(i), 1, 0) for i in range(most))
    model.store.reserve(client.number, kind.class_id, 0, lib.STORE_RETAIN_SHORT, 0, wishes, 1000, 1100)
    model.store.expire(1101, 10**9)
    assert model.store.stats()["quarantined_bytes"] == most * 4096
    assert model.store.stats()["records_incomplete"] == 0
    more = WISH.pack(key_of(most), 1, 0)
    ((_, _, status, _),) = GRANT.iter_unpack(
        model.store.reserve(client.number, kind.class_id, 0, lib.STORE_RETAIN_SHORT, 0, more, 1102, 1200)
    )
    assert status == lib.STORE_LIMIT
    model.detach(client)
    assert model.store.stats()["quarantined_bytes"] == 0
    assert model.store.audit() is None
    model.close()


def test_clients_have_a_largest_number(model: StoreModel) -> None:
    clients = [model.attach() for _ in range(lib.STORE_CLIENTS_MAX)]
    with pytest.raises(StoreRefusedError, match="at most 256"):
        model.attach()
    model.detach(clients[100])
    assert model.attach().number == 100


def test_classes_have_a_largest_number(model: StoreModel) -> None:
    for number in range(lib.ARENA_CLASSES_MAX):
        model.open_class((4096,), name=number)
    with pytest.raises(StoreRefusedError, match=r"256 classes.*restart infera-kvd"):
        model.open_class((4096,), name=1000)
    assert model.store.stats()["classes"] == lib.ARENA_CLASSES_MAX
    known = model.store.open_class((5).to_bytes(16, "big"), 2, (4096,), "model-5")
    assert known == model.kinds[5].class_id
    client = model.attach()
    save(model, client, model.kinds[255], [key_of(1)])
    assert client.arena.probe_run(model.kinds[255].class_id, 1, key_of(1)) == 1


def test_record_sizes_have_a_largest_number(model: StoreModel) -> None:
    for units in range(1, 65):
        model.open_class((units * 4096,))
    with pytest.raises(StoreRefusedError, match="64 record sizes"):
        model.open_class((65 * 4096,))
    model.open_class((64 * 4096 - 1,))  # a known size still opens


def test_shards_have_a_largest_number(model: StoreModel) -> None:
    model.open_class((1,) * 8)
    for shards in (0, 9, 64, 65):
        with pytest.raises(StoreRefusedError, match="--shards-max"):
            model.store.open_class(b"s" * 16, 0, (1,) * shards, "m")


def test_all_64_shards_work() -> None:
    model = StoreModel(data_bytes=4 * MIB, records=64, shards_max=64)
    kind, client = model.open_class((10,) * 64), model.attach()
    save(model, client, kind, [key_of(1)])
    assert model.pin(client, kind, key_of(1)) is not None
    model.check(all_bytes=True)
    model.close()


@pytest.mark.parametrize("size", [4 * MIB + 1, 2**40, 2**63 - 1])
def test_a_record_larger_than_the_arena_is_refused_by_size(model: StoreModel, size: int) -> None:
    with pytest.raises(StoreRefusedError, match="does not fit"):
        model.store.open_class(b"s" * 16, 0, (size,), "m")
    with pytest.raises(StoreRefusedError, match="does not fit"):
        model.store.open_class(b"s" * 16, 0, (3 * MIB, 3 * MIB), "m")


def test_a_record_in_the_arenas_odd_end_is_too_large_not_too_many() -> None:
    """The last units of an arena that do not fill a slab hold nothing; a record that needs them does not fit."""
    model = StoreModel(data_bytes=MIB + 5 * 4096, records=64)
    with pytest.raises(StoreRefusedError, match="does not fit"):
        model.open_class((MIB + 4 * 4096,))
    kind, client = model.open_class((MIB,)), model.attach()
    save(model, client, kind, [key_of(1), key_of(2)])
    model.check(all_bytes=True)
    assert model.store.stats()["records_present"] == 1
    model.close()


def test_a_class_with_another_geometry_is_refused(model: StoreModel) -> None:
    model.store.open_class(b"s" * 16, 0, (100, 100), "m")
    for shards in ((100,), (100, 101), (100, 100, 100)):
        with pytest.raises(StoreRefusedError, match="namespace digest must differ"):
            model.store.open_class(b"s" * 16, 0, shards, "m")
    model.store.open_class(b"s" * 16, 1, (100,), "m")
    with pytest.raises(ValueError, match="16 bytes"):
        model.store.open_class(b"short", 0, (100,), "m")


def test_an_index_has_a_largest_number_of_records() -> None:
    index = mmap.mmap(-1, index_bytes(8, 1, MIB))
    with pytest.raises(MemoryError):
        Store(
            index, instance=INSTANCE, generation=1, records=RECORDS_MAX + 1, shards_max=1, data_bytes=MIB, seed=(1, 2)
        )


@pytest.mark.parametrize(("wanted", "real"), [(1, 8), (8, 8), (9, 16), (1000, 1024)])
def test_records_are_rounded_up_to_whole_buckets(wanted: int, real: int) -> None:
    assert record_capacity(wanted) == real


def test_nonsense_is_refused_without_harm(model: StoreModel) -> None:
    kind, client = model.open_class((100, 100)), model.attach()
    wish = WISH.pack(key_of(1), 1, 0)
    for number, class_id, shard in (
        (99, 0, 0),
        (2**32 - 1, 0, 0),
        (0, 7, 0),
        (0, 2**32 - 1, 0),
        (0, 0, 2),
        (0, 0, 65535),
    ):
        answer = model.store.reserve(number, class_id, shard, lib.STORE_RETAIN_SHORT, 0, wish, 1000, 1100)
        assert [status for _, _, status, _ in GRANT.iter_unpack(answer)] == [lib.STORE_BAD_REQUEST]
    assert model.store.commit(99, bytes(16)) == lib.STORE_BAD_REQUEST.to_bytes(4, "little")
    model.store.give_up(99, bytes(8))
    model.store.touch(10**6, key_of(1))
    assert lib.store_drop(model.store._handle, 10**6, key_of(1)) == lib.STORE_BAD_REQUEST
    client.arena.unpin(2**32 - 1)
    assert client.arena.locate(2**32 - 1, 0) is None
    assert client.arena.locate(0, 8) is None
    with pytest.raises(ValueError, match="16 bytes"):
        client.arena.pin_run(kind.class_id, 3, b"short")


# ---- who may write where ----


def test_space_of_a_late_but_living_writer_is_not_reused() -> None:
    """Past its deadline the record leaves the index, the space stays its writer's until that gives up or dies."""
    model = StoreModel(data_bytes=MIB, records=1024)
    kind = model.open_class((MIB // 4,))
    late, other = model.attach(), model.attach()
    model.reserve(late, kind, 0, [key_of(1)])
    model.expire(LIFETIME_NS + 1)
    model.check()
    assert model.store.stats()["quarantined_bytes"] == MIB // 4
    for i in range(10, 30):
        assert save(model, other, kind, [key_of(i)]) == [lib.STORE_OK]
        (reservation,) = late.reservations.values()
        model.write(reservation, b"\xdd" * (MIB // 4))  # it goes on writing
        model.check(all_bytes=True)
    assert model.store.stats()["records_present"] == 3
    (name,) = late.reservations
    model.give_up(late, name)
    assert model.store.stats()["quarantined_bytes"] == 0
    for i in range(30, 34):
        save(model, other, kind, [key_of(i)])
    model.check(all_bytes=True)
    assert model.store.stats()["records_present"] == 4
    model.close()


def test_a_late_commit_is_stale_and_frees_its_space(model: StoreModel) -> None:
    kind, client = model.open_class((100,)), model.attach()
    model.reserve(client, kind, 0, [key_of(1)])
    (name,) = client.reservations
    model.expire(LIFETIME_NS + 1)
    assert model.commit(client, name) == lib.STORE_STALE
    assert model.commit(client, name) == lib.STORE_STALE
    assert model.store.stats()["used_bytes"] == 0
    assert model.store.stats()["commit_stale_total"] == 2


def test_a_key_can_be_saved_again_while_its_late_writer_lives(model: StoreModel) -> None:
    """Mooncake#849: an unfinished put must not block its key."""
    kind, late, other = model.open_class((100,)), model.attach(), model.attach()
    model.reserve(late, kind, 0, [key_of(1)])
    assert model.reserve(other, kind, 0, [key_of(1)]) == [lib.STORE_BUSY]
    model.expire(LIFETIME_NS + 1)
    assert save(model, other, kind, [key_of(1)]) == [lib.STORE_OK]
    model.commit(late, next(iter(late.reservations)))
    model.check(all_bytes=True)


def test_two_writers_of_one_dropped_record_each_keep_their_space(model: StoreModel) -> None:
    kind, first, second = model.open_class((100, 100)), model.attach(), model.attach()
    model.reserve(first, kind, 0, [key_of(1)])
    model.reserve(second, kind, 1, [key_of(1)])
    model.expire(LIFETIME_NS + 1)
    assert model.store.stats()["quarantined_bytes"] == 8192
    model.detach(first)
    model.check()
    assert model.store.stats()["quarantined_bytes"] == 4096
    model.detach(second)
    assert model.store.stats()["quarantined_bytes"] == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_record_is_present_only_with_its_last_shard(model: StoreModel, order: tuple[int, int]) -> None:
    """sglang#30321: one part of a block must never be used without the other."""
    kind, clients = model.open_class((100, 5000)), [model.attach(), model.attach()]
    names = {}
    for shard in (0, 1):
        model.reserve(clients[shard], kind, shard, [key_of(1)])
        names[shard] = next(iter(clients[shard].reservations))
    model.commit(clients[order[0]], names[order[0]])
    model.check()
    assert clients[0].arena.probe_run(kind.class_id, 3, key_of(1)) == 0
    assert model.pin(clients[0], kind, key_of(1)) is None
    model.commit(clients[order[1]], names[order[1]])
    assert clients[0].arena.probe_run(kind.class_id, 3, key_of(1)) == 1
    assert model.pin(clients[0], kind, key_of(1)) is not None


def test_the_death_of_a_client_frees_everything(model: StoreModel) -> None:
    kind, dead, other = model.open_class((100, 100)), model.attach(), model.attach()
    save(model, dead, kind, [key_of(1)])
    model.pin(dead, kind, key_of(1))
    model.reserve(dead, kind, 0, [key_of(2)])
    assert model.drop(kind, key_of(1)) == lib.STORE_PINNED
    model.detach(dead)
    model.check()
    assert model.drop(kind, key_of(1)) == lib.STORE_OK
    assert save(model, other, kind, [key_of(2)]) == [lib.STORE_OK]
    assert model.store.stats()["reservations"] == 0


def test_a_foreign_reservation_cannot_be_used(model: StoreModel) -> None:
    kind, owner, thief = model.open_class((100,)), model.attach(), model.attach()
    model.reserve(owner, kind, 0, [key_of(1)])
    (name,) = owner.reservations
    assert model.commit(thief, name) == lib.STORE_STALE
    model.give_up(thief, name)
    assert model.commit(owner, name) == lib.STORE_OK


# ---- pins ----


def test_an_unpin_too_many_changes_nothing(model: StoreModel) -> None:
    kind, client, other = model.open_class((100,)), model.attach(), model.attach()
    save(model, client, kind, [key_of(1)])
    pinned = model.pin(client, kind, key_of(1))
    assert pinned is not None
    model.unpin(client, 0)
    client.arena.unpin(pinned)
    assert client.arena.pins_held() == 0
    model.pin(other, kind, key_of(1))
    client.arena.unpin(pinned)
    assert model.drop(kind, key_of(1)) == lib.STORE_PINNED


def test_more_pins_than_a_byte_holds_are_a_miss(model: StoreModel) -> None:
    kind, client = model.open_class((100,)), model.attach()
    save(model, client, kind, [key_of(1)])
    for _ in range(255):
        assert model.pin(client, kind, key_of(1)) is not None
    assert model.pin(client, kind, key_of(1)) is None
    assert client.arena.pins_held() == 255
    for _ in range(255):
        assert model.drop(kind, key_of(1)) == lib.STORE_PINNED
        model.unpin(client, 0)
    assert model.drop(kind, key_of(1)) == lib.STORE_OK


def test_what_is_pinned_survives_any_pressure() -> None:
    model = StoreModel(data_bytes=MIB, records=1024)
    kind, large, client = model.open_class((4096,)), model.open_class((65536,)), model.attach()
    save(model, client, kind, [key_of(i) for i in range(256)])
    for i in range(0, 256, 20):
        model.pin(client, kind, key_of(i))
    for i in range(1000, 1050):
        save(model, client, large, [key_of(i)])
        save(model, client, kind, [key_of(i)])
        model.check()
    assert all(model.drop(kind, key_of(i)) == lib.STORE_PINNED for i in range(0, 256, 20))
    model.check(all_bytes=True)
    model.close()


def test_when_all_is_pinned_a_save_is_refused_and_nothing_lost() -> None:
    model = StoreModel(data_bytes=MIB, records=1024)
    kind, client = model.open_class((MIB // 4,)), model.attach()
    save(model, client, kind, [key_of(i) for i in range(4)])
    for i in range(4):
        model.pin(client, kind, key_of(i))
    assert model.reserve(client, kind, 0, [key_of(9)]) == [lib.STORE_NO_SPACE]
    model.check(all_bytes=True)
    model.unpin(client, 2)
    assert model.reserve(client, kind, 0, [key_of(9)]) == [lib.STORE_OK]
    assert {i for i in range(4) if (kind.class_id, key_of(i)) in model.records} == {0, 1, 3}
    model.close()


# ---- eviction ----


def test_what_was_used_outlives_what_was_not() -> None:
    model = StoreModel(data_bytes=MIB, records=1024)
    kind, client = model.open_class((MIB // 4,)), model.attach()
    for i in range(4):
        save(model, client, kind, [key_of(i)])
    model.touch(kind, [key_of(0), key_of(1)])
    save(model, client, kind, [key_of(8), key_of(9)])
    save(model, client, kind, [key_of(10), key_of(11)])
    model.check()
    assert {key for _, key in model.told_present} == {key_of(0), key_of(1), key_of(10), key_of(11)}
    model.close()


def test_space_follows_demand_from_one_size_to_another() -> None:
    model = StoreModel(data_bytes=MIB, records=1024)
    small, large, client = model.open_class((4096,)), model.open_class((MIB // 2,)), model.attach()
    for turn in range(3):
        save(model, client, small, [key_of(turn * 1000 + i) for i in range(256)])
        model.check()
        for i in range(4):
            assert save(model, client, large, [key_of(turn * 1000 + i)]) == [lib.STORE_OK]
            model.check(all_bytes=True)
    model.close()


def test_nothing_is_refused_while_all_may_be_evicted() -> None:
    dice = random.Random(5)
    model = StoreModel(data_bytes=MIB, records=1024)
    kinds, client = [model.open_class((units * 4096,)) for units in (1, 3, 7, 17, 40, 90, 256)], model.attach()
    for i in range(400):
        assert save(model, client, dice.choice(kinds), [key_of(i)]) == [lib.STORE_OK]
        model.check()
    model.close()


# ---- look-ups and headers ----


def test_keys_of_one_class_are_not_found_in_another(model: StoreModel) -> None:
    """vllm#55904: what another layout wrote must not be read."""
    first, second, client = model.open_class((100,)), model.open_class((100,)), model.attach()
    save(model, client, first, [key_of(1)])
    assert client.arena.probe_run(second.class_id, 1, key_of(1)) == 0
    save(model, client, second, [key_of(1)])
    assert model.pin(client, first, key_of(1)) != model.pin(client, second, key_of(1))


@pytest.mark.parametrize(
    ("offset", "status"),
    [(0, lib.ARENA_BAD_MAGIC), (8, lib.ARENA_BAD_VERSION), (16, lib.ARENA_BAD_CHECK), (60, lib.ARENA_BAD_CHECK)],
)
def test_a_damaged_header_is_refused(model: StoreModel, offset: int, status: int) -> None:
    damaged = bytearray(model._index)
    damaged[offset] ^= 1
    got = ffi.new("int *")
    view = lib.arena_view_open(ffi.from_buffer(damaged), len(damaged), ffi.NULL, 4 * MIB, ffi.NULL, 0, got)
    assert view == ffi.NULL
    assert got[0] == status


def test_files_too_short_for_their_header_are_refused(model: StoreModel) -> None:
    index, got = ffi.from_buffer(model._index), ffi.new("int *")
    ledger = bytearray(ledger_bytes(1024))
    for index_size, data_size, ledger_size, status in (
        (100, 4 * MIB, 0, lib.ARENA_BAD_GEOMETRY),
        (len(model._index) - 4096, 4 * MIB, 0, lib.ARENA_BAD_GEOMETRY),
        (len(model._index), 4 * MIB - 1, 0, lib.ARENA_BAD_GEOMETRY),
        (len(model._index), 4 * MIB, len(ledger) - 1, lib.ARENA_BAD_GEOMETRY),
        (len(model._index), 4 * MIB, len(ledger), lib.ARENA_BAD_MAGIC),
    ):
        pins = ffi.from_buffer(ledger) if ledger_size else ffi.NULL
        view = lib.arena_view_open(index, index_size, ffi.NULL, data_size, pins, ledger_size, got)
        assert view == ffi.NULL
        assert got[0] == status
    ffi.release(index)


def test_a_view_without_a_ledger_cannot_pin(model: StoreModel) -> None:
    kind, client = model.open_class((100,)), model.attach()
    save(model, client, kind, [key_of(1)])
    assert lib.arena_pin(model._looker, kind.class_id, 1, key_of(1)) == lib.ARENA_NO_SLOT
    assert lib.arena_pins_held(model._looker) == 0


def test_the_index_cannot_be_written_by_a_client(model: StoreModel) -> None:
    client = model.attach()
    with pytest.raises(TypeError, match="read-only|readonly"):
        client.arena._index[0] = 1


# ---- events ----


def test_a_full_event_queue_is_announced_once_and_the_snapshot_is_right() -> None:
    model = StoreModel(data_bytes=MIB, records=1024)
    kind, client = model.open_class((4096,)), model.attach()
    wishes = b"".join(WISH.pack(key_of(i), 1, 0) for i in range(256))
    for _ in range(lib.STORE_EVENTS_MAX // 512 + 1):
        grants = model.store.reserve(client.number, kind.class_id, 0, lib.STORE_RETAIN_SHORT, 0, wishes, 1000, 1100)
        names = [name for name, _, status, _ in GRANT.iter_unpack(grants) if status == lib.STORE_OK]
        assert len(names) == 256
        model.store.commit(client.number, b"".join(name.to_bytes(8, "little") + bytes(8) for name in names))
        model.store.drop_class(kind.class_id)
    events, lost = model.store.take_events()
    assert lost
    assert sum(len(event.keys) // 16 for event in events) == lib.STORE_EVENTS_MAX
    assert model.store.stats()["events_lost_total"] == 512 * (lib.STORE_EVENTS_MAX // 512 + 1) - lib.STORE_EVENTS_MAX
    assert model.store.take_events() == ([], False)
    assert list(model.store.snapshot()) == []
    model.close()


# ---- damage ----


def test_a_damaged_record_is_dropped_when_it_is_verified(model: StoreModel) -> None:
    kind, client = model.open_class((5000, 100)), model.attach()
    for shard in (0, 1):
        model.reserve(client, kind, shard, [key_of(1)])
        (name,) = client.reservations
        reservation = client.reservations[name]
        content = reservation.record.content(shard)
        model.write(reservation, content)
        checksum = lib.checksum_bytes(ffi.from_buffer(content), len(content))
        model.store.commit(client.number, name.to_bytes(8, "little") + checksum.to_bytes(8, "little"))
        reservation.record.committed[shard] = checksum
        del client.reservations[name], reservation.record.reserved[shard]
    record = model.records[kind.class_id, key_of(1)]
    assert model.store.verify(model.data, kind.class_id, key_of(1) + key_of(2)) == 0
    model.check(all_bytes=True)
    model.data[record.extents[0] + 4999] ^= 1
    model.pin(client, kind, key_of(1))
    assert model.store.verify(model.data, kind.class_id, key_of(1)) == 0  # a reader holds it: later
    assert (kind.class_id, key_of(1)) in model.records
    model.unpin(client, 0)
    assert model.store.verify(model.data, kind.class_id, key_of(1)) == 1
    model.check()
    assert not model.records
    assert model.store.stats()["damaged_total"] == 1


def test_descriptors_are_not_leaked() -> None:
    before = len(os.listdir("/proc/self/fd"))
    model = StoreModel(data_bytes=MIB, records=64)
    model.attach()
    model.close()
    assert len(os.listdir("/proc/self/fd")) == before
