"""Run by an engine's Python: renders requests as the engine does and prints the token ids.

Input (stdin): {"folder": ..., "requests": [{"kind": "chat"|"completions", "body": {...}}]}; output: a list of
token-id lists, or {"error": text} for a request that cannot be rendered.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import AutoTokenizer


def main() -> None:
    """Answer one batch of requests."""
    task = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(task["folder"])
    json.dump([_render(tokenizer, **request) for request in task["requests"]], sys.stdout)


def _render(tokenizer: Any, kind: str, body: dict[str, Any]) -> Any:
    try:
        if kind == "completions":
            return tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        text = tokenizer.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            documents=body.get("documents"),
            tokenize=False,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            **body.get("chat_template_kwargs", {}),
        )
        return tokenizer.encode(text, add_special_tokens=body.get("add_special_tokens", False))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
