"""`python -m infera.server`"""

from __future__ import annotations

import logging
import math
import os
import sys

import uvicorn

from infera.server.app import make_app
from infera.server.options import ServerConfig, load_config
from infera.server.state import ServerState, make_state

_log = logging.getLogger("infera.server")


def main() -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    config = load_config(sys.argv[1:], os.environ)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    state = make_state(config)
    _log.info(
        "server: listening on http://%s:%d, policy %s, discovery embedded, requests over http, events over zmq",
        config.host,
        config.port,
        config.router_policy,
    )
    for problem in state.degraded():
        _log.warning("server: %s", problem)
    _DrainingServer(config, state).run()


class _DrainingServer(uvicorn.Server):
    """Says that it is going down from the first signal on."""

    def __init__(self, config: ServerConfig, state: ServerState) -> None:
        self._state = state
        super().__init__(
            uvicorn.Config(
                make_app(state),
                host=config.host,
                port=config.port,
                loop="uvloop",
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(config.drain_timeout_s),
            )
        )

    def handle_exit(self, sig: int, frame: object) -> None:
        """First signal: no new requests, those under way go on until the drain timeout. Second: end now."""
        del frame
        if self.should_exit:
            self.force_exit = True
            return
        # Not the base class: it would raise the signal again at the end, and a drained server ended well.
        self._state.is_draining = True
        self.should_exit = True
        _log.info("server: signal %d, draining %d requests", sig, self._state.active_requests)


if __name__ == "__main__":
    main()
