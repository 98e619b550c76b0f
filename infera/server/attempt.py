"""One try of a request at one worker. Until the first byte went to the client, a failure can be tried elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from infera.discovery.record import WorkerRecord
from infera.router.decision import Decision
from infera.server.asgi import Exchange
from infera.server.errors import error_body
from infera.server.request import GenerationRequest
from infera.server.sse import FrameSplitter, FrameTooLargeError, data_of, error_of, usage_of
from infera.server.state import ServerState, origin_of
from infera.server.usage import ReportedUsage, usage_of_answer, usage_of_fields
from infera.transport.errors import TransportError
from infera.transport.http_client import Headers, HttpResponse

ANSWER_BYTES_MAX: Final = 256 * 2**20
HELD_FRAMES_MAX: Final = 1024
_RELAYED_HEADERS: Final = frozenset({b"content-type", b"cache-control", b"retry-after", b"x-accel-buffering"})
_PASSED_TO_ENGINE: Final = (b"content-type", b"accept", b"traceparent", b"tracestate")
_JSON: Final = (b"content-type", b"application/json")


class AttemptFailedError(Exception):
    """The worker did not begin to answer; another may. ``reason`` is a label, ``is_breakage`` makes it suspect."""

    def __init__(self, reason: str, detail: str, *, status: int, body: bytes | None, is_breakage: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.status = status
        self.body = body
        self.is_breakage = is_breakage


@dataclass(slots=True)
class AttemptResult:
    """How a try ended that reached the client."""

    usage: ReportedUsage | None = None
    broken: TransportError | None = None


class Attempt:
    """Sends the request to one worker and relays its answer."""

    def __init__(
        self,
        state: ServerState,
        exchange: Exchange,
        request: GenerationRequest,
        record: WorkerRecord,
        chosen: Decision,
        on_first_data: Callable[[], None],
    ) -> None:
        """``on_first_data`` is called once, just before the client gets its status."""
        self._state = state
        self._exchange = exchange
        self._request = request
        self._record = record
        self._chosen = chosen
        self._on_first_data = on_first_data

    async def run(self, path: str) -> AttemptResult:
        """Raises AttemptFailedError while the client has nothing yet."""
        origin, prefix = origin_of(self._record)
        try:
            response = await self._state.client.request(
                "POST", origin, prefix + path, headers=self._headers(), body=self._request.engine_body
            )
            async with response:
                if response.status >= 500:
                    body = await response.read(ANSWER_BYTES_MAX)
                    raise AttemptFailedError(
                        f"status_{response.status}",
                        f"worker {self._record.worker_id} answered {response.status}",
                        status=response.status,
                        body=body,
                        is_breakage=False,
                    )
                kind = response.header(b"content-type") or b""
                if response.status == 200 and kind.startswith(b"text/event-stream"):
                    return await self._relay_stream(response)
                return await self._relay_whole(response)
        except TransportError as error:
            raise self._transport_failure(error) from error

    def _headers(self) -> Headers:
        headers = [(b"x-request-id", self._exchange.request_id.encode("latin-1"))]
        for name in _PASSED_TO_ENGINE:
            value = self._exchange.header(name)
            if value is not None:
                headers.append((name, value.encode("latin-1")))
        if self._record.events is not None and len(self._record.events.ranks) > 1:
            headers.append((b"x-data-parallel-rank", str(self._chosen.dp_rank).encode()))
        return headers

    async def _relay_whole(self, response: HttpResponse) -> AttemptResult:
        """Answers that are not streamed, and the engine's own refusals, passed on whole."""
        body = await response.read(ANSWER_BYTES_MAX)
        self._on_first_data()
        await self._exchange.send_whole(response.status, body, _relayed(response))
        return AttemptResult(usage_of_answer(body) if response.status == 200 else None)

    async def _relay_stream(self, response: HttpResponse) -> AttemptResult:
        """Pass frames on as they come, from the first one that holds data."""
        splitter = FrameSplitter()
        held: list[bytes] = []
        result = AttemptResult()
        try:
            while (chunk := await response.next_chunk()) is not None:
                frames = splitter.feed(chunk)
                if not self._exchange.has_started:
                    held.extend(frames)
                    refusal = self._begins(held)
                    if refusal is not None:
                        status, body = refusal
                        await self._exchange.send_whole(status, body, [_JSON])
                        return result
                    if not any(data_of(frame) for frame in held):
                        continue
                    self._on_first_data()
                    await self._exchange.start(200, _relayed(response))
                    frames = held
                wanted = self._wanted(frames, result)
                if wanted:
                    await self._exchange.send_chunk(wanted)
        except (TransportError, FrameTooLargeError) as error:
            if not self._exchange.has_started:
                raise
            await self._end_broken(error, result)
            return result
        if not self._exchange.has_started:
            raise self._failure("empty_stream", "ended its stream without any data")
        await self._exchange.send_chunk(splitter.rest(), is_last=True)
        return result

    def _begins(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """Looks at what came before the first data. An engine's refusal is returned with its status.

        Raises AttemptFailedError when the first data is an error of the engine's own.
        """
        if len(frames) > HELD_FRAMES_MAX:
            raise self._failure("no_data", f"sent {HELD_FRAMES_MAX} events without data")
        first = next((data for data in map(data_of, frames) if data), None)
        error = error_of(first) if first is not None else None
        if error is None or first is None:
            return None
        inner = error.get("error")
        code = inner.get("code") if isinstance(inner, dict) else error.get("code")
        if isinstance(code, int) and 400 <= code < 500:
            return code, first
        status = code if isinstance(code, int) and 500 <= code < 600 else 502
        raise AttemptFailedError(
            "error_frame",
            f"worker {self._record.worker_id} answered 200 and then an error",
            status=status,
            body=first,
            is_breakage=False,
        )

    def _wanted(self, frames: list[bytes], result: AttemptResult) -> bytes:
        """The frames for the client: all of them, but for the usage we asked for ourselves."""
        kept: list[bytes] = []
        for frame in frames:
            if b'"usage"' in frame:
                data = data_of(frame)
                usage = usage_of(data) if data is not None else None
                if usage is not None:
                    result.usage = usage_of_fields(usage["usage"])
                    if self._request.adds_usage:
                        continue
            kept.append(frame)
        return kept[0] if len(kept) == 1 else b"".join(kept)

    async def _end_broken(self, error: Exception, result: AttemptResult) -> None:
        """Tell the client that the answer is not whole: an error event, and no end mark."""
        message = f"worker {self._record.worker_id} broke off in the middle of the answer: {error}"
        body = error_body(message, kind="upstream_error", code="stream_broken")
        await self._exchange.send_chunk(b"data: " + body + b"\n\n", is_last=True)
        result.broken = error if isinstance(error, TransportError) else TransportError(str(error))

    def _transport_failure(self, error: TransportError) -> AttemptFailedError:
        status = 504 if error.reason in ("first_byte_timeout", "idle_timeout") else 502
        return AttemptFailedError(
            error.reason,
            f"worker {self._record.worker_id}: {error}",
            status=status,
            body=None,
            is_breakage=error.reason != "pool_full",
        )

    def _failure(self, reason: str, detail: str) -> AttemptFailedError:
        return AttemptFailedError(
            reason, f"worker {self._record.worker_id} {detail}", status=502, body=None, is_breakage=True
        )


def _relayed(response: HttpResponse) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in response.headers if name in _RELAYED_HEADERS]
