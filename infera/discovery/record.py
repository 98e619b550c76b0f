"""The worker record: everything the fleet needs to know about one engine endpoint.

Written by the agent beside an engine, read by every server. It lives in the engine's environment too, so
this module needs nothing but msgspec.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec

SCHEMA_VERSION: Final = 1
RECORD_BYTES_MAX: Final = 64 * 1024
NAME_CHARACTERS_MAX: Final = 512
ALIASES_MAX: Final = 64
ADAPTERS_MAX: Final = 256
ADAPTER_NAME_BYTES_MAX: Final = 512
ADAPTER_NAMES_BYTES_MAX: Final = 16 * 1024
"""Of all adapters' names together: a record is sent with every heartbeat."""
ADAPTER_DIGEST_HEX_MAX: Final = 128
DP_RANKS_MAX: Final = 1024
BLOCK_SIZE_TOKENS_MAX: Final = 65_536
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

CHAT_TEMPLATE_BYTES_MAX: Final = 24 * 1024
"""A longer template given on the engine's command line travels as its digest only."""
RENDER_FLAGS_MAX: Final = 64

# Asked of the engine and of the router's own tokenizer; the answers must be the same ids. The text holds what
# tokenizers disagree about: leading and repeated spaces, digits, line ends, composed and decomposed letters.
PROBE_TEXT: Final = (
    " The quick  brown fox 2026's 31.415 == 0x1F\n\n\tdef f(a):\r\n    return {'na\u00efve': 'e\u0301 \u65e5\u672c'}"
    " \U0001f680 <s> end "
)
PROBE_MESSAGES: Final = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": " And 3 + 3? "},
)

_INCARNATION: Final = re.compile(r"[0-9a-f]{32}")
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+")
_EVENT_SCHEMES: Final = ("ipc://", "tcp://")

