"""What the agent asks engines and servers over HTTP. Every call has a deadline and a size limit."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from infera.discovery.record import (
    PROBE_MESSAGES,
    PROBE_TEXT,
    EventRank,
    RankLoad,
    WorkerRecord,
    encode_record,
)
from infera.engine.load import parse_load

TIMEOUT_S = 2.0
RESPONSE_BYTES_MAX = 4 << 20


class EndpointError(Exception):
    """The other side did not answer, or not as expected; the text says what."""


class ForeignEngineError(EndpointError):
    """What answers is not the engine this agent stands beside."""


@dataclass(frozen=True)
class EngineDescription:
    """What an engine says of itself."""

    model: str
    model_path: str
    aliases: list[str] = field(default_factory=list)
    max_context_tokens: int | None = None
    block_size_tokens: int | None = None
    kv_capacity_tokens: int | None = None


def request(
    base_url: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """One HTTP request; returns status and body.

    Raises:
        EndpointError: when there is no whole answer within the deadline.
    """
    parts = urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read(RESPONSE_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as error:
        raise EndpointError(f"{base_url} does not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if len(content) > RESPONSE_BYTES_MAX:
        raise EndpointError(f"{base_url}{path} answered with more than {RESPONSE_BYTES_MAX} bytes")
    return response.status, content


def get_json(base_url: str, path: str) -> Any:
    """The JSON document at a path.

    Raises:
        EndpointError: when there is none.
    """
    status, content = request(base_url, "GET", path)
    if status != 200:
        raise EndpointError(f"{base_url}{path} answered {status}")
    try:
        return json.loads(content)
    except ValueError as error:
        raise EndpointError(f"{base_url}{path} is not JSON") from error


class EngineEndpoint:
    """An engine's own HTTP surface (vLLM and those that follow it)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def is_healthy(self) -> bool:
        """Whether /health answers 200."""
        try:
            return request(self.url, "GET", "/health")[0] == 200
        except EndpointError:
            return False

    def describe(self) -> EngineDescription:
        """Model, context and cache geometry as resolved by the running engine.

        Raises:
            EndpointError: when /v1/models does not list a model.
        """
        listed = get_json(self.url, "/v1/models")
        try:
            models = [entry for entry in listed["data"] if not entry.get("parent")]
            first = models[0]
            block_size, blocks = self._cache_geometry()
            return EngineDescription(
                model=str(first["id"]),
                model_path=str(first.get("root") or ""),
                aliases=[str(entry["id"]) for entry in models[1:]],
                max_context_tokens=first.get("max_model_len"),
                block_size_tokens=block_size,
                kv_capacity_tokens=block_size * blocks if block_size and blocks else None,
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self.url}/v1/models lists no model") from error

    def adapters(self) -> dict[str, str]:
        """LoRA adapters loaded at the moment: name to path, as the engine was given it.

        Raises:
            EndpointError: when /v1/models does not list models.
        """
        listed = get_json(self.url, "/v1/models")
        try:
            return {str(entry["id"]): str(entry.get("root") or "") for entry in listed["data"] if entry.get("parent")}
        except (KeyError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self.url}/v1/models lists no models") from error

    def _cache_geometry(self) -> tuple[int | None, int | None]:
        """Block size and number of blocks, from the labels of `vllm:cache_config_info`."""
        status, content = request(self.url, "GET", "/metrics")
        found = re.search(r"^vllm:cache_config_info\{(.*)\}", content.decode(errors="replace"), re.M)
        if status != 200 or not found:
            return None, None
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1)))
        values = [labels.get("block_size", ""), labels.get("num_gpu_blocks", "")]
        sizes = [int(value) if value.isdecimal() else None for value in values]
        return sizes[0], sizes[1]

    def load(self) -> tuple[RankLoad, ...]:
        """What the engine says it is doing; empty when it does not say."""
        try:
            status, content = request(self.url, "GET", "/metrics")
        except EndpointError:
            return ()
        return parse_load(content.decode(errors="replace")) if status == 200 else ()

    def probe_ids(self, model: str) -> tuple[list[int], list[int]]:
        """The engine's token ids of the probe text and the probe chat; empty where it does not give them."""
        return (
            self._tokenize({"model": model, "prompt": PROBE_TEXT, "add_special_tokens": True}),
            self._tokenize({"model": model, "messages": PROBE_MESSAGES}),
        )

    def _tokenize(self, question: dict[str, Any]) -> list[int]:
        try:
            headers = {"Content-Type": "application/json"}
            status, content = request(self.url, "POST", "/tokenize", json.dumps(question).encode(), headers)
            tokens = json.loads(content)["tokens"] if status == 200 else []
        except (EndpointError, ValueError, KeyError, TypeError):
            return []
        return tokens if all(type(token) is int and token >= 0 for token in tokens) else []

    def event_ranks(self, topic: str) -> tuple[EventRank, ...]:
        """Where each data-parallel rank publishes, as the engine resolved it; empty when it does not say.

        Raises:
            EndpointError: when what answers publishes under another topic. Two servers can share a
                port unseen (SO_REUSEPORT), and this one is not ours.
        """
        try:
            sources = get_json(self.url, "/kv_event_sources")
            topics = {str(source.get("topic")) for source in sources.values()}
            if topics and topic not in topics:
                raise ForeignEngineError(
                    f"another engine answers at {self.url}; give each its own --port, then restart this one"
                )
            return tuple(
                EventRank(dp_rank=int(rank), pub=str(source["endpoint"]), replay=source.get("replay_endpoint"))
                for rank, source in sources.items()
                if source.get("enable_kv_cache_events")
            )
        except ForeignEngineError:
            raise
        except (EndpointError, KeyError, TypeError, ValueError, AttributeError):
            return ()


class ServerEndpoint:
    """A server's embedded registry."""

    def __init__(self, url: str, join_token: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if join_token:
            self._headers["Authorization"] = f"Bearer {join_token}"

    def register(self, record: WorkerRecord) -> float:
        """Register or heartbeat; returns the lease's seconds.

        Raises:
            EndpointError: when the server does not answer, or refuses, with its words.
        """
        path = f"/internal/v1/workers/{record.incarnation}"
        status, content = request(self.url, "PUT", path, encode_record(record), self._headers)
        try:
            answer = json.loads(content)
            if status == 200:
                return float(answer["lease_ttl_s"])
            raise EndpointError(f"{status}: {answer['error']['message']}")
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{self.url} answered {status} to a registration") from error

    def deregister(self, incarnation: str) -> None:
        """Leave. A server that is away will find out by the lease."""
        with contextlib.suppress(EndpointError):
            request(self.url, "DELETE", f"/internal/v1/workers/{incarnation}", None, self._headers)
