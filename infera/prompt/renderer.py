"""Rendering for a whole fleet: one tokenizer per model, work in bounded thread pools, once per request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from infera.discovery.record import RenderProfile, tokenizer_digest
from infera.prompt.outcome import Adapter, RenderOutcome, Unrenderable, UnrenderableError
from infera.prompt.probe import check_probes
from infera.prompt.request import RequestKind, render_request
from infera.prompt.tokenizer import ModelTokenizer

__all__ = ["PromptRenderer", "RequestKind"]

MODELS_MAX: Final = 64
THREADS_DEFAULT: Final = 2
WAITING_MAX_DEFAULT: Final = 256
TIMEOUT_S_DEFAULT: Final = 30.0
# Requests with more text than this wait in a queue of their own, so that they do not hold up the others.
LONG_CHARACTERS: Final = 256 * 1024
LONG_THREADS: Final = 1
LONG_WAITING_MAX: Final = 16

_log = logging.getLogger(__name__)


class _Lane:
    """Threads, and how many requests may be with them."""

    def __init__(self, name: str, thread_count: int, waiting_max: int) -> None:
        self.pool = ThreadPoolExecutor(thread_count, thread_name_prefix=f"infera-prompt-{name}")
        self.waiting = 0
        self.waiting_max = waiting_max

    def one_done(self) -> None:
        self.waiting -= 1


class PromptRenderer:
    """Renders requests of any number of models. All methods belong to one event loop."""

    def __init__(
        self,
        *,
        tokenizer_path: Path | None = None,
        thread_count: int = THREADS_DEFAULT,
        waiting_max: int = WAITING_MAX_DEFAULT,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        """``tokenizer_path`` overrides the folder every worker record names."""
        self._override = tokenizer_path
        self._short = _Lane("short", thread_count, waiting_max)
        self._long = _Lane("long", LONG_THREADS, LONG_WAITING_MAX)
        self._timeout_s = timeout_s
        self._loaded: dict[str, tuple[str, ModelTokenizer | Unrenderable]] = {}
        self._loading: dict[str, asyncio.Future[None]] = {}

    async def prepare(self, model: str, folder: str, digest: str, profile: RenderProfile | None = None) -> None:
        """Load the model's tokenizer unless it is there. Problems are kept and shown, not raised."""
        profile = profile or RenderProfile()
        named = profile.tokenizer_path or folder
        path = self._override or (Path(named) if named else None)
        wanted = f"{path}\0{digest}\0{msgspec.json.encode(profile).decode()}"
        if model in self._loaded and self._loaded[model][0] == wanted:
            return
        if model not in self._loaded and len(self._loaded) >= MODELS_MAX:
            _log.warning("prompt: model %s is not rendered: %d models are the limit", model, MODELS_MAX)
            return
        if model in self._loading:
            return
        loop = asyncio.get_running_loop()
        self._loading[model] = loading = loop.create_future()
        try:
            found = await loop.run_in_executor(self._short.pool, _load, path, digest, profile)
            self._loaded[model] = (wanted, found)
        finally:
            del self._loading[model]
            loading.set_result(None)
        if isinstance(found, Unrenderable):
            _log.warning("prompt: model %s cannot be rendered (%s): %s", model, found.reason, found.detail)
        else:
            _log.info("prompt: tokenizer of model %s loaded from %s", model, found.folder)

    def forget(self, model: str) -> None:
        """Drop a model no worker serves any more."""
        self._loaded.pop(model, None)

    def problems(self) -> dict[str, Unrenderable]:
        """Models whose prompts cannot be rendered at all, or not yet, with the reason."""
        found = {model: found for model, (_, found) in self._loaded.items() if isinstance(found, Unrenderable)}
        return found | dict.fromkeys(self._loading, Unrenderable("loading", "the tokenizer is being loaded"))

    async def render(
        self,
        model: str,
        kind: RequestKind,
        body: Mapping[str, Any],
        *,
        context_tokens_max: int | None,
        adapter: Adapter | None = None,
    ) -> RenderOutcome:
        """Tokens and keys of a request, or why they are not known. With ``adapter`` the keys are the adapter's.

        Raises ContextLengthError when the prompt is longer than ``context_tokens_max``.
        """
        lane = self._long if _is_long(body) else self._short
        if lane.waiting >= lane.waiting_max:
            return Unrenderable("busy", f"{lane.waiting_max} prompts are being rendered already")
        if model not in self._loaded and model in self._loading:
            await asyncio.wait({self._loading[model]}, timeout=self._timeout_s)
        _, found = self._loaded.get(model, ("", Unrenderable("no_tokenizer", "the tokenizer is not loaded")))
        lane.waiting += 1
        future = lane.pool.submit(render_request, found, kind, body, context_tokens_max, adapter)
        loop = asyncio.get_running_loop()
        # The count goes down when the thread is done, not when we stop waiting for it.
        future.add_done_callback(lambda _: _tell(loop, lane.one_done))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            return Unrenderable("timeout", f"rendering took longer than {self._timeout_s} s")

    def close(self) -> None:
        """Stop taking work; what is running ends by its own limits."""
        for lane in (self._short, self._long):
            lane.pool.shutdown(wait=False, cancel_futures=True)


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
        loop.call_soon_threadsafe(what)


def _is_long(body: Mapping[str, Any]) -> bool:
    """Whether the texts a prompt is made of come to more than LONG_CHARACTERS; stops counting there."""
    characters = 0
    pending: list[Any] = [body.get(name) for name in ("prompt", "messages", "input", "system", "tools")]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list) and not (value and type(value[0]) is int):
            pending.extend(value)
        if characters > LONG_CHARACTERS:
            return True
    return False


def _load(folder: Path | None, digest: str, profile: RenderProfile) -> ModelTokenizer | Unrenderable:
    if folder is None:
        return Unrenderable("no_tokenizer", "the worker names no model folder; give --router-tokenizer-path")
    try:
        tokenizer = ModelTokenizer(folder, profile)
        if digest and not profile.tokenizer_path and tokenizer_digest(folder) != digest:
            raise UnrenderableError(
                "tokenizer_differs",
                f"the tokenizer in {folder} is not the one the workers use; "
                "give --router-tokenizer-path the same files",
            )
        check_probes(tokenizer)
    except UnrenderableError as error:
        return Unrenderable(error.reason, error.detail)
    return tokenizer
