"""A model's tokenizer and chat templates, read from its folder."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from infera.prompt.content_format import ContentFormat, detect_content_format
from infera.prompt.outcome import UnrenderableError
from infera.prompt.template import ChatTemplate

TOKENIZER_BYTES_MAX: Final = 512 * 1024 * 1024
CONFIG_BYTES_MAX: Final = 64 * 1024 * 1024
NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class PreparedTemplate:
    """A compiled template and what it wants message content to be."""

    template: ChatTemplate
    content_format: ContentFormat


class ModelTokenizer:
    """Text to token ids as one model's engine does it. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer in ``folder``. Raises UnrenderableError when there is none that can be read."""
        self.folder = folder
        path = folder / "tokenizer.json"
        config = _read_json(folder / "tokenizer_config.json")
        self._tokenizer = _load(path)
        # What the file says about padding and truncation is for training; engines switch both off.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        self._templates = _templates(folder, config)
        self._begins_as_configured = self._check_beginning(config)
        self.token_characters_max = max((len(text) for text in self._tokenizer.get_vocab()), default=1)

    def template_for(self, *, has_tools: bool) -> PreparedTemplate:
        """The template for a request. Raises UnrenderableError where the model has none."""
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise UnrenderableError("no_template", f"{self.folder} has no chat template")

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of ``text``. Releases the GIL while it works."""
        return array("I", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Like ``encode`` for a completion prompt; refuses where it is unclear how the engine begins one."""
        if add_special_tokens and not self._begins_as_configured:
            raise UnrenderableError(
                "begin_token_unclear", "tokenizer.json and tokenizer_config.json disagree about the first token"
            )
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _check_beginning(self, config: dict[str, Any]) -> bool:
        """Some libraries follow add_bos_token of the configuration, others the file: trust them when they agree."""
        wanted = config.get("add_bos_token")
        bos = self.special_tokens.get("bos_token")
        if not isinstance(wanted, bool) or bos is None:
            return True
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        return wanted == (bool(ids) and ids[0] == self._tokenizer.token_to_id(bos))


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


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, PreparedTemplate]:
    sources = _template_sources(folder, config)
    prepared: dict[str, PreparedTemplate] = {}
    for name, source in sources.items():
        template = ChatTemplate(source)
        prepared[name] = PreparedTemplate(template, detect_content_format(template))
    return prepared


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
        if file.is_file() and file.stat().st_size <= CONFIG_BYTES_MAX:
            sources = {"default": file.read_text(encoding="utf-8")}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja"))[:64]:
            sources[extra.stem] = extra.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UnrenderableError("no_tokenizer", f"the chat template cannot be read: {error}") from error
    return sources
