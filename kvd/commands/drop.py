"""`infera-kvd drop`: forget a namespace."""

from __future__ import annotations

import json
import os

from kvd.commands.asking import LONG_S, Asker, with_daemon
from kvd.program import DROP
from kvd.protocol import Message


def run(arguments: list[str]) -> int:
    """Drop what nobody reads; returns the exit status."""
    values = DROP.parse(arguments, os.environ)

    def drop(asker: Asker) -> int:
        answer = asker.ask(Message.DROP, {"namespace": values.namespace})
        print(json.dumps(answer) if values.json else f"dropped {answer['dropped']} records")
        return 0

    return with_daemon(values, drop, LONG_S)
