"""The endpoint: `python -m infera.server`. One file per API surface."""
