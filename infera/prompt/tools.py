"""Tool definitions as the engine hands them to its chat template.

The engine parses tools into its own types and writes them out again, so a template that dumps them as JSON
sees the engine's fields in the engine's order, not the client's.
"""

from __future__ import annotations

from typing import Any, Final

from infera.prompt.outcome import UnrenderableError

TOOLS_MAX: Final = 4096


def tools_for_template(tools: Any) -> list[dict[str, Any]] | None:
    """Tools in the engine's form, None where the request has none. Raises UnrenderableError when malformed."""
    if tools is None:
        return None
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise UnrenderableError("malformed", f"tools must be a list of at most {TOOLS_MAX} entries")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise UnrenderableError("malformed", "every tool must be a function")
    if not isinstance(function.get("name"), str):
        raise UnrenderableError("malformed", "every tool function needs a name")
    late = tool.get("defer_loading")
    written = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        written["strict"] = function["strict"]
    function_late = function.get("defer_loading") if function.get("defer_loading") is not None else late
    if function_late is not None:
        written["defer_loading"] = function_late
    result: dict[str, Any] = {"type": "function", "function": written}
    if late is not None:
        result["defer_loading"] = late
    return result
