"""POST /v1/completions"""

from __future__ import annotations

from starlette.routing import Route

from infera.server.generation import GenerationRoute
from infera.server.state import ServerState

PATH = "/v1/completions"


def completions_route(state: ServerState) -> Route:
    """OpenAI's text completions, streaming and not."""
    return Route(PATH, GenerationRoute(state, "completions", PATH), methods=["POST"])
