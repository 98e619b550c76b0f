"""`make test-parity`: our token ids against those of vLLM's own render endpoints, request by request.

Every model (a real one and hand-made templates of different styles) is served by vLLM's render application, with
flags that change prompts; our side gets the render profile that the plugin reads off the same flags. Ends with a
line of JSON: requests the engine rendered, those we rendered to the same ids, and those unknown by design.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from infera_vllm.arguments import ServeArguments
from infera_vllm.render_profile import render_profile

from infera.discovery.record import PROBE_MESSAGES, PROBE_TEXT, RenderProfile, ids_digest, tokenizer_digest
from infera.prompt.outcome import RenderedRequest, Unrenderable
from infera.prompt.renderer import PromptRenderer
from infera.tools.engine_env import ensure_vllm
from infera.tools.models import prepare_smollm2, prepare_tiny
from tests.support import chat_templates
from tests.support.models import make_model_folder
from tests.support.prompt_requests import MadeRequest, make_requests

REQUESTS_PER_MODEL_DEFAULT = 60
CONTEXT_TOKENS = 2048
SCRIPT = Path(__file__).with_name("vllm_render.py")
_PATHS = {
    "chat": "/v1/chat/completions/render",
    "completions": "/v1/completions/render",
    "responses": "/v1/responses/render",
    "messages": "/v1/messages/render",
}
_TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


@dataclass(frozen=True)
class ParityModel:
    """A model folder and the flags its engine is started with."""

    name: str
    folder: Path
    flags: list[str] = field(default_factory=list)

    @property
    def profile(self) -> RenderProfile:
        """As the plugin reads it; the render endpoint takes disabled thinking for no effort at all."""
        profile = render_profile(ServeArguments(["vllm", "serve", *self.flags], 2))
        return msgspec.structs.replace(profile, disabled_thinking_effort="none")

    @property
    def takes_templates(self) -> bool:
        """Whether requests may bring a template."""
        return self.profile.trusts_request_template


class RenderProcess:
    """vLLM's endpoints, in a process of the engine's Python."""

    def __init__(self) -> None:
        environ = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [str(ensure_vllm().python), str(SCRIPT)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> RenderProcess:
        assert self._read() == "ready"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()

    def configure(self, model: ParityModel) -> None:
        """Serve a model."""
        flags = ["--model", str(model.folder), "--served-model-name", "m", "--max-model-len", str(CONTEXT_TOKENS)]
        answer = self._ask({"configure": model.name, "flags": [*flags, *model.flags]})
        assert answer["status"] == 200, answer

    def post(self, model: ParityModel, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and content of an answer."""
        answer = self._ask({"name": model.name, "path": path, "body": {"model": "m", **body}})
        return answer["status"], answer["answer"]

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._read()
        return answer

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"vLLM's render process ended:\n{self._log.read()[-3000:]}")
        return json.loads(line)


def make_models(folder: Path) -> list[ParityModel]:
    """The real model, one for each hand-made template, and others for what flags can change."""
    tiny = prepare_tiny()

    def made(name: str, template: str | None, *, begins_with_bos: bool = False) -> Path:
        path = make_model_folder(folder / name, template, begins_with_bos=begins_with_bos)
        shutil.copy(tiny / "config.json", path)
        return path

    models = [ParityModel("smollm2", prepare_smollm2(), _TOOLS)]
    flags = {
        "headers": ["--trust-request-chat-template"],
        "tags": [
            "--default-chat-template-kwargs", '{"enable_thinking": false, "custom": "d"}', "--reasoning-parser=qwen3",
        ],
        "marks": ["--default-chat-template-kwargs={\"thinking\": true}"],
        "strict": ["--exclude-tools-when-tool-choice-none"],
        "parts": ["--trust_request_chat_template", "--exclude-tools-when-tool-choice-none"],
    }  # fmt: skip
    for style, template in chat_templates.ALL.items():
        begins_with_bos = style in ("headers", "marks", "strict", "turns")
        path = made(style, template, begins_with_bos=begins_with_bos)
        models.append(ParityModel(style, path, [*_TOOLS, *flags.get(style, [])]))
    given = folder / "given.jinja"
    given.write_text(chat_templates.TAGS)
    models.append(ParityModel("given", tiny, [*_TOOLS, "--chat-template", str(given)]))
    openai = ["--chat-template", chat_templates.PARTS, "--chat-template-content-format", "string"]
    models.append(ParityModel("inline", made("inline", None), [*_TOOLS, *openai]))
    models.append(ParityModel("named", _with_named_templates(made("named", None)), _TOOLS))
    return models


