"""A model's tokenizer and chat templates: read from its folder, as the worker's render profile says."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from infera.discovery.record import RenderProfile
from infera.prompt.content_format import ContentFormat, detect_content_format
from infera.prompt.outcome import UnrenderableError
from infera.prompt.segments import SegmentedTokenizer
from infera.prompt.template import ChatTemplate
from infera.prompt.truncation import Side, truncate

TOKENIZER_BYTES_MAX: Final = 512 * 1024 * 1024
CONFIG_BYTES_MAX: Final = 64 * 1024 * 1024
REQUEST_TEMPLATES_MAX: Final = 32
NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Tokenizer modes that are plain Hugging Face tokenizers with plain templates.
_PLAIN_MODES: Final = ("auto", "hf")
# Models whose engine renders chats with a library of its own.
_RENDERED_ELSEWHERE: Final = frozenset({"gpt_oss"})

# The pool of the renderer is the limit on threads, not the library's own.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True)
class PreparedTemplate:
    """A compiled template and what it wants message content to be."""

    template: ChatTemplate
    content_format: ContentFormat


class ModelTokenizer:
    """Text to token ids as one model's engine does it. Safe to use from several threads."""

    def __init__(self, folder: Path, profile: RenderProfile | None = None) -> None:
        """Read the tokenizer in ``folder``. Raises UnrenderableError when there is none that can be followed."""
        self.folder = folder
        self.profile = profile or RenderProfile()
        _check_profile(self.profile)
        config = _read_json(folder / "tokenizer_config.json")
        self._model_type = str(_read_json(folder / "config.json").get("model_type", ""))
        self._tokenizer = _load(folder / "tokenizer.json")
        # What the file says about padding and truncation is for training; engines switch both off.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        _add_configured_tokens(self._tokenizer, config, self.special_tokens)
        self._segments = SegmentedTokenizer(self._tokenizer)
        self._begin, self._end = _surroundings(self._tokenizer)
        self._templates: dict[str, PreparedTemplate] = {}
        self._no_template: UnrenderableError | None = None
        try:
            self._templates = self._prepare_templates(_template_sources(folder, config))
        except UnrenderableError as error:
            self._no_template = error  # text prompts need none
        self._request_templates: OrderedDict[str, PreparedTemplate] = OrderedDict()
        self._merges_system: bool | None = None
        self._disabled_effort: str | None = None
        self._lock = Lock()
        self._begins_as_configured = self._check_beginning(config)
        self.token_characters_max = max((len(text) for text in self._tokenizer.get_vocab()), default=1)

    @property
    def is_segmented(self) -> bool:
        """Whether repeated pieces of prompts are tokenized once."""
        return self._segments.is_segmented

    def template_for(self, *, has_tools: bool, own: str | None = None) -> PreparedTemplate:
        """The template for a request, ``own`` being the one it brings. Raises UnrenderableError where none is."""
        if self._model_type in _RENDERED_ELSEWHERE:
            raise UnrenderableError("rendered_elsewhere", f"engines render {self._model_type} chats without a template")
        if self._no_template is not None:
            raise UnrenderableError(self._no_template.reason, self._no_template.detail)
        if own is not None and own not in self._templates:
            return self._request_template(own)
        given = own or ("" if self.profile.chat_template_digest else None)
        names = (given,) if given is not None else (("tool_use", "default") if has_tools else ("default",))
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise UnrenderableError("no_template", f"{self.folder} has no chat template")

    def disabled_effort(self, find: Callable[[ModelTokenizer], str]) -> str:
        """The reasoning effort that stands for no thinking; found out once."""
        if self._disabled_effort is None:
            self._disabled_effort = find(self)
        return self._disabled_effort

    def merges_system(self) -> bool:
        """Whether system messages inside a conversation must move to its front; found out once."""
        if self._merges_system is None:
            self._merges_system = self._wants_system_first()
        return self._merges_system

    def _wants_system_first(self) -> bool:
        found = []
        for has_tools in (False, True):
            try:
                found.append(self.template_for(has_tools=has_tools).template.wants_system_first())
            except UnrenderableError:
                found.append(True)
        return any(found)

    def encode(
        self, text: str, *, add_special_tokens: bool, limit: int | None = None, side: Side | None = None
    ) -> array[int]:
        """Token ids of ``text``, ``limit`` at most. Releases the GIL while it tokenizes."""
        tokens = self._segments.encode(text)
        nothing: array[int] = array("I")
        begin, end = (self._begin, self._end) if add_special_tokens else (nothing, nothing)
        return truncate(begin, tokens, end, limit, side)

    def encode_prompt(
        self, text: str, *, add_special_tokens: bool, limit: int | None = None, side: Side | None = None
    ) -> array[int]:
        """Like ``encode``; refuses where it is unclear how the engine begins a text."""
        if add_special_tokens and not self._begins_as_configured:
            raise UnrenderableError(
                "begin_token_unclear", "tokenizer.json and tokenizer_config.json disagree about the first token"
            )
        return self.encode(text, add_special_tokens=add_special_tokens, limit=limit, side=side)

    def _prepare_templates(self, sources: dict[str, str]) -> dict[str, PreparedTemplate]:
        """The folder's templates by name; the engine's own under the empty name."""
        digest = self.profile.chat_template_digest
        if digest:
            given = self.profile.chat_template
            known = [given] if given is not None else list(sources.values())
            matching = [source for source in known if hashlib.sha256(source.encode()).hexdigest() == digest]
            if not matching:
                raise UnrenderableError(
                    "template_differs",
                    "the engine was given a chat template that is not in "
                    f"{self.folder}; put it there as chat_template.jinja",
                )
            sources = {**sources, "": sources.get(matching[0], matching[0])}
        return {name: self._prepare(source) for name, source in sources.items()}

    def _prepare(self, source: str) -> PreparedTemplate:
        template = ChatTemplate(source)
        wanted = self.profile.content_format
        return PreparedTemplate(template, detect_content_format(template) if wanted == "auto" else wanted)

    def _request_template(self, source: str) -> PreparedTemplate:
        with self._lock:
            prepared = self._request_templates.get(source)
        if prepared is None:
            prepared = self._prepare(source)
        with self._lock:
            self._request_templates[source] = prepared
            self._request_templates.move_to_end(source)
            if len(self._request_templates) > REQUEST_TEMPLATES_MAX:
                self._request_templates.popitem(last=False)
        return prepared

    def _check_beginning(self, config: dict[str, Any]) -> bool:
        """Some libraries follow add_bos_token of the configuration, others the file: trust them when they agree."""
        wanted = config.get("add_bos_token")
        bos = self.special_tokens.get("bos_token")
        if not isinstance(wanted, bool) or bos is None or self.profile.text_probe_digest:
            return True  # the probe of the engine's own ids knows better
        return wanted == (bool(self._begin) and self._begin[0] == self._tokenizer.token_to_id(bos))


