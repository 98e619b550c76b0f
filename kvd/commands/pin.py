"""`infera-kvd pin` and `unpin`: keep a namespace out of eviction's way."""

from __future__ import annotations

import json
import os

from kvd.commands.asking import LONG_S, Asker, with_daemon
from kvd.options import Program
from kvd.program import PIN
from kvd.protocol import Message


def run(arguments: list[str]) -> int:
    """Pin; returns the exit status."""
    return retain(PIN, arguments, "pinned")


def retain(program: Program, arguments: list[str], retention: str) -> int:
    """Give the records of a namespace a retention class and say how many have it now."""
    values = program.parse(arguments, os.environ)

    def work(asker: Asker) -> int:
        answer = asker.ask(Message.RETAIN, {"namespace": values.namespace, "retention": retention})
        print(json.dumps(answer) if values.json else f"{answer['changed']} records are {answer['retention']} now")
        return 0

    return with_daemon(values, work, LONG_S)
