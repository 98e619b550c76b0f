"""Run by an engine's Python: vLLM's own render and tokenize endpoints, for several models in one process.

Each line of stdin is a task, each line of stdout its answer, after a first line that says "ready". A task
{"configure": name, "flags": [...]} builds vLLM's render application as `vllm launch render` does; a task
{"name": ..., "path": ..., "body": ...} posts to it and is answered with {"status": ..., "answer": ...}.
No engine runs: requests end where the token ids are made.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import httpx
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.utils.argparse_utils import FlexibleArgumentParser


async def _configure(flags: list[str]) -> httpx.AsyncClient:
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(flags)
    validate_parsed_serve_args(arguments)
    engine = AsyncEngineArgs.from_cli_args(arguments)
    config = VllmConfig(
        model_config=engine.create_model_config(),
        structured_outputs_config=engine.create_structured_outputs_config(),
    )
    app = build_app(arguments, ("render",))
    await init_render_app_state(config, app.state, arguments)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://render", timeout=60)


async def _serve(answers: Any) -> None:
    clients: dict[str, httpx.AsyncClient] = {}
    for line in sys.stdin:
        task = json.loads(line)
        if "configure" in task:
            clients[task["configure"]] = await _configure(task["flags"])
            answer: dict[str, Any] = {"status": 200}
        else:
            response = await clients[task["name"]].post(task["path"], json=task["body"])
            try:
                content = response.json()
            except ValueError:
                content = response.text
            answer = {"status": response.status_code, "answer": content}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Answer tasks until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints; what it prints is no answer
    answers.write('"ready"\n')
    answers.flush()
    asyncio.run(_serve(answers))


if __name__ == "__main__":
    main()
