"""Switches among the environment's variables that the hooks and plugins share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REQUIRE_NATIVE: Final = "INFERA_REQUIRE_NATIVE"
"""An engine that would run with less of Infera than was asked for does not start."""
ALLOW_UNTESTED: Final = "INFERA_ALLOW_UNTESTED"
"""Connectors are used with versions of engines that they were not tested with."""


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether the variable is set to anything but 0, false, no or off."""
    return environ.get(name, "").lower() not in ("", "0", "false", "no", "off")
