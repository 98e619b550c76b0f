"""`python -m kvd` is `infera-kvd`."""

from kvd.cli import main

raise SystemExit(main())
