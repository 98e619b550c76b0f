"""kvd: the cache daemon of a host and its client library.

This package imports nothing here, so that an engine pays for what it uses only.
"""
