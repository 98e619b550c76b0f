"""First on PYTHONPATH in an Infera image: wires engines in when the environment asks for it.

Without an INFERA_ variable this does nothing but pass on to the next `sitecustomize`. It must never
break a Python process, least of all one that is not an engine.
"""

import os
import sys


def _pass_on() -> None:
    """Run the `sitecustomize` that would have run without this one."""
    import _frozen_importlib
    import _frozen_importlib_external as external

    here = os.path.realpath(os.path.dirname(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = external.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(_frozen_importlib.module_from_spec(spec))


if any(name.startswith("INFERA_") for name in os.environ):
    try:
        from infera.hooks.bootstrap import install

        install()
    except Exception as error:
        if os.environ.get("INFERA_REQUIRE_NATIVE", "").lower() not in ("", "0", "false", "no", "off"):
            # Python itself would report any other exception from here and go on.
            raise SystemExit(f"infera: INFERA_REQUIRE_NATIVE is set and hooks failed: {error}") from error
        sys.stderr.write(f"infera: hooks are off: {type(error).__name__}: {error}\n")

_pass_on()
