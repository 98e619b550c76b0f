from __future__ import annotations

from pathlib import Path

import pytest

from infera.discovery.record import RankLoad
from infera.engine.hardware import hardware_name
from infera.engine.load import parse_load

# As the real engine prints it (two data-parallel ranks).
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 7.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 1234.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 99999.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",source="local_compute"} 1.7e+09
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0",dp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="0"} 1.0
sglang:num_queue_reqs{model_name="m",tp_rank="1",dp_rank="0"} 1.0
sglang:token_usage{model_name="m",tp_rank="0",dp_rank="0"} 0.5
"""


def test_vllms_page() -> None:
    assert parse_load(VLLM) == (
        RankLoad(dp_rank=0, running_requests=3, waiting_requests=7, kv_usage=0.25, computed_tokens=1234),
        RankLoad(dp_rank=1),
    )


def test_sglangs_page() -> None:
    assert parse_load(SGLANG) == (RankLoad(running_requests=2, waiting_requests=1, kv_usage=0.5),)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "vllm:num_requests_running",
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="0"} -1',
        'vllm:num_requests_running{engine="0"} x',
        "\x00\xff{}",
    ],
)
def test_odd_pages_say_nothing(page: str) -> None:
    assert parse_load(page) == ()


def test_a_share_above_one_is_one() -> None:
    assert parse_load("vllm:kv_cache_usage_perc 1.5")[0].kv_usage == 1.0


def test_hardware_is_the_first_gpu_or_the_processor(tmp_path: Path) -> None:
    nvidia, amd, cpu = tmp_path / "nvidia", tmp_path / "amd", tmp_path / "cpuinfo"
    assert hardware_name(nvidia, amd, cpu) is None
    cpu.write_text("processor : 0\nmodel name\t: Some  CPU @ 2 GHz\n")
    assert hardware_name(nvidia, amd, cpu) == "Some CPU @ 2 GHz"
    (amd / "card0" / "device").mkdir(parents=True)
    (amd / "card0" / "device" / "product_name").write_text("AMD Instinct MI355X\n")
    assert hardware_name(nvidia, amd, cpu) == "AMD Instinct MI355X"
    (nvidia / "0000:01:00.0").mkdir(parents=True)
    (nvidia / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert hardware_name(nvidia, amd, cpu) == "NVIDIA H200"
