"""Chat and text completions: render, pick, send, relay; and again elsewhere while the client has nothing yet."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

from infera.prompt.outcome import Adapter, ContextLengthError, RenderedRequest, Unrenderable
from infera.prompt.renderer import RequestKind
from infera.router.affinity import SessionIdError, check_session_id
from infera.router.decision import Decision, PickStory, RequestStory
from infera.router.demand import Demand, priority_of, retention_of
from infera.router.fleet import FleetWorker
from infera.router.load import Ticket, TooManyRequestsError
from infera.router.text_index import BYTES_PER_TOKEN, TextPrompt, text_prompt
from infera.server.asgi import ClientGoneError, Exchange, Receive, Scope, Send
from infera.server.attempt import Attempt, AttemptFailedError, AttemptResult
from infera.server.errors import ApiError, busy, no_worker
from infera.server.request import GenerationRequest, parse_generation_request
from infera.server.state import ServerState
from infera.server.usage import compare

FORCE_HEADER = b"x-infera-worker"
SESSION_HEADER = b"x-session-id"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Work:
    """One request on its way."""

    exchange: Exchange
    request: GenerationRequest
    arrived_s: float
    workers: list[FleetWorker]
    rendered: RenderedRequest | None
    text: TextPrompt | None
    demand: Demand
    story: RequestStory
    tried: set[str] = field(default_factory=set)


class GenerationRoute:
    """A hot route, plain ASGI: no framework stands between the engine's bytes and the client's."""

    def __init__(self, state: ServerState, kind: RequestKind, path: str) -> None:
        self._state = state
        self._kind: RequestKind = kind
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        started_s = time.monotonic()
        model = ""
        try:
            self._admit(exchange)
            self._state.active_requests += 1
            try:
                request = parse_generation_request(await exchange.read_body(self._state.config.body_bytes_max))
                model = request.model if request.model in self._state.models_seen else ""
                async with exchange.until_client_leaves():
                    await self._serve(exchange, request, started_s)
            finally:
                self._state.active_requests -= 1
        except ApiError as error:
            self._state.metrics.refused.labels(error.code or error.kind).inc()
            await exchange.send_error(error)
        except ClientGoneError:
            self._state.metrics.client_gone.inc()
            exchange.status = exchange.status or 499
        except Exception:
            _log.exception("server: request %s failed by a fault of ours", exchange.request_id)
            if exchange.has_started:
                raise
            await exchange.send_error(
                ApiError(
                    500,
                    f"internal error; see the server's log for request {exchange.request_id}",
                    kind="internal_error",
                )
            )
        finally:
            self._state.metrics.requests.labels(self._kind, model, str(exchange.status)).inc()
            self._state.metrics.duration.labels(self._kind).observe(time.monotonic() - started_s)

    def _admit(self, exchange: Exchange) -> None:
        state = self._state
        if not state.is_authorised(exchange.header(b"authorization")):
            raise ApiError(
                401, "missing or wrong API key: send it as Authorization: Bearer KEY", code="invalid_api_key"
            )
        if state.active_requests >= state.config.concurrency_max:
            raise busy(f"{state.config.concurrency_max} requests are under way (--concurrency-max); try again shortly")

    async def _serve(self, exchange: Exchange, request: GenerationRequest, arrived_s: float) -> None:
        workers, is_forced = self._workers(exchange, request.model)
        adapter = self._state.fleet.adapter(request.model, workers)
        model = adapter.model if adapter is not None else workers[0].record.model
        demand = self._demand(exchange, request, model, is_forced=is_forced)
        rendered, prompt = await self._render(request, workers, model, adapter)
        if rendered is not None:
            longest = max(entry.token_count for entry in rendered.prompts)
            workers = [worker for worker in workers if (worker.record.max_context_tokens or longest) >= longest]
        text = self._text(request, workers, rendered, model if adapter is None else f"{model} {adapter.name}")
        story = RequestStory(request.model, prompt)
        self._state.decisions.open(exchange.request_id, story)
        work = _Work(exchange, request, arrived_s, workers, rendered, text, demand, story)
        tries = 1 if is_forced else self._state.config.tries_max
        failure: AttemptFailedError | None = None
        for _ in range(tries):
            found = await self._try(work)
            if found is None:
                return
            failure = found
            work.demand = replace(work.demand, is_retry=True)
            if not self._left(work):
                break
            self._state.metrics.retries.labels(failure.reason).inc()
        assert failure is not None
        await self._send_failure(exchange, failure)

    def _demand(self, exchange: Exchange, request: GenerationRequest, model: str, *, is_forced: bool) -> Demand:
        """What the request asks of placement. Raises ApiError for a session that cannot be one."""
        session = None
        if self._state.reads_sessions:
            try:
                session = check_session_id(exchange.header_values(SESSION_HEADER))
            except SessionIdError as error:
                raise ApiError(400, str(error), code="invalid_session_id") from error
        return Demand(
            model=model,
            is_streaming=request.is_streaming,
            session=session,
            priority=priority_of(request.fields),
            retention=retention_of(request.fields),
            is_forced=is_forced,
        )

    def _text(
        self, request: GenerationRequest, workers: list[FleetWorker], rendered: RenderedRequest | None, model: str
    ) -> TextPrompt | None:
        """The prompt's text where tokens, events or what an adapter holds are missing; its length alone where the
        policy looks at no text."""
        if not self._state.core.policy.reads_text:
            size = len(request.raw_body) // BYTES_PER_TOKEN
            return TextPrompt((), size) if rendered is None else None
        if rendered is not None and not self._state.fleet.needs_text(workers, rendered):
            return None
        return text_prompt(model, request.fields)

    def _workers(self, exchange: Exchange, model: str) -> tuple[list[FleetWorker], bool]:
        """Who may serve the request, and whether the client insisted on one."""
        fleet = self._state.fleet
        forced = exchange.header(FORCE_HEADER)
        serving = fleet.serving(model)
        if not fleet.workers or (not serving and model in self._state.models_seen):
            raise no_worker(f"no worker serves {model!r} at the moment; try again shortly")
        if not serving:
            known = ", ".join(sorted(fleet.models())[:20])
            what = f"the model {model!r} does not exist" if model else "the request names no model"
            raise ApiError(404, f"{what}; served here: {known}", code="model_not_found", param="model")
        if forced is None:
            return serving, False
        chosen = [worker for worker in serving if worker.record.worker_id == forced]
        if not chosen:
            known = ", ".join(sorted(worker.record.worker_id for worker in serving)[:50])
            raise ApiError(400, f"X-Infera-Worker names {forced!r}, which does not serve {model!r}; there are: {known}")
        return chosen, True

    async def _render(
        self, request: GenerationRequest, workers: list[FleetWorker], model: str, adapter: Adapter | None
    ) -> tuple[RenderedRequest | None, dict[str, Any]]:
        """The request's tokens where they are known and wanted, and what to tell about them."""
        state = self._state
        if not state.core.policy.reads_prefixes:
            return None, {"rendered": False, "reason": "not_needed"}
        limits = [worker.record.max_context_tokens for worker in workers]
        context_max = None if None in limits else max(limit for limit in limits if limit is not None)
        started_s = time.monotonic()
        try:
            outcome = await state.renderer.render(
                model, self._kind, request.fields, context_tokens_max=context_max, adapter=adapter
            )
        except ContextLengthError as error:
            raise ApiError(400, str(error), code="context_length_exceeded", param=_PARAMS[self._kind]) from error
        finally:
            state.metrics.render.observe(time.monotonic() - started_s)
        if isinstance(outcome, Unrenderable):
            state.metrics.unrenderable.labels(model, outcome.reason).inc()
            return None, {"rendered": False, "reason": outcome.reason, "detail": outcome.detail}
        told: dict[str, Any] = {"rendered": True, "tokens": outcome.token_count, "prompts": len(outcome.prompts)}
        return outcome, told if adapter is None else told | {"adapter": adapter.digest.hex() or "unknown"}

    def _left(self, work: _Work) -> list[FleetWorker]:
        """Workers that were not tried yet and are still there."""
        fleet = self._state.fleet.workers
        return [
            worker
            for worker in work.workers
            if worker.record.incarnation in fleet and worker.record.incarnation not in work.tried
        ]

    async def _try(self, work: _Work) -> AttemptFailedError | None:
        """One pick and one try; the failure when another may be tried."""
        state = self._state
        decision, ticket = await self._place(work)
        told = state.decisions.add(work.exchange.request_id, decision)
        told.outcome = "cancelled"
        try:
            self._note_pick(work, decision)
            result = await self._attempt(work, decision, ticket)
            if result.broken is not None:
                state.core.failed(ticket, now=time.monotonic())
        except AttemptFailedError as failure:
            told.outcome = f"failed: {failure.detail}"
            self._note_failure(decision, failure.reason, failure.detail, is_breakage=failure.is_breakage)
            state.core.failed(ticket, now=time.monotonic())
            return failure
        finally:
            state.core.done(ticket, now=time.monotonic())
            state.waiting_room.pump()
        told.outcome = "served" if result.broken is None else f"broken: {result.broken}"
        self._note_result(work, decision, result, told)
        return None

    async def _place(self, work: _Work) -> tuple[Decision, Ticket]:
        """Pick, after a wait where all workers are saturated. Nothing can happen between the pick and the return."""
        demand, room = work.demand, self._state.waiting_room
        began_s = time.monotonic()
        try:
            if demand.is_forced or demand.is_retry:
                return self._pick(work)
            return await room.pick(demand.model, demand.priority, lambda: self._pick(work))
        except TooManyRequestsError as error:
            raise busy(f"{error}; try again shortly") from error
        finally:
            work.story.waited_s += time.monotonic() - began_s

    def _note_pick(self, work: _Work, decision: Decision) -> None:
        """Tell map, metrics and client where the request goes."""
        state, place = self._state, decision.place
        work.tried.add(decision.worker)
        work.exchange.worker_id = place.worker_id
        state.metrics.picks.labels(place.worker_id, decision.policy).inc()
        if decision.field.options[decision.chosen_index].is_guess and state.core.policy.reads_text:
            reason = str(work.story.prompt.get("reason", "no_tokens"))
            if work.rendered is not None:
                reason = "no_events" if place.record.events is None else "adapter_unknown"
            state.metrics.guesses.labels(place.record.model, reason).inc()
        if work.demand.retention != "none":
            state.fleet.sent(place, work.rendered, work.text, now=time.monotonic())

    def _pick(self, work: _Work) -> tuple[Decision, Ticket]:
        """One look at the fleet as it is now. Raises SaturatedError."""
        state = self._state
        left = self._left(work)
        if not left:
            raise no_worker(f"the last worker of {work.request.model!r} has just left; try again shortly")
        started_s = time.monotonic()
        options = state.fleet.options(left, work.rendered, work.text, now=started_s)
        found = state.core.pick(options, work.demand, now=started_s)
        state.metrics.pick.observe(time.monotonic() - started_s)
        return found

    async def _attempt(self, work: _Work, decision: Decision, ticket: Ticket) -> AttemptResult:
        state = self._state
        record = decision.place.record

        def first_data() -> None:
            now_s = time.monotonic()
            state.metrics.first_token.labels(record.model).observe(now_s - work.arrived_s)
            if work.request.is_streaming:
                state.core.first_token(ticket, now=now_s)
                state.metrics.real_first_token.labels(record.model).observe(now_s - decision.time_s)
                predicted_s = decision.costs[decision.chosen_index].total_s
                state.metrics.predicted_first_token.labels(record.model).observe(predicted_s)

        return await Attempt(state, work.exchange, work.request, record, decision, first_data).run(self._path)

    def _note_result(self, work: _Work, decision: Decision, result: AttemptResult, told: PickStory) -> None:
        if result.broken is not None:
            self._note_failure(decision, result.broken.reason, str(result.broken), is_breakage=True)
        if result.usage is not None:
            told.facts = {
                "reported_prompt_tokens": result.usage.prompt_tokens,
                "reported_cached_tokens": result.usage.cached_tokens,
            }
            tokens = work.rendered.token_count if work.rendered is not None else None
            compare(self._state, work.request.model, decision, tokens, result.usage)

    def _note_failure(self, decision: Decision, reason: str, detail: str, *, is_breakage: bool) -> None:
        worker_id = decision.worker_id
        self._state.metrics.failures.labels(worker_id, reason).inc()
        _log.warning("server: worker %s failed (%s): %s", worker_id, reason, detail)
        if is_breakage:
            self._state.fleet.suspect(decision.worker, detail)

    async def _send_failure(self, exchange: Exchange, failure: AttemptFailedError) -> None:
        """Nobody could serve it: the engine's own words where there are any, else ours."""
        if failure.body is not None:
            await exchange.send_whole(failure.status, failure.body, [(b"content-type", b"application/json")])
            return
        raise ApiError(failure.status, failure.detail, kind="upstream_error", code=failure.reason)


_PARAMS: dict[RequestKind, str] = {"chat": "messages", "completions": "prompt"}
