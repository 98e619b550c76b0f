"""What vLLM needs to run well on a CPU, several engines on one small machine. Not used where an engine has a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

KV_CACHE_SPACE_GIB = 1
BLOCK_SIZE_TOKENS = 32


def cpu_environment(index: int, engines: int, engine_flags: Sequence[str]) -> dict[str, str]:
    """Variables for engine `index` of `engines`. What the user has set in the environment is not overridden."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_SPACE_GIB),
        # Compiling for a CPU costs minutes at the first request and gains little.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": core_range(index, engines, sorted(os.sched_getaffinity(0))),
    }
    if has_flag(engine_flags, "--tensor-parallel-size", "-tp"):
        del wanted["VLLM_CPU_OMP_THREADS_BIND"]  # one list a rank is needed then, which only the user can choose
    return {name: value for name, value in wanted.items() if name not in os.environ}


def cpu_flags(engine_flags: Sequence[str]) -> list[str]:
    """Flags for a CPU engine that the user did not give: no graph compilation, the smallest block of CPU attention."""
    flags = []
    if not has_flag(engine_flags, "--enforce-eager", "--no-enforce-eager"):
        flags.append("--enforce-eager")
    if not has_flag(engine_flags, "--block-size"):
        flags += ["--block-size", str(BLOCK_SIZE_TOKENS)]
    if not has_flag(engine_flags, "--dtype") and not has_bfloat16_instructions():
        flags += ["--dtype", "float32"]  # bfloat16 is ten times slower where the processor has to imitate it
    return flags


def has_bfloat16_instructions(cpu_facts: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    try:
        words = set(cpu_facts.read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def core_range(index: int, engines: int, cores: Sequence[int]) -> str:
    """The cores of one engine, e.g. "0-3" or "5": equal shares, or one core for several engines when cores are few."""
    if engines >= len(cores):
        return str(cores[index % len(cores)])
    share = len(cores) // engines
    own = list(cores[index * share : (index + 1) * share])
    if own[-1] - own[0] == len(own) - 1 and len(own) > 1:
        return f"{own[0]}-{own[-1]}"
    return ",".join(map(str, own))


def has_flag(flags: Sequence[str], *names: str) -> bool:
    """Whether one of the names is among the flags, alone or as `name=value`."""
    return any(flag.partition("=")[0] in names for flag in flags)
