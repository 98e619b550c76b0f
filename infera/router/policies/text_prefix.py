"""text-prefix: like kv-aware, but from the text of earlier prompts instead of tokens and events.

For workers that publish no events, and for models whose prompts cannot be tokenized here. What a worker holds is
guessed from what was sent to it, so it misses what was evicted, and what other routers sent.
"""

from __future__ import annotations

from infera.router.policies.kv_aware import KvAware


class TextPrefix(KvAware):
    """kv-aware's choice over guessed matches; nothing is tokenized for it."""

    name = "text-prefix"
    reads_prefixes = False
