"""POST /v1/chat/completions"""

from __future__ import annotations

from starlette.routing import Route

from infera.server.generation import GenerationRoute
from infera.server.state import ServerState

PATH = "/v1/chat/completions"


def chat_route(state: ServerState) -> Route:
    """OpenAI's chat completions, streaming and not."""
    return Route(PATH, GenerationRoute(state, "chat", PATH), methods=["POST"])
