"""Rendering for a whole fleet: one tokenizer per model, work in a bounded thread pool, once per request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

from infera_core.keys import IDENTITY_BYTES_MAX, chain_keys, root_key

from infera.discovery.record import tokenizer_digest
from infera.prompt.chat import render_chat_text
from infera.prompt.completions import completion_prompts
from infera.prompt.outcome import (
    ContextLengthError,
    RenderedPrompt,
    RenderedRequest,
    RenderOutcome,
    Unrenderable,
    UnrenderableError,
)
from infera.prompt.tokenizer import ModelTokenizer

MODELS_MAX: Final = 64
THREADS_DEFAULT: Final = 2
WAITING_MAX_DEFAULT: Final = 256
TIMEOUT_S_DEFAULT: Final = 30.0

RequestKind = Literal["chat", "completions"]
_log = logging.getLogger(__name__)


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
        self._pool = ThreadPoolExecutor(thread_count, thread_name_prefix="infera-prompt")
        self._waiting = 0
        self._waiting_max = waiting_max
        self._timeout_s = timeout_s
        self._loaded: dict[str, tuple[str, ModelTokenizer | Unrenderable]] = {}
        self._loading: dict[str, asyncio.Future[None]] = {}

    async def prepare(self, model: str, folder: str, digest: str) -> None:
        """Load the model's tokenizer unless it is there. Problems are kept and shown, not raised."""
        path = self._override or (Path(folder) if folder else None)
        wanted = f"{path}\0{digest}"
        if model in self._loaded and self._loaded[model][0] == wanted:
            return
        if model not in self._loaded and len(self._loaded) >= MODELS_MAX:
            _log.warning("prompt: model %s is not rendered: %d models are the limit", model, MODELS_MAX)
            return
        if model in self._loading:
            return
        self._loading[model] = loading = asyncio.get_running_loop().create_future()
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._pool, _load, path, digest)
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
        self, model: str, kind: RequestKind, body: Mapping[str, Any], *, context_tokens_max: int | None
    ) -> RenderOutcome:
        """Tokens and keys of a request, or why they are not known.

        Raises ContextLengthError when the prompt is longer than ``context_tokens_max``.
        """
        if self._waiting >= self._waiting_max:
            return Unrenderable("busy", f"{self._waiting_max} prompts are being rendered already")
        if model not in self._loaded and model in self._loading:
            await asyncio.wait({self._loading[model]}, timeout=self._timeout_s)
        _, found = self._loaded.get(model, ("", Unrenderable("no_tokenizer", "the tokenizer is not loaded")))
        self._waiting += 1
        future = self._pool.submit(_render, found, kind, body, context_tokens_max)
        loop = asyncio.get_running_loop()
        # The count goes down when the thread is done, not when we stop waiting for it.
        future.add_done_callback(lambda _: _tell(loop, self._one_done))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            return Unrenderable("timeout", f"rendering took longer than {self._timeout_s} s")

    def close(self) -> None:
        """Stop taking work; what is running ends by its own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _one_done(self) -> None:
        self._waiting -= 1


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
        loop.call_soon_threadsafe(what)


def _load(folder: Path | None, digest: str) -> ModelTokenizer | Unrenderable:
    if folder is None:
        return Unrenderable("no_tokenizer", "the worker names no model folder; give --router-tokenizer-path")
    try:
        tokenizer = ModelTokenizer(folder)
    except UnrenderableError as error:
        return Unrenderable(error.reason, error.detail)
    if digest and tokenizer_digest(folder) != digest:
        return Unrenderable(
            "tokenizer_differs",
            f"the tokenizer in {folder} is not the one the workers use; give --router-tokenizer-path the same files",
        )
    return tokenizer


def _render(
    found: ModelTokenizer | Unrenderable, kind: RequestKind, body: Mapping[str, Any], context_tokens_max: int | None
) -> RenderOutcome:
    try:
        root = root_key(salt=_salt(body))
        prompts = _token_prompts(found, kind, body, context_tokens_max)
        for tokens in prompts:
            if context_tokens_max is not None and len(tokens) > context_tokens_max:
                raise ContextLengthError(context_tokens_max, f"{len(tokens)} tokens")
        return RenderedRequest(tuple(RenderedPrompt(tokens, chain_keys(root, tokens)) for tokens in prompts))
    except UnrenderableError as error:
        return Unrenderable(error.reason, error.detail)


def _salt(body: Mapping[str, Any]) -> bytes:
    salt = body.get("cache_salt")
    if salt is None:
        return b""
    if not isinstance(salt, str) or not salt:
        raise UnrenderableError("malformed", "cache_salt must be a string that is not empty")
    encoded = salt.encode()
    if len(encoded) > IDENTITY_BYTES_MAX:
        raise UnrenderableError("malformed", f"cache_salt has more than {IDENTITY_BYTES_MAX} bytes")
    return encoded


def _token_prompts(
    found: ModelTokenizer | Unrenderable, kind: RequestKind, body: Mapping[str, Any], context_tokens_max: int | None
) -> list[array[int]]:
    texts: list[str]
    if kind == "completions":
        prompts = completion_prompts(body)
        if not isinstance(prompts[0], str):
            return [prompt for prompt in prompts if isinstance(prompt, array)]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if isinstance(found, Unrenderable):
        raise UnrenderableError(found.reason, found.detail)
    if kind == "chat":
        texts = [render_chat_text(found, body)]
    special = body.get("add_special_tokens", kind == "completions")
    if not isinstance(special, bool):
        raise UnrenderableError("malformed", "add_special_tokens must be a boolean")
    for text in texts:
        _check_characters(text, found, context_tokens_max)
    return [found.encode_prompt(text, add_special_tokens=special) for text in texts]


def _check_characters(text: str, tokenizer: ModelTokenizer, context_tokens_max: int | None) -> None:
    """Refuse before tokenizing what cannot fit even if every token were the longest one."""
    if context_tokens_max is not None and len(text) > context_tokens_max * tokenizer.token_characters_max:
        raise ContextLengthError(context_tokens_max, f"{len(text)} characters")
