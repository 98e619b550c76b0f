"""The one error of the tools."""

from __future__ import annotations


class ToolError(Exception):
    """A step could not be done; the text says why and what to do next."""
