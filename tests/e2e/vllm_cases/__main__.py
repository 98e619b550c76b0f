"""Runs the groups of cases and prints, last, one JSON object. Exit status 1 when any case was wrong."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys

from infera.tools.bench.results import keep
from tests.e2e.vllm_cases.groups import GROUPS, SHORT
from tests.e2e.vllm_cases.table import Table


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.vllm_cases", description=__doc__)
    parser.add_argument("--group", action="append", choices=sorted(GROUPS), help="only this one; may be repeated")
    parser.add_argument("--short", action="store_true", help=f"only {', '.join(SHORT)}")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--list", action="store_true", help="say which groups there are")
    options = parser.parse_args()
    if options.list:
        for name, group in GROUPS.items():
            print(f"{name:12} {(group.__doc__ or '').splitlines()[0]}")
        return 0
    # Engines are ended on the way out, also when somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"seed {options.seed}", flush=True)
    table = Table()
    for name in options.group or (SHORT if options.short else GROUPS):
        GROUPS[name](table, options.seed)
    summary = table.summary()
    if not options.short and not options.group:
        keep("e2e-vllm", summary, {"seed": options.seed, "cases": table.cases})
    print(json.dumps(summary))
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
