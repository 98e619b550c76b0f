"""`--pd-prefill-guard-release`: when the prefill side of a disaggregated request is free of its load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.router.core import RouterCore
from infera.router.load import Ticket
from infera.router.pair import GuardRelease, PairAccount
from tests.support.placement import STREAM, core, option

STEPS = ["prefill_consumed", "prefill_failed", "first_token", "done", "decode_failed"]


def pair(release: GuardRelease) -> tuple[RouterCore, PairAccount, Ticket, Ticket]:
    router = core()
    _, prefill = router.pick([option(1)], replace(STREAM, role="prefill"), now=0.0)
    _, decode = router.pick([option(2)], replace(STREAM, role="decode"), now=0.0)
    return router, PairAccount(router, prefill, decode, release), prefill, decode


def test_decode_holds_both_until_decode_ends() -> None:
    router, account, prefill, _ = pair("decode")
    account.first_token(now=1.0)
    account.prefill_consumed(now=1.0)
    assert router.loads.of(prefill.key).queued_prefill_tokens > 0
    account.done(now=2.0)
    assert router.loads.ticket_count == 0


def test_completion_frees_prefill_once_its_whole_response_was_read() -> None:
    router, account, prefill, decode = pair("completion")
    account.first_token(now=1.0)
    assert router.loads.of(prefill.key).active_requests == 1, "headers alone do not free it"
    account.prefill_consumed(now=1.0)
    assert router.loads.of(prefill.key).active_requests == 0
    assert router.loads.of(decode.key).active_requests == 1
    account.done(now=2.0)
    assert router.loads.ticket_count == 0


@pytest.mark.parametrize("release", ["decode", "completion"])
def test_a_failed_or_given_up_prefill_frees_its_entry(release: GuardRelease) -> None:
    router, account, prefill, decode = pair(release)
    account.prefill_failed(now=1.0)
    assert router.loads.of(prefill.key).active_requests == 0
    assert router.loads.of(decode.key).active_requests == 1
    account.decode_failed(now=2.0)
    assert router.loads.ticket_count == 0


@given(st.sampled_from(["decode", "completion"]), st.lists(st.sampled_from(STEPS), max_size=12))
def test_in_any_order_everything_is_released_once(release: GuardRelease, steps: list[str]) -> None:
    router, account, _, _ = pair(release)
    for now, step in enumerate([*steps, "done"]):
        getattr(account, step)(now=float(now))
        assert 0 <= router.loads.ticket_count <= 2
    assert router.loads.ticket_count == 0
