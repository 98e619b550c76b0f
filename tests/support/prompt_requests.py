"""Random requests of every kind a server takes, each with its own combination of fields."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

_WORDS = [
    "the", " capital", " of", " France", "Paris ", "\n\n", "  ", "\t", "def f(x):\n    return x", "naïve", "e\u0301",
    "日本語", "🇪🇸🚀", "1234567890", "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<think>\nhm\n</think>\n\n",
    "'s", '"q"',
    "{}", "<b>", "&amp;", "\u00a0", "\u200d", "ﬁ", "x-anthropic-billing-header: cch=1;\nrest", "CONTINUE", " end. ",
]  # fmt: skip
_EFFORTS = ["none", "minimal", "low", "medium", "high"]


@dataclass(frozen=True)
class MadeRequest:
    """A request; ``unknown`` is the reason why its tokens are not to be known here, where that is intended."""

    kind: str
    body: dict[str, Any]
    unknown: str | None = None


class RequestMaker:
    """Makes requests from a seed."""

    def __init__(self, seed: int, *, takes_templates: bool) -> None:
        self._random = random.Random(seed)
        self._takes_templates = takes_templates

    def make(self, kind: str) -> MadeRequest:
        """One request of a kind."""
        made: MadeRequest = getattr(self, f"_{kind}")()
        if self._chance(0.1):
            made.body["cache_salt"] = "tenant"
        return made

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _text(self, words_max: int = 12) -> str:
        return "".join(self._random.choice(_WORDS) for _ in range(self._random.randint(1, words_max)))

    def _number(self) -> int:
        return self._random.randint(1, 40)

    # ---- chat ----

    def _chat(self) -> MadeRequest:
        body: dict[str, Any] = {"messages": self._messages()}
        unknown = None
        if self._chance(0.4):
            body["tools"] = [self._tool() for _ in range(self._random.randint(1, 3))]
            name = body["tools"][0]["function"]["name"]
            choices = ["auto", "none", "required", {"type": "function", "function": {"name": name}}, None]
            if self._chance(0.7):
                body["tool_choice"] = self._random.choice(choices)
        if self._chance(0.25):
            body["chat_template_kwargs"] = self._template_arguments()
        if self._chance(0.2):
            body["reasoning_effort"] = self._random.choice(_EFFORTS)
        if self._chance(0.15):
            body["documents"] = [{"title": self._text(2), "text": self._text(4)}]
        if self._chance(0.15):
            body["add_special_tokens"] = self._chance(0.8)
        if self._chance(0.1):
            body["response_format"] = {"type": "json_object"}
        self._add_ending(body)
        self._add_truncation(body, "max_tokens")
        if self._chance(0.08):
            body["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
            unknown = None if self._takes_templates else "chat_template"
        if self._chance(0.04):
            body["messages"].append(
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
            )
            unknown = unknown or "not_text"
        return MadeRequest("chat", body, unknown)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self._chance(0.5):
            messages.append(
                {"role": self._random.choice(["system", "system", "developer"]), "content": self._content()}
            )
        for _ in range(self._random.randint(0, 3)):
            messages.append(self._user())
            messages.extend(self._assistant_turn())
        messages.append(self._user())
        if self._chance(0.05):
            messages.insert(self._random.randrange(len(messages)), {"role": "note", "content": self._text()})
        if self._chance(0.08):
            messages.insert(self._random.randrange(len(messages)), {"role": "system", "content": self._text()})
        return messages

    def _user(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "user", "content": self._content()}
        if self._chance(0.15):
            message["name"] = "bob"
        return message

    def _content(self) -> Any:
        if self._chance(0.7):
            return self._text()
        parts: list[Any] = [{"type": "text", "text": self._text(5)} for _ in range(self._random.randint(1, 3))]
        if self._chance(0.3):
            parts[0]["cache_control"] = {"type": "ephemeral"}
        return parts

    def _assistant_turn(self) -> list[dict[str, Any]]:
        message: dict[str, Any] = {"role": "assistant"}
        if self._chance(0.35):
            message["content"] = self._random.choice([None, "", self._text()])
            calls = [self._call() for _ in range(self._random.randint(1, 2))]
            message["tool_calls"] = calls
            results = [{"role": "tool", "tool_call_id": call["id"], "content": self._content()} for call in calls]
        else:
            message["content"] = self._content()
            results = []
        if self._chance(0.2):
            message[self._random.choice(["reasoning", "reasoning_content"])] = self._text(4)
        if self._chance(0.2):
            message |= {"refusal": None, "annotations": []}
        if results and self._chance(0.7):
            results.append({"role": "assistant", "content": self._text()})
        return [message, *results]

    def _call(self) -> dict[str, Any]:
        arguments = self._random.choice(
            ["{}", "", '{"city": "Zürich", "days": 3}', '{"b":1.0,"a":[true,null]}', "no json", "[1]"]
        )
        return {
            "id": f"call{self._random.randrange(100_000):05}",
            "type": "function",
            "function": {"name": self._random.choice(["get_weather", "search"]), "arguments": arguments},
        }

    def _tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self._random.choice(["get_weather", "search", "räume"])}
        if self._chance(0.7):
            function["description"] = self._text(5)
        if self._chance(0.8):
            function["parameters"] = {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Größe <b>"}, "n": {"type": "integer"}},
                "required": ["city"],
            }
        if self._chance(0.2):
            function["strict"] = self._chance(0.5)
        if self._chance(0.1):
            function["extra"] = 1
        return {"type": "function", "function": function}

    def _template_arguments(self) -> dict[str, Any]:
        every = {
            "enable_thinking": self._chance(0.5),
            "thinking": True,
            "date_string": "1 Jan 2030",
            "custom": self._text(2),
            "none": None,
            "bos_token": "!",
            "max_length": 3,
        }
        names = self._random.sample(sorted(every), self._random.randint(1, 3))
        return {name: every[name] for name in names}

    def _add_ending(self, body: dict[str, Any]) -> None:
        if self._chance(0.15):
            body["add_generation_prompt"] = False
            if self._chance(0.7):
                body["messages"].append({"role": "assistant", "content": self._content()})
                body["continue_final_message"] = True

    def _add_truncation(self, body: dict[str, Any], output_field: str) -> None:
        if self._chance(0.15):
            body["truncate_prompt_tokens"] = self._random.choice([-1, self._number(), self._number(), 500])
            if self._chance(0.5):
                body["truncation_side"] = self._random.choice(["left", "right"])
        if self._chance(0.5):
            body[output_field] = self._number()

    # ---- completions ----

    def _completions(self) -> MadeRequest:
        prompts: list[Any] = [
            self._text(),
            [self._text() for _ in range(self._random.randint(1, 3))],
            [self._number() for _ in range(self._number())],
            [[self._number() for _ in range(self._number())] for _ in range(2)],
        ]
        body: dict[str, Any] = {"prompt": self._random.choice(prompts)}
        if self._chance(0.4):
            body["add_special_tokens"] = self._chance(0.5)
        if self._chance(0.2):
            body["echo"] = True
        self._add_truncation(body, "max_tokens")
        return MadeRequest("completions", body)

    # ---- responses ----

    def _responses(self) -> MadeRequest:
        body: dict[str, Any] = {"input": self._text() if self._chance(0.3) else self._items()}
        if self._chance(0.5):
            body["instructions"] = self._text()
        if self._chance(0.4):
            function = self._tool()["function"]
            tool = {"type": "function", "parameters": {"type": "object"}, "strict": True, **function}
            body["tools"] = [tool]
            body["tool_choice"] = self._random.choice(["auto", "none", "required"])
        if self._chance(0.2):
            body["reasoning"] = {"effort": self._random.choice(_EFFORTS)}
        if self._chance(0.2):
            body["chat_template_kwargs"] = self._template_arguments()
        if self._chance(0.2):
            body["truncation"] = "auto"
        if self._chance(0.05):
            body["previous_response_id"] = "resp_1"
            return MadeRequest("responses", body, "previous_response_id")
        return MadeRequest("responses", body)

    def _items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if self._chance(0.2):
            items.append({"role": "developer", "content": self._text()})
        for _ in range(self._random.randint(0, 3)):
            items.append(self._user_item())
            if self._chance(0.3):
                thought = {"type": "reasoning_text", "text": self._text(4)}
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]})
            if self._chance(0.4):
                items.extend(self._call_items())
            if self._chance(0.8):
                items.append(self._answer_item())
        items.append(self._user_item())
        if self._chance(0.1):
            items.append(self._answer_item() | {"status": "incomplete"})
        return items

    def _user_item(self) -> dict[str, Any]:
        content: Any = self._text()
        if self._chance(0.5):
            content = [{"type": "input_text", "text": self._text(5)} for _ in range(self._random.randint(1, 2))]
        item = {"role": "user", "content": content}
        return {"type": "message", **item} if self._chance(0.5) else item

    def _answer_item(self) -> dict[str, Any]:
        text = self._text()
        return self._random.choice(
            [
                {"role": "assistant", "content": text},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": text, "annotations": []}],
                },
            ]
        )

    def _call_items(self) -> list[dict[str, Any]]:
        call = self._call()
        output: dict[str, Any] = {"type": "function_call_output", "call_id": call["id"], "output": self._text()}
        return [{"type": "function_call", "call_id": call["id"], **call["function"]}, output]

    # ---- messages ----

    def _messages_request(self) -> MadeRequest:
        body: dict[str, Any] = {"messages": self._turns(), "max_tokens": 2000}
        if self._chance(0.5):
            body["system"] = self._text() if self._chance(0.5) else [self._block() for _ in range(2)]
        if self._chance(0.4):
            tool = {"name": "get_weather", "description": self._text(4), "input_schema": {"properties": {}}}
            body["tools"] = [tool] if self._chance(0.9) else []
        if body.get("tools") and self._chance(0.6):
            body["tool_choice"] = self._random.choice([{"type": "auto"}, {"type": "any"}, {"type": "none"}])
        if self._chance(0.3):
            body["thinking"] = self._random.choice(
                [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}]
            )
        if self._chance(0.2):
            body["output_config"] = {"effort": self._random.choice(["low", "high"])}
        if self._chance(0.15):
            body["chat_template_kwargs"] = self._template_arguments()
        return MadeRequest("messages", body)

    def _block(self) -> dict[str, Any]:
        return {"type": "text", "text": self._text(6), "cache_control": {"type": "ephemeral"}}

    def _turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        for _ in range(self._random.randint(0, 3)):
            turns.append({"role": "user", "content": self._text() if self._chance(0.5) else [self._block()]})
            if self._chance(0.1):
                turns.append({"role": "system", "content": self._text(4)})
            turns.extend(self._reply())
        turns.append({"role": "user", "content": [self._block() for _ in range(self._random.randint(1, 2))]})
        return turns

    def _reply(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if self._chance(0.3):
            blocks.append({"type": "thinking", "thinking": self._text(4), "signature": "s"})
        if self._chance(0.1):
            blocks.append({"type": "redacted_thinking", "data": "AA"})
        blocks.append(self._block())
        if not self._chance(0.4):
            return [{"role": "assistant", "content": blocks}]
        call = self._call()
        used = {"type": "tool_use", "id": call["id"], "name": "get_weather", "input": {"city": self._text(2), "n": 1.0}}
        result: Any = self._text() if self._chance(0.5) else [self._block(), {"type": "text", "text": "b"}]
        answer: list[dict[str, Any]] = [{"type": "tool_result", "tool_use_id": call["id"], "content": result}]
        if self._chance(0.5):
            answer.append(self._block())
        replies = [{"role": "assistant", "content": [*blocks, used]}, {"role": "user", "content": answer}]
        return [*replies, {"role": "assistant", "content": json.dumps(answer)[:40]}] if self._chance(0.7) else replies


KINDS = {"chat": "chat", "completions": "completions", "responses": "responses", "messages": "messages_request"}


def make_requests(seed: int, count: int, *, takes_templates: bool) -> list[MadeRequest]:
    """``count`` requests: chats every second time, the other kinds in turn."""
    maker = RequestMaker(seed, takes_templates=takes_templates)
    others = [name for name in KINDS if name != "chat"]
    kinds = ["chat" if number % 2 == 0 else others[number // 2 % len(others)] for number in range(count)]
    return [maker.make(KINDS[kind]) for kind in kinds]
