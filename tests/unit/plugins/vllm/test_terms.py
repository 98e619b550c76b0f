"""What a request asks for in kv_transfer_params; what is not understood costs the request nothing."""

from __future__ import annotations

import logging

import pytest
from infera_vllm import terms
from infera_vllm.terms import DEFAULT, Terms, terms_of


def test_what_may_be_asked_for() -> None:
    asked = {"infera_retention": "long", "infera_ttl_seconds": 60, "infera_no_load": True}
    assert terms_of(asked) == Terms("long", 60, True)
    assert not terms_of({"infera_retention": "none"}).saves
    assert terms_of({"do_remote_decode": True}) == DEFAULT


@pytest.mark.parametrize("nothing", [None, {}, [], "long", 3])
def test_nothing_asked_for(nothing: object) -> None:
    assert terms_of(nothing) == DEFAULT


@pytest.mark.parametrize(
    "asked",
    [
        {"infera_retention": "forever"},
        {"infera_retention": ["long"]},
        {"infera_ttl_seconds": 0},
        {"infera_ttl_seconds": True},
        {"infera_ttl_seconds": 1.5},
        {"infera_ttl_seconds": 10**12},
        {"infera_no_load": "yes"},
    ],
)
def test_what_is_not_understood_is_said_once_and_left_out(
    asked: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(terms, "_said", set())
    with caplog.at_level(logging.WARNING):
        assert terms_of(asked) == terms_of(asked) == DEFAULT
    assert len(caplog.messages) == 1
    assert next(iter(asked)) in caplog.text
