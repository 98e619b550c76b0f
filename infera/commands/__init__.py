"""Subcommands of `infera`, one module each, imported only when asked for."""
