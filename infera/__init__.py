"""Infera: the control plane in front of many inference engines.

Nothing is imported here: an engine process loads `infera.hooks` and must not pay for a server.
"""

__version__ = "0.1.0"