def _with_named_templates(folder: Path) -> Path:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "default", "template": chat_templates.CHATML},
        {"name": "tool_use", "template": chat_templates.TAGS},
    ]
    path.write_text(json.dumps(config))
    return folder


@dataclass
class ParityCount:
    """What became of the requests."""

    requests: int = 0
    exact: int = 0
    unknown_by_design: int = 0
    refused_by_engine: int = 0
    differing: list[str] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)


class Comparison:
    """Both sides of a run."""

    def __init__(self, process: RenderProcess) -> None:
        self._process = process
        self.count = ParityCount()

    async def run(self, model: ParityModel, seed: int, count: int) -> None:
        """Compare ``count`` requests to a model."""
        self._process.configure(model)
        renderer = PromptRenderer()
        try:
            await renderer.prepare("m", str(model.folder), tokenizer_digest(model.folder), self._probed(model))
            problem = renderer.problems().get("m")
            assert problem is None, f"{model.name}: {problem}"
            for request in make_requests(seed, count, takes_templates=model.takes_templates):
                ours = await renderer.render("m", request.kind, request.body, context_tokens_max=CONTEXT_TOKENS)  # type: ignore[arg-type]
                self._compare(model, request, ours)
        finally:
            renderer.close()

    def _probed(self, model: ParityModel) -> RenderProfile:
        """The profile with the engine's answers to the probes, as the agent asks them."""
        _, text = self._process.post(model, "/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": True})
        status, chat = self._process.post(model, "/tokenize", {"messages": list(PROBE_MESSAGES)})
        return msgspec.structs.replace(
            model.profile,
            text_probe_digest=ids_digest(text["tokens"]),
            chat_probe_digest=ids_digest(chat["tokens"]) if status == 200 else "",
        )

    def _compare(self, model: ParityModel, request: MadeRequest, ours: RenderedRequest | Unrenderable) -> None:
        status, answer = self._process.post(model, _PATHS[request.kind], request.body)
        count = self.count
        if request.unknown is not None:
            if isinstance(ours, Unrenderable) and ours.reason == request.unknown:
                count.requests += 1
                count.unknown_by_design += 1
                return
            if status == 200:
                count.differing.append(f"{model.name}: {request} should be unknown, not {str(ours)[:300]}")
            return
        if status != 200:
            assert status < 500, f"{model.name}: {request}: {answer}"
            count.refused_by_engine += 1
            return
        count.requests += 1
        theirs = [entry["token_ids"] for entry in (answer if isinstance(answer, list) else [answer])]
        if isinstance(ours, RenderedRequest) and [list(prompt.tokens) for prompt in ours.prompts] == theirs:
            count.exact += 1
            count.by_kind[request.kind] += 1
            return
        shown = ours if isinstance(ours, Unrenderable) else [list(prompt.tokens) for prompt in ours.prompts]
        count.differing.append(
            f"{model.name} {request.kind}: {json.dumps(request.body, ensure_ascii=False)}\n"
            f"  engine: {str(theirs)[:400]}\n  ours:   {str(shown)[:400]}"
        )


async def compare_all(seed: int, per_model: int = REQUESTS_PER_MODEL_DEFAULT) -> ParityCount:
    """Compare requests to every model, each with its own seed made from ``seed``."""
    with tempfile.TemporaryDirectory() as folder, RenderProcess() as process:
        comparison = Comparison(process)
        for number, model in enumerate(make_models(Path(folder))):
            await comparison.run(model, seed * 1000 + number, per_model)
        return comparison.count


def main() -> int:
    """Run, print what differs, and end with the line of JSON."""
    seed = int(os.environ.get("SEED") or random.randrange(1_000_000))
    print(f"parity: seed {seed} (SEED={seed} repeats this run)", flush=True)
    count = asyncio.run(compare_all(seed, int(os.environ.get("REQUESTS_PER_MODEL", REQUESTS_PER_MODEL_DEFAULT))))
    for text in count.differing[:10]:
        print(f"parity: differs: {text}")
    print(f"parity: exact by kind: {dict(count.by_kind)}; refused by the engine: {count.refused_by_engine}")
    figures = {"requests": count.requests, "exact": count.exact, "unknown_by_design": count.unknown_by_design}
    print(json.dumps(figures))
    return 1 if count.differing or count.exact < 200 else 0


if __name__ == "__main__":
    sys.exit(main())
