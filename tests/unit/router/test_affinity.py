"""Session affinity, as the manual's deployment page describes it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from infera.discovery.record import Role
from infera.router.affinity import Lease, SessionIdError, SessionTable, check_session_id, scope_of

LIMIT, TTL_S = 4, 10.0
A, B = ("a", 0), ("b", 1)
SCOPE = scope_of("m", "mixed", b"s")


class Sessions(RuleBasedStateMachine):
    """Against a plain dictionary with every lease and time written down."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable("both", TTL_S, LIMIT)
        self.now = 0.0
        # scope -> [target, generation, live leases, idle since]
        self.model: dict[bytes, list[object]] = {}
        self.generation = 0
        self.live: list[Lease] = []

    def expire(self) -> None:
        for scope, (_, _, held, idle_s) in list(self.model.items()):
            if not held and idle_s + TTL_S <= self.now:  # type: ignore[operator]
                del self.model[scope]

    @rule(target=leases, name=st.sampled_from([b"1", b"2", b"3", b"4", b"5", b"6"]), place=st.sampled_from([A, B]),
          is_gone=st.booleans())  # fmt: skip
    def request(self, name: bytes, place: tuple[str, int], is_gone: bool) -> Lease | None:
        scope = scope_of("m", "mixed", name)
        self.expire()
        bound = self.table.target(scope, self.now)
        assert bound == (self.model[scope][0] if scope in self.model else None)
        if bound is not None and not is_gone:
            lease: Lease | None = self.table.hit(scope, "mixed")
            self.model[scope][2] += 1  # type: ignore[operator]
        else:
            lease = self.table.select(scope, "mixed", place)
            if bound is None and len(self.model) == LIMIT:
                assert lease is None
                return None
            self.generation += 1
            self.model[scope] = [place, self.generation, 1, 0.0]
        assert lease is not None
        self.live.append(lease)
        return lease

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is None:
            return
        self.table.release(lease, self.now)
        if lease in self.live:
            self.live = [entry for entry in self.live if entry is not lease]
            found = self.model.get(lease.scope)
            if found is not None and found[1] == lease.generation:
                found[2] -= 1  # type: ignore[operator]
                found[3] = self.now

    @rule(lease=leases)
    def fail(self, lease: Lease | None) -> None:
        if lease is None:
            return
        self.table.invalidate(lease)
        if lease in self.live:
            self.live = [entry for entry in self.live if entry is not lease]
            found = self.model.get(lease.scope)
            if found is not None and found[1] == lease.generation:
                del self.model[lease.scope]

    @rule(seconds=st.floats(0, TTL_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def books_are_right(self) -> None:
        assert self.table.active_leases["mixed"] == len(self.live)
        assert len(self.table) <= LIMIT
        for scope in [scope_of("m", "mixed", b"%d" % number) for number in range(1, 7)]:
            self.expire()
            bound = self.table.target(scope, self.now)
            assert bound == (self.model[scope][0] if scope in self.model else None)
        assert len(self.table) == len(self.model)

    def teardown(self) -> None:
        for lease in self.live:
            self.table.release(lease, self.now)
        assert self.table.active_leases["mixed"] == 0
        self.table.target(SCOPE, self.now + TTL_S)
        assert len(self.table) == 0


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("mode", "covered"),
    [("off", set()), ("prefill", {"prefill"}), ("both", {"prefill", "decode", "mixed"})],
)
def test_modes(mode: str, covered: set[str]) -> None:
    table = SessionTable(mode)  # type: ignore[arg-type]
    roles: list[Role] = ["mixed", "prefill", "decode"]
    assert {role for role in roles if table.covers(role)} == covered


def test_scopes_are_kept_apart() -> None:
    scopes = {
        scope_of(model, role, session)
        for model in ("m", "n", "mm")
        for role in ("mixed", "prefill", "decode")
        for session in (b"s", b"t", b"ms")
    }
    assert len(scopes) == 27


def test_a_lease_keeps_a_binding_alive_and_idle_time_counts_from_its_end() -> None:
    table = SessionTable("both", TTL_S)
    lease = table.select(SCOPE, "mixed", A)
    assert lease is not None
    assert table.target(SCOPE, 1_000.0) == A
    table.release(lease, 1_000.0)
    assert table.target(SCOPE, 1_000.0 + TTL_S - 0.1) == A
    assert table.target(SCOPE, 1_000.0 + TTL_S) is None
    assert table.expired == 1


def test_an_old_failure_does_not_delete_a_newer_binding() -> None:
    table = SessionTable("both", TTL_S)
    old = table.select(SCOPE, "mixed", A)
    new = table.select(SCOPE, "mixed", B)
    assert old is not None
    assert new is not None
    table.invalidate(old)
    assert table.target(SCOPE, 0.0) == B
    table.invalidate(new)
    assert table.target(SCOPE, 0.0) is None
    assert table.counts["invalidated", "mixed"] == 1


def test_at_the_limit_new_sessions_are_routed_normally_and_nobody_is_evicted() -> None:
    table = SessionTable("both", TTL_S, bindings_max=2)
    scopes = [scope_of("m", "mixed", name) for name in (b"1", b"2", b"3")]
    leases = [table.select(scope, "mixed", A) for scope in scopes]
    assert leases[2] is None
    assert [table.target(scope, 0.0) for scope in scopes] == [A, A, None]
    assert table.counts["fallbacks", "mixed"] == 1
    assert leases[0] is not None
    table.release(leases[0], 0.0)
    assert table.target(scopes[2], TTL_S) is None
    assert table.select(scopes[2], "mixed", B) is not None, "an idle one expired and made room"


@pytest.mark.parametrize("values", [[b"a", b"a"], [b""], [b"x" * 1025], [b"a", b"b", b"c"]])
def test_ids_that_are_refused(values: list[bytes]) -> None:
    with pytest.raises(SessionIdError, match="X-Session-ID"):
        check_session_id(values)


@pytest.mark.parametrize(("values", "found"), [([], None), ([b"a"], b"a"), ([b"x" * 1024], b"x" * 1024)])
def test_ids_that_are_taken(values: list[bytes], found: bytes | None) -> None:
    assert check_session_id(values) == found
