"""`infera-kvd status`: what the daemon holds, for whom, and what it refused."""

from __future__ import annotations

import json
import os

from kvd.commands.asking import Asker, with_daemon
from kvd.program import STATUS
from kvd.protocol import Message
from kvd.status import render_status


def run(arguments: list[str]) -> int:
    """Print it; returns the exit status."""
    values = STATUS.parse(arguments, os.environ)

    def show(asker: Asker) -> int:
        facts = asker.ask(Message.STATUS)
        print(json.dumps(facts) if values.json else render_status(facts))
        return 0

    return with_daemon(values, show)
