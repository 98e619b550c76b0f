"""The subcommands of `infera-kvd`, one a module: `run(arguments)` returns the exit status."""
