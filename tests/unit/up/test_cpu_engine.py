"""CPU defaults of engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.up.cpu_engine import core_range, cpu_environment, cpu_flags, has_bfloat16_instructions, has_flag


@pytest.mark.parametrize(
    ("index", "engines", "cores", "text"),
    [
        (0, 2, [0, 1], "0"),
        (1, 2, [0, 1], "1"),
        (2, 3, [0, 1], "0"),
        (0, 1, [0, 1, 2, 3], "0-3"),
        (1, 2, [0, 1, 2, 3], "2-3"),
        (0, 1, [0, 2, 5], "0,2,5"),
    ],
)
def test_cores_are_shared_out(index: int, engines: int, cores: list[int], text: str) -> None:
    assert core_range(index, engines, cores) == text


@given(st.integers(1, 16), st.integers(1, 64))
def test_no_core_serves_two_engines_while_there_are_enough(engines: int, count: int) -> None:
    ranges = [core_range(index, engines, range(count)) for index in range(engines)]
    assert len(set(ranges)) == min(engines, count)


def test_what_the_user_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert "VLLM_CPU_KVCACHE_SPACE" not in cpu_environment(0, 1, [])
    assert cpu_flags(["--block-size=64", "--enforce-eager", "--dtype", "auto"]) == []
    assert cpu_flags(["--dtype", "auto"]) == ["--enforce-eager", "--block-size", "32"]


def test_bfloat16_is_used_only_where_the_processor_has_it(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("flags : fpu avx2 avx512f")
    assert not has_bfloat16_instructions(facts)
    facts.write_text("flags : fpu avx512_bf16 sse")
    assert has_bfloat16_instructions(facts)
    assert not has_bfloat16_instructions(tmp_path / "none")


def test_ranks_are_bound_by_the_user() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" in cpu_environment(0, 1, [])
    assert "VLLM_CPU_OMP_THREADS_BIND" not in cpu_environment(0, 1, ["--tensor-parallel-size", "2"])


def test_has_flag() -> None:
    assert has_flag(["--a", "--b=1"], "--b")
    assert not has_flag(["--bb=1"], "--b")
