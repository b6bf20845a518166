"""What forwards cost, summed over a run, and what their speed is put down to."""

from __future__ import annotations

import pytest

from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.inference.cost import ForwardCost


def test_only_what_streams_while_the_forwards_go_on_is_counted() -> None:
    traffic = Traffic(streamed_bytes=1000, storage_bytes=500, stall_seconds=9)
    cost = ForwardCost(traffic)
    for seconds, results in ((1.0, 3), (3.0, 5)):
        traffic.streamed_bytes += 101
        traffic.storage_bytes += 50
        traffic.stall_seconds += 0.5
        cost.add(seconds, results=results)
    assert (cost.seconds, cost.forwards, cost.results_per_second) == (4.0, 2, 2.0)
    assert cost.metrics() == {
        "streamed_bytes_per_forward": 101, "streamed_bytes_per_second": 50.5, "stall_share": 0.25,
        "bottleneck": "storage",
    }  # fmt: skip


@pytest.mark.parametrize(("stalled", "bottleneck"), [(1.0, "host-to-device"), (0.1, "compute")])
def test_what_does_not_come_from_storage_waits_for_the_link_or_not_at_all(stalled: float, bottleneck: str) -> None:
    traffic = Traffic()
    cost = ForwardCost(traffic)
    traffic.stall_seconds += stalled
    cost.add(4.0, results=1)
    assert cost.metrics()["bottleneck"] == bottleneck


def test_of_a_run_whose_results_were_all_there_nothing_is_told() -> None:
    cost = ForwardCost(Traffic())
    assert cost.results_per_second is None
    assert set(cost.metrics().values()) == {None}


def test_what_each_device_was_brought_is_told_by_the_forward() -> None:
    traffic = Traffic()
    traffic.count_use(0, at_rest=1000, carried=2000)
    cost = ForwardCost(traffic)
    for _ in range(2):
        traffic.count_use(0, at_rest=50, carried=60)
        traffic.count_use("cpu", at_rest=7, carried=7)
        traffic.count_stall(0, 0.5)
        cost.add(1.0, results=1)
    transfers = {name: value for name, value in cost.metrics().items() if name.startswith("transfer_")}
    assert transfers == {
        "transfer_bytes_per_forward.0": 60, "transfer_stall_seconds_per_forward.0": 0.5,
        "transfer_bytes_per_forward.cpu": 7, "transfer_stall_seconds_per_forward.cpu": 0.0,
    }  # fmt: skip
    assert (traffic.streamed_bytes, traffic.stall_seconds) == (1114, 1.0)
