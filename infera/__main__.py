"""`python -m infera` is `infera`."""

from infera.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
