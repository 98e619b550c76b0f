from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.server.errors import ApiError
from infera.server.request import parse_generation_request


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff", b'{"model": 3}', b'{"stream": "yes"}', b"[" * 100_000]
)
def test_what_is_wrong_is_a_400_in_words(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_generation_request(body)
    assert caught.value.status == 400
    assert len(caught.value.message) > 10


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.text(max_size=6), json_values, max_size=4), indent=st.sampled_from([None, 2]))
def test_unknown_fields_pass_untouched(fields: dict[str, Any], indent: int | None) -> None:
    wanted = {key: value for key, value in fields.items() if key not in ("model", "stream", "stream_options")}
    body = json.dumps(wanted | {"model": "m"}, indent=indent).encode()
    request = parse_generation_request(body)
    assert request.engine_body == body
    streaming = parse_generation_request(json.dumps(wanted | {"model": "m", "stream": True}, indent=indent).encode())
    assert json.loads(streaming.engine_body) == wanted | {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_the_clients_own_stream_options_stay(options: Any) -> None:
    body = json.dumps({"model": "m", "stream": True, "stream_options": options}).encode()
    request = parse_generation_request(body)
    assert not request.adds_usage
    assert request.engine_body == body
