"""How `infera-kvd status` looks, and what Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvd.http import HELP, render_metrics
from kvd.status import render_status

METRICS = {
    "data_bytes": 4 << 30,
    "used_bytes": 1 << 30,
    "quarantined_bytes": 3 << 20,
    "records_present": 1234,
    "records_incomplete": 5,
    "record_capacity": 131072,
    "stored_total": 2000,
    "evicted_total": 766,
    "touched_total": 9,
    "reserve_no_space_total": 1,
    "reserve_limit_total": 2,
    "commit_stale_total": 3,
    "malformed_frames_total": 4,
}
FACTS = {
    "version": "1.2.3",
    "pid": 77,
    "socket": "/run/kvd.sock",
    "metrics": METRICS,
    "clients": [{"number": 0, "name": "vllm-worker", "pid": 4242}],
    "classes": [{"id": 1, "namespace": "ab" * 16, "group": 0, "model": "smol"}],
}


def test_a_person_reads_how_full_it_is_and_for_whom() -> None:
    text = render_status(FACTS)
    for part in (
        "infera-kvd 1.2.3  pid 77  socket /run/kvd.sock",
        "1,024 MiB of 4,096 MiB used (25%), 3 MiB in quarantine",
        "1234 present, 5 being written, room for 131072",
        "2000 stored, 766 evicted",
        "1 no space, 2 over limit, 3 stale commits, 4 malformed frames",
        "vllm-worker pid 4242",
        f"namespace {'ab' * 16} group 0 model smol",
    ):
        assert part in text


def test_an_empty_daemon_can_be_shown() -> None:
    text = render_status(FACTS | {"clients": [], "classes": []})
    assert "clients  0" in text
    assert "classes  0" in text


def test_metrics_are_what_prometheus_reads() -> None:
    families = {family.name: family for family in text_string_to_metric_families(render_metrics(METRICS))}
    assert families["infera_kvd_used_bytes"].type == "gauge"
    assert families["infera_kvd_used_bytes"].samples[0].value == 1 << 30
    assert families["infera_kvd_evicted"].type == "counter"
    assert families["infera_kvd_evicted"].samples[0].value == 766
    assert families["infera_kvd_evicted"].documentation == HELP["evicted_total"]
    assert len(families) == len(METRICS)
