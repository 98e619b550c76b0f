"""Is our tokenizer the engine's? The engine's own answers to two fixed questions say so.

The agent asks the engine for the ids of a text and of a chat, and their digests travel in the worker record. Files
that are the same can still be read differently (another version of a library, a flag), and the first token of a
text is decided in several places; ids do not lie.
"""

from __future__ import annotations

from infera.discovery.record import PROBE_MESSAGES, PROBE_TEXT, ids_digest
from infera.prompt.chat import chat_prompt, chat_text
from infera.prompt.outcome import UnrenderableError
from infera.prompt.tokenizer import ModelTokenizer


def check_probes(tokenizer: ModelTokenizer) -> None:
    """Raise UnrenderableError where the engine's ids are not ours. What the engine was not asked passes."""
    profile = tokenizer.profile
    if profile.text_probe_digest:
        ids = tokenizer.encode(PROBE_TEXT, add_special_tokens=True)
        if ids_digest(ids.tolist()) != profile.text_probe_digest:
            raise UnrenderableError(
                "probe_differs",
                f"the engine's ids of a probe text are not those of the tokenizer in {tokenizer.folder}; "
                "give --router-tokenizer-path the engine's files",
            )
    if profile.chat_probe_digest:
        _check_chat(tokenizer, profile.chat_probe_digest)


def _check_chat(tokenizer: ModelTokenizer, wanted: str) -> None:
    if tokenizer.template_for(has_tools=False).template.reads_clock:
        return
    prompt = chat_prompt({"messages": [dict(message) for message in PROBE_MESSAGES]}, tokenizer.profile)
    ids = tokenizer.encode(chat_text(tokenizer, prompt), add_special_tokens=False)
    if ids_digest(ids.tolist()) != wanted:
        raise UnrenderableError(
            "probe_differs",
            f"the engine's ids of a probe chat are not those of the template in {tokenizer.folder}; "
            "give --router-tokenizer-path the engine's files",
        )
