"""A small real engine process: speaks the OpenAI API over real sockets and publishes vLLM's KV events over ZMQ.

It exists because failures must be provoked exactly: POST /control {"mode": ..., "times": n} makes the next n
requests fail in a chosen way. Text is made up, tokens, block bookkeeping, events and usage are real. The real
engines run in tests/e2e.

    python -m tests.support.fake_engine --port 9001 --model m --folder F --server http://127.0.0.1:8000 --runtime DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import time
import urllib.request
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from infera.discovery.record import (
    EventRank,
    EventSource,
    KvdSource,
    RankLoad,
    WorkerRecord,
    encode_record,
    tokenizer_digest,
)
from infera.engine.adapter_watch import AdapterWatch
from infera.prompt.outcome import RenderedRequest
from infera.prompt.renderer import PromptRenderer

REPLAY_BATCHES_MAX = 10_000
Lora = tuple[str, str]
"""An adapter's name and path, which are what vLLM's own block hash has of it."""

WORDS = ["Paris", " is", " the", " capital", " of", " France", ".", " Yes"]


class Blocks:
    """The engine's prefix cache: whole blocks by hash, least recently used out first."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.held: OrderedDict[int, None] = OrderedDict()

    def use(self, tokens: list[int], salt: str | None, lora: Lora | None) -> tuple[int, list[dict[str, Any]]]:
        """Cached tokens of a prompt, and the events of computing the rest."""
        parent: int | None = None
        cached, events, hits = 0, [], True
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = tokens[start : start + self.block_size]
            text = f"{parent}|{block}|{salt if start == 0 else ''}|{lora}"
            name = int.from_bytes(hashlib.sha256(text.encode()).digest()[-8:], "big")
            if name in self.held:
                self.held.move_to_end(name)
                if hits and start + self.block_size < len(tokens):
                    cached += self.block_size
            else:
                hits = False
                self.held[name] = None
                events.append(self._stored(name, parent, block, salt if start == 0 else None, lora))
            parent = name
        while len(self.held) > self.capacity:
            gone, _ = self.held.popitem(last=False)
            events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0})
        return cached, events

    def _stored(
        self, name: int, parent: int | None, block: list[int], salt: str | None, lora: Lora | None
    ) -> dict[str, Any]:
        extra_keys = [*([lora[0]] if lora else []), *([salt] if salt else [])]
        return {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": parent,
            "token_ids": block,
            "block_size": self.block_size,
            "lora_id": 1 if lora else None,
            "lora_name": lora[0] if lora else None,
            "medium": "GPU",
            "extra_keys": [extra_keys or None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


class Publisher:
    """vLLM's publisher: three frames a batch, and the last batches on demand."""

    def __init__(self, topic: str, pub: str, replay: str) -> None:
        self._context = zmq.asyncio.Context()
        self._topic = topic.encode()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(pub)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(replay)
        self._batches: OrderedDict[int, bytes] = OrderedDict()
        self.sequence = 0
        self.drops_next = 0

    async def publish(self, events: list[dict[str, Any]]) -> None:
        """Send one batch, unless told to lose it."""
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._batches[self.sequence] = payload
        while len(self._batches) > REPLAY_BATCHES_MAX:
            self._batches.popitem(last=False)
        if self.drops_next > 0:
            self.drops_next -= 1
        else:
            await self._pub.send_multipart([self._topic, self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    async def serve_replays(self) -> None:
        """Answer replay requests for ever."""
        while True:
            client, _, start = await self._replay.recv_multipart()
            for sequence, payload in list(self._batches.items()):
                if sequence >= int.from_bytes(start, "big"):
                    frames = [client, b"", self._topic, sequence.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(frames)
            await self._replay.send_multipart([client, b"", self._topic, (2**64 - 1).to_bytes(8, "big"), b""])


class FakeEngine:
    """One engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.incarnation = secrets.token_hex(16)
        self.topic = f"kv@{self.incarnation}"
        base = f"ipc://{options.runtime}/{self.incarnation[:12]}"
        self.endpoints = (base + ".pub", base + ".replay")
        self.blocks = Blocks(options.block_size, options.capacity_blocks)
        self.publisher = Publisher(self.topic, *self.endpoints)
        self.renderer = PromptRenderer()
        self.mode, self.times, self.delay_s = "normal", 0, 0.0
        self.seen: list[dict[str, Any]] = []
        self.aborted = 0
        self.beats = True
        self.load: tuple[RankLoad, ...] = ()
        self.adapters: dict[str, str] = dict(entry.split("=", 1) for entry in options.adapter)
        self.watch = AdapterWatch()

    async def run(self) -> None:
        """Serve until killed."""
        await self.renderer.prepare("m", self.options.folder, "")
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.options.port)
        background = [asyncio.create_task(self.publisher.serve_replays())]
        if self.options.server:
            background.append(asyncio.create_task(self._heartbeat()))
        print("ready", flush=True)
        async with server:
            await server.serve_forever()

    def record(self) -> WorkerRecord:
        """What this engine says about itself."""
        options = self.options
        kvd = json.loads(options.kvd) if options.kvd else None
        return WorkerRecord(
            incarnation=self.incarnation,
            worker_id=options.worker_id or f"fake-127.0.0.1:{options.port}",
            url=f"http://127.0.0.1:{options.port}",
            engine="fake",
            engine_version="1",
            model=options.model,
            aliases=tuple(options.alias),
            adapters=self.watch.digests(self.adapters),
            model_path=options.folder,
            tokenizer_digest=tokenizer_digest(options.folder),
            max_context_tokens=options.max_context,
            block_size_tokens=options.block_size,
            kv_capacity_tokens=options.capacity_blocks * options.block_size,
            events=EventSource(
                topic=self.topic, ranks=(EventRank(dp_rank=0, pub=self.endpoints[0], replay=self.endpoints[1]),)
            ),
            kvd=KvdSource(**kvd) if kvd else None,
            load=self.load,
        )

    async def _heartbeat(self) -> None:
        while True:
            if self.beats:
                for server in self.options.server.split(","):
                    with contextlib.suppress(OSError):
                        await asyncio.to_thread(self._put, server)
            await asyncio.sleep(1.0)

    def _put(self, server: str) -> None:
        url = f"{server}/internal/v1/workers/{self.incarnation}"
        headers = {"content-type": "application/json"}
        if self.options.join_token:
            headers["authorization"] = f"Bearer {self.options.join_token}"
        request = urllib.request.Request(url, encode_record(self.record()), headers, method="PUT")
        urllib.request.urlopen(request, timeout=2).read()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if not await self._answer(method, path, headers, body, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        if path == "/control":
            if method == "POST":
                self._control(json.loads(body))
            await _send_json(writer, 200, self._stats())
            return True
        self.seen.append({"path": path, "headers": headers, "body": body.decode()})
        mode = self.mode if self.times > 0 else "normal"
        self.times = max(0, self.times - 1)
        handler = getattr(self, f"_mode_{mode}", None)
        if handler is not None:
            return bool(await handler(writer, reader))
        return await self._generate(path, json.loads(body), mode, reader, writer)

    def _control(self, wanted: dict[str, Any]) -> None:
        self.mode = wanted.get("mode", self.mode)
        self.times = wanted.get("times", 1)
        self.delay_s = wanted.get("delay_s", self.delay_s)
        self.beats = wanted.get("beats", self.beats)
        self.adapters = wanted.get("adapters", self.adapters)
        self.load = tuple(RankLoad(**load) for load in wanted.get("load", ()))
        self.publisher.drops_next = wanted.get("drop_events", 0)
        if wanted.get("clear"):
            self.seen.clear()

    def _stats(self) -> dict[str, Any]:
        return {"seen": self.seen, "aborted": self.aborted, "blocks": len(self.blocks.held)}

    async def _mode_status_500(self, writer: asyncio.StreamWriter, _: Any) -> bool:
        await _send_json(
            writer, 500, {"error": {"message": "engine broke", "type": "InternalServerError", "code": 500}}
        )
        return True

    async def _mode_status_400(self, writer: asyncio.StreamWriter, _: Any) -> bool:
        await _send_json(writer, 400, {"error": {"message": "bad temperature", "type": "BadRequestError", "code": 400}})
        return True

    async def _mode_error_frame(self, writer: asyncio.StreamWriter, _: Any) -> bool:
        error = {"error": {"message": "engine core died", "type": "InternalServerError", "code": 500}}
        await _send_stream(writer, [f"data: {json.dumps(error)}\n\n", "data: [DONE]\n\n"])
        return True

    async def _mode_error_frame_400(self, writer: asyncio.StreamWriter, _: Any) -> bool:
        error = {"error": {"message": "bad grammar", "type": "BadRequestError", "code": 400}}
        await _send_stream(writer, [f"data: {json.dumps(error)}\n\n", "data: [DONE]\n\n"])
        return True

    async def _mode_empty_stream(self, writer: asyncio.StreamWriter, _: Any) -> bool:
        await _send_stream(writer, [])
        return True

    async def _mode_close(self, writer: asyncio.StreamWriter, _: Any) -> bool:
        return False

    async def _mode_exit(self, writer: asyncio.StreamWriter, _: Any) -> bool:
        os._exit(1)

    async def _mode_hang(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> bool:
        await self._until_closed(reader)
        return False

    async def _until_closed(self, reader: asyncio.StreamReader) -> None:
        await reader.read(1)
        self.aborted += 1

    async def _generate(
        self,
        path: str,
        body: dict[str, Any],
        mode: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        is_chat = "chat" in path
        kind = "chat" if is_chat else "completions"
        rendered = await self.renderer.render("m", kind, body, context_tokens_max=None)
        assert isinstance(rendered, RenderedRequest), rendered
        asked = body.get("model")
        lora = (asked, self.adapters[asked]) if asked in self.adapters else None
        cached = 0
        for prompt in rendered.prompts:
            hit, events = self.blocks.use(list(prompt.tokens), body.get("cache_salt"), lora)
            cached += hit
            if events:
                await self.publisher.publish(events)
        words = WORDS[: body.get("max_tokens", 4)]
        usage = {
            "prompt_tokens": rendered.token_count,
            "completion_tokens": len(words),
            "total_tokens": rendered.token_count + len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not body.get("stream"):
            if self.delay_s and not await self._pause(reader):
                return False
            await _send_json(writer, 200, {"id": "x", "choices": [_choice(is_chat, "".join(words))], "usage": usage})
            return True
        frames = [{"id": "x", "choices": [_delta(is_chat, word)]} for word in words]
        if (body.get("stream_options") or {}).get("include_usage"):
            frames.append({"id": "x", "choices": [], "usage": usage})
        return await self._stream([f"data: {json.dumps(frame)}\n\n" for frame in frames], mode, reader, writer)

    async def _stream(
        self, frames: list[str], mode: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        await _start_stream(writer)
        for count, frame in enumerate(frames):
            if mode == "die_mid_stream" and count == 2:
                writer.transport.abort()
                return False
            if mode == "exit_mid_stream" and count == 2:
                os._exit(1)
            if mode == "hang_mid_stream" and count == 2:
                await self._until_closed(reader)
                return False
            if self.delay_s and not await self._pause(reader):
                return False
            await _send_chunk(writer, frame)
        await _send_chunk(writer, "data: [DONE]\n\n")
        await _send_chunk(writer, "")
        return True

    async def _pause(self, reader: asyncio.StreamReader) -> bool:
        """Wait between tokens; False when the client left meanwhile."""
        try:
            await asyncio.wait_for(self._until_closed(reader), self.delay_s)
        except TimeoutError:
            return True
        return False


def _choice(is_chat: bool, text: str) -> dict[str, Any]:
    made = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"index": 0, "finish_reason": "stop", **made}


def _delta(is_chat: bool, text: str) -> dict[str, Any]:
    return {"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}


async def _send_json(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _start_stream(writer: asyncio.StreamWriter) -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()


async def _send_chunk(writer: asyncio.StreamWriter, text: str) -> None:
    body = text.encode()
    writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
    await writer.drain()


async def _send_stream(writer: asyncio.StreamWriter, frames: list[str]) -> None:
    await _start_stream(writer)
    for frame in [*frames, ""]:
        await _send_chunk(writer, frame)


def main() -> None:
    """Read options and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="m")
    parser.add_argument("--alias", action="append", default=[])
    parser.add_argument("--adapter", action="append", default=[], help="NAME=PATH of a LoRA adapter")
    parser.add_argument("--folder", default="")
    parser.add_argument("--worker-id", default="")
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--server", default="")
    parser.add_argument("--join-token", default="")
    parser.add_argument("--kvd", default="")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--capacity-blocks", type=int, default=4096)
    parser.add_argument("--max-context", type=int, default=8192)
    asyncio.run(FakeEngine(parser.parse_args()).run())


if __name__ == "__main__":
    main()