def _check_profile(profile: RenderProfile) -> None:
    if profile.tokenizer_mode not in _PLAIN_MODES:
        raise UnrenderableError(
            "tokenizer_mode", f"the engine's tokenizer mode {profile.tokenizer_mode!r} is not followed"
        )
    if profile.unrendered_flags:
        raise UnrenderableError("engine_flag", f"the engine runs with {', '.join(profile.unrendered_flags)}")


def _load(path: Path) -> Tokenizer:
    try:
        if path.stat().st_size > TOKENIZER_BYTES_MAX:
            raise UnrenderableError("no_tokenizer", f"{path} has more than {TOKENIZER_BYTES_MAX} bytes")
        return Tokenizer.from_file(str(path))
    except UnrenderableError:
        raise
    except Exception as error:  # the library raises bare Exception for a broken file
        raise UnrenderableError("no_tokenizer", f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise UnrenderableError("no_tokenizer", f"{path} has more than {CONFIG_BYTES_MAX} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnrenderableError("no_tokenizer", f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnrenderableError("no_tokenizer", f"{path} does not hold an object")
    return content


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """The named special tokens that templates may use: bos_token, eos_token and so on."""
    found: dict[str, str] = {}
    named: dict[str, Any] = {name: config.get(name, older.get(name)) for name in NAMED_TOKENS}
    more = config.get("extra_special_tokens")
    if isinstance(more, dict):
        named.update(more)
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _add_configured_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """What Hugging Face's library adds to the file: the configuration's tokens, where they are not in it."""
    if config.get("split_special_tokens"):
        raise UnrenderableError("split_special_tokens", "special tokens in a text are not kept whole by this model")
    decoder = config.get("added_tokens_decoder")
    for number, entry in (decoder if isinstance(decoder, dict) else {}).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or str(tokenizer.token_to_id(content)) != number:
            raise UnrenderableError("added_tokens_differ", f"tokenizer.json has no token {content!r} of id {number}")
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    more = [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []
    missing = [text for text in dict.fromkeys([*named.values(), *more]) if text not in known]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _surroundings(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    """The special tokens put before and behind a text. Raises UnrenderableError where they depend on the text."""
    found: set[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    for text in ("a", "b c", "0"):
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.encode(text, add_special_tokens=True).ids
        places = range(len(whole) - len(bare) + 1)
        fitting = {
            (tuple(whole[:place]), tuple(whole[place + len(bare) :]))
            for place in places
            if whole[place : place + len(bare)] == bare
        }
        found = fitting if found is None else found & fitting
    if not found:
        raise UnrenderableError("begin_token_unclear", "the tokenizer's special tokens depend on the text")
    begin, end = min(found)
    return array("I", begin), array("I", end)


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template texts by name. A file of its own beats the field in the configuration."""
    sources: dict[str, str] = {}
    field = config.get("chat_template")
    if isinstance(field, str):
        sources["default"] = field
    elif isinstance(field, list):
        for entry in field:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                sources[str(entry.get("name"))] = entry["template"]
    file = folder / "chat_template.jinja"
    try:
        if (folder / "chat_template.json").exists():
            raise UnrenderableError("template_unclear", f"{folder} has a processor's chat_template.json")
        if file.is_file() and file.stat().st_size <= CONFIG_BYTES_MAX:
            sources = {"default": file.read_text(encoding="utf-8")}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja"))[:64]:
            sources[extra.stem] = extra.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UnrenderableError("no_tokenizer", f"the chat template cannot be read: {error}") from error
    return sources