Role = Literal["mixed", "prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


class RecordError(ValueError):
    """A worker record that cannot be accepted; the message names the field and what it should be."""


class EventRank(msgspec.Struct, frozen=True, kw_only=True):
    """Where one data-parallel rank publishes its KV events, and where its last batches can be asked again."""

    dp_rank: int
    pub: str
    replay: str | None = None


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """The KV events of one incarnation. Subscribers take exactly this topic and no other."""

    topic: str
    ranks: tuple[EventRank, ...]


class KvdSource(msgspec.Struct, frozen=True, kw_only=True):
    """The cache daemon a worker reads and writes, and the namespace its blocks live in there."""

    instance: str
    namespace: str
    pub: str | None = None
    snapshot: str | None = None


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's rank says it is doing: requests, and the share of its KV memory in use (0 to 1).

    ``computed_tokens``: prompt tokens it computed since it started, whoever sent them.
    """

    dp_rank: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float | None = None
    computed_tokens: int | None = None


class RenderProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What turns a request into tokens on the engine's side, beside the model's own files.

    ``chat_template`` is the source given on the command line (None: the tokenizer's own), and
    ``chat_template_digest`` its SHA-256 in hex, which is there even where the source is too long to travel.
    ``template_arguments`` are the engine's defaults for chat_template_kwargs. ``unrendered_flags`` names flags
    that change prompts in ways the router does not follow. The probes are ``ids_digest`` of the engine's ids
    for PROBE_TEXT (special tokens added) and PROBE_MESSAGES; empty where it was not asked or refused.
    """

    tokenizer_path: str = ""
    tokenizer_mode: str = "auto"
    chat_template: str | None = None
    chat_template_digest: str = ""
    content_format: Literal["auto", "string", "openai"] = "auto"
    template_arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    excludes_tools_when_choice_none: bool = False
    trusts_request_template: bool = False
    tool_parser: str = ""
    reasoning_parser: str = ""
    disabled_thinking_effort: str = "auto"
    unrendered_flags: tuple[str, ...] = ()
    text_probe_digest: str = ""
    chat_probe_digest: str = ""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine endpoint in one life. A restart is a new incarnation and so a new worker.

    Sizes are in tokens. ``worker_id`` names the place (it survives a restart), ``incarnation`` the life.
    ``tokenizer_digest`` is empty where the agent could not read the model folder. ``load`` is the engine's at the
    time of the heartbeat; two records that differ in it alone describe the same worker.
    ``adapters`` are the LoRA adapters that can be asked for by name, each with the hex digest of its content, or ""
    where that is not known.
    """

    incarnation: str
    worker_id: str
    url: str
    engine: str
    engine_version: str
    model: str
    schema: int = SCHEMA_VERSION
    role: Role = "mixed"
    aliases: tuple[str, ...] = ()
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    model_path: str = ""
    tokenizer_digest: str = ""
    max_context_tokens: int | None = None
    block_size_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    events: EventSource | None = None
    kvd: KvdSource | None = None
    transports: tuple[str, ...] = ("http",)
    zone: str | None = None
    hardware: str | None = None
    load: tuple[RankLoad, ...] = ()
    render: RenderProfile | None = None


_DECODER: Final = msgspec.json.Decoder(WorkerRecord)
_ENCODER: Final = msgspec.json.Encoder()


def encode_record(record: WorkerRecord) -> bytes:
    """The record as JSON, the form agents send and registries keep."""
    return _ENCODER.encode(record)


def without_load(record: WorkerRecord) -> WorkerRecord:
    """The record without what changes from heartbeat to heartbeat."""
    return msgspec.structs.replace(record, load=()) if record.load else record


def decode_record(body: bytes) -> WorkerRecord:
    """Read and check a record from JSON.

    Unknown fields are ignored, so that a newer agent can join an older server of the same schema.

    Raises RecordError on anything malformed.
    """
    if len(body) > RECORD_BYTES_MAX:
        raise RecordError(f"a worker record may have {RECORD_BYTES_MAX} bytes at most, this one has {len(body)}")
    try:
        record = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a worker record: {error}") from error
    check_record(record)
    return record


def check_record(record: WorkerRecord) -> None:
    """Raise RecordError where a field's value makes no sense."""
    if record.schema != SCHEMA_VERSION:
        raise RecordError(
            f"schema {record.schema} is not spoken here (this server reads schema {SCHEMA_VERSION}): "
            "run the same Infera version on the servers and the workers"
        )
    if not _INCARNATION.fullmatch(record.incarnation):
        raise RecordError("incarnation must be 32 lower-case hex digits")
    _check_names(record)
    _check_adapters(record.adapters)
    _check_url(record.url)
    _check_sizes(record)
    _check_sources(record)
    if record.render is not None:
        _check_render(record.render)


def _check_render(render: RenderProfile) -> None:
    for field in ("chat_template_digest", "text_probe_digest", "chat_probe_digest"):
        value: str = getattr(render, field)
        if value and not _HEX.fullmatch(value):
            raise RecordError(f"render.{field} must be hex or empty")
    if render.chat_template is not None:
        source = render.chat_template.encode(errors="surrogatepass")
        if len(source) > CHAT_TEMPLATE_BYTES_MAX or hashlib.sha256(source).hexdigest() != render.chat_template_digest:
            raise RecordError(
                f"render.chat_template must have {CHAT_TEMPLATE_BYTES_MAX} bytes at most and the digest given beside it"
            )
    if len(render.unrendered_flags) > RENDER_FLAGS_MAX:
        raise RecordError(f"render.unrendered_flags: {RENDER_FLAGS_MAX} at most")


def _check_names(record: WorkerRecord) -> None:
    names = {"worker_id": record.worker_id, "model": record.model, "engine": record.engine}
    if len(record.aliases) > ALIASES_MAX:
        raise RecordError(f"aliases: {ALIASES_MAX} at most, not {len(record.aliases)}")
    for position, alias in enumerate(record.aliases):
        names[f"aliases[{position}]"] = alias
    for field, value in names.items():
        if not value or len(value) > NAME_CHARACTERS_MAX or not value.isprintable():
            raise RecordError(f"{field} must be 1 to {NAME_CHARACTERS_MAX} printable characters")
    if not record.worker_id.isascii():
        raise RecordError("worker_id must be ASCII: it travels in an HTTP header")
    if record.hardware is not None and not (
        len(record.hardware) <= NAME_CHARACTERS_MAX and record.hardware.isprintable()
    ):
        raise RecordError(f"hardware must be {NAME_CHARACTERS_MAX} printable characters at most")
    if record.tokenizer_digest and not _HEX.fullmatch(record.tokenizer_digest):
        raise RecordError("tokenizer_digest must be hex or empty")


def _check_adapters(adapters: dict[str, str]) -> None:
    if len(adapters) > ADAPTERS_MAX:
        raise RecordError(f"adapters: {ADAPTERS_MAX} at most, not {len(adapters)}")
    if sum(map(adapter_name_bytes, adapters)) > ADAPTER_NAMES_BYTES_MAX:
        raise RecordError(f"adapters: names of {ADAPTER_NAMES_BYTES_MAX} bytes in all at most")
    for name, digest in adapters.items():
        if not is_adapter_name(name):
            raise RecordError(
                f"adapters: names must be 1 to {ADAPTER_NAME_BYTES_MAX} printable bytes, not {name!r:.80}"
            )
        if digest and (len(digest) > ADAPTER_DIGEST_HEX_MAX or not _HEX.fullmatch(digest)):
            raise RecordError(
                f"adapters[{name!r:.80}] must be hex of at most {ADAPTER_DIGEST_HEX_MAX} digits, or empty"
            )


def adapter_name_bytes(name: str) -> int:
    """Length of a LoRA adapter's name in UTF-8."""
    return len(name.encode(errors="surrogatepass"))


def is_adapter_name(name: str) -> bool:
    """Whether a record can hold an adapter of this name."""
    return 0 < adapter_name_bytes(name) <= ADAPTER_NAME_BYTES_MAX and name.isprintable()


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RecordError(f"url {url!r}: {error}") from error
    if parts.scheme != "http" or not parts.hostname or port is None or parts.username or parts.query:
        raise RecordError(f"url must look like http://host:port, not {url!r}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise RecordError("url must be printable ASCII without spaces")


def _check_sizes(record: WorkerRecord) -> None:
    for field in ("max_context_tokens", "block_size_tokens", "kv_capacity_tokens"):
        value: int | None = getattr(record, field)
        if value is not None and value <= 0:
            raise RecordError(f"{field} must be positive or null, not {value}")
    if record.block_size_tokens is not None and record.block_size_tokens > BLOCK_SIZE_TOKENS_MAX:
        raise RecordError(f"block_size_tokens must be {BLOCK_SIZE_TOKENS_MAX} at most")
    if len(record.load) > DP_RANKS_MAX:
        raise RecordError(f"load: {DP_RANKS_MAX} ranks at most, not {len(record.load)}")
    for load in record.load:
        if min(load.dp_rank, load.running_requests, load.waiting_requests, load.computed_tokens or 0) < 0:
            raise RecordError("load: counts must not be negative")
        if load.kv_usage is not None and not 0 <= load.kv_usage <= 1:
            raise RecordError(f"load.kv_usage must be from 0 to 1, not {load.kv_usage}")


def _check_sources(record: WorkerRecord) -> None:
    if record.events is not None:
        ranks = record.events.ranks
        if not record.events.topic or not 1 <= len(ranks) <= DP_RANKS_MAX:
            raise RecordError(f"events need a topic and 1 to {DP_RANKS_MAX} ranks")
        if len({rank.dp_rank for rank in ranks}) != len(ranks) or any(rank.dp_rank < 0 for rank in ranks):
            raise RecordError("events.ranks: every dp_rank must be there once and not be negative")
        for rank in ranks:
            _check_endpoint("events pub", rank.pub)
            _check_endpoint("events replay", rank.replay)
    if record.kvd is not None:
        for field in ("instance", "namespace"):
            if not _HEX.fullmatch(getattr(record.kvd, field)):
                raise RecordError(f"kvd.{field} must be hex")
        _check_endpoint("kvd pub", record.kvd.pub)
        _check_endpoint("kvd snapshot", record.kvd.snapshot)


def _check_endpoint(what: str, endpoint: str | None) -> None:
    if endpoint is not None and not endpoint.startswith(_EVENT_SCHEMES):
        raise RecordError(f"{what}: {endpoint!r} must start with ipc:// or tcp://")


def tokenizer_digest(model_path: str | Path) -> str:
    """SHA-256 (hex) over the files that decide how text becomes tokens; empty where there are none.

    Each file that exists enters with its name and length, so that moving bytes from one to another shows.
    """
    folder = Path(model_path)
    digest = hashlib.sha256()
    found = False
    for name in TOKENIZER_FILES:
        try:
            content = (folder / name).read_bytes()
        except OSError:
            continue
        found = True
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest() if found else ""


def ids_digest(ids: list[int]) -> str:
    """SHA-256 (hex) over token ids as unsigned 32-bit little-endian numbers; raises OverflowError beyond 32 bits."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in ids)).hexdigest()
