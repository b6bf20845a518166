"""What a generation cost, summed over its batches, and what its speed is put down to."""

from dataclasses import replace

import pytest

from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.generate.metrics import Cost, TimedBatch
from offstage.stages.plan.plan import DevicePlan, Plan
from offstage.stages.units import DeviceId

NOTHING = Traffic()
PLAN = Plan(
    "explicit", "cpu", {"cpu": DevicePlan(None, 80, used_bytes=80), "disk": DevicePlan(None, 60)}, (),
    rates={"storage": 40, "host": 1000, "host_to_device": 10, "device": 1000},
)  # fmt: skip
ACCELERATED = replace(PLAN, main_device=0, devices={0: DevicePlan(None, 80, transfer_bytes=1, used_bytes=80)})


def cost(*, streamed: int = 0, storage: int = 0, stalled: float = 0.0) -> Cost:
    """Return the cost of two sequences of four tokens: a prefill of 2 seconds, and three steps of 1 second."""
    total = Cost()
    last = Traffic(streamed_bytes=100 + streamed, storage_bytes=50 + storage, stall_seconds=9 + stalled)
    first = Traffic(streamed_bytes=100, storage_bytes=50, stall_seconds=9)
    total.add(TimedBatch(10.0, [12.0, 13.0, 14.0, 15.0], 2, first, last, cpu=(7.0, 8.5)))
    return total


def test_what_streams_before_the_first_token_is_not_put_down_to_decoding() -> None:
    assert cost(streamed=60, storage=30, stalled=1.5).metrics(PLAN) == {
        "time_to_first_token_seconds": 2.0, "prefill_seconds": 2.0, "decode_seconds_per_token": 1.0,
        "decode_cpu_seconds_per_token": 0.5, "decode_tokens_per_second": 2.0,
        "streamed_bytes_per_token": 20, "streamed_bytes_per_second": 20.0, "stall_seconds_per_token": 0.5,
        "stall_share": 0.5, "bottleneck": "storage", "lower_bound_seconds_per_token": 10 / 40,
    }  # fmt: skip


def test_batches_are_summed() -> None:
    both = cost(streamed=60)
    both.add(TimedBatch(20.0, [22.0, 28.0], 1, NOTHING, Traffic(streamed_bytes=120)))
    assert (both.first_token_seconds, both.token_seconds) == ([2.0, 2.0], [1.0, 1.0, 1.0, 6.0])
    assert (both.prefill_seconds, both.steps, both.tokens, both.decode_seconds) == (4.0, 4, 7, 9.0)
    assert both.metrics(PLAN)["streamed_bytes_per_second"] == 20.0
    assert both.metrics(PLAN)["time_to_first_token_seconds"] == 2.0, "a batch"


@pytest.mark.parametrize(
    ("streamed", "storage", "main", "seconds"),
    [
        (0, 0, "cpu", 80 / 1000),
        (120, 120, "cpu", 40 / 40),
        (120, 0, "cpu", 120 / 1000),
        (120, 0, 0, 40 / 10),
        (120, 60, 0, 40 / 10),
        (60, 90, "cpu", 30 / 40),
    ],
)
def test_the_physical_bound_is_what_was_moved_for_a_token_at_the_rates_of_the_machine(
    streamed: int, storage: int, main: DeviceId, seconds: float
) -> None:
    bound = cost(streamed=streamed, storage=storage).lower_bound_seconds(PLAN if main == "cpu" else ACCELERATED)
    assert bound == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("streamed", "storage", "stalled", "bottleneck"),
    [
        (0, 0, 0.0, "compute"),
        (60, 60, 0.0, "compute"),
        (60, 60, 0.29, "compute"),
        (60, 60, 0.31, "storage"),
        (60, 0, 0.31, "host-to-device"),
        (60, 30, 3.0, "storage"),
    ],
)
def test_forwards_wait_for_the_bottleneck(streamed: int, storage: int, stalled: float, bottleneck: str) -> None:
    assert cost(streamed=streamed, storage=storage, stalled=stalled).bottleneck() == bottleneck


def test_one_token_tells_nothing_of_decoding() -> None:
    total = Cost()
    total.add(TimedBatch(10.0, [12.0], 1, NOTHING, NOTHING))
    metrics = total.metrics(PLAN)
    assert metrics.pop("prefill_seconds") == metrics.pop("time_to_first_token_seconds") == 2.0
    assert set(metrics.values()) == {None}


def test_the_rate_of_hits_is_of_decoding_alone_and_absent_where_no_expert_was_called() -> None:
    total = Cost()
    first, last = Traffic(expert_hits=50, expert_misses=50), Traffic(expert_hits=59, expert_misses=53)
    total.add(TimedBatch(10.0, [12.0, 13.0], 1, first, last))
    assert total.metrics(PLAN)["expert_hit_rate"] == 9 / 12
    assert "expert_hit_rate" not in cost(streamed=60).metrics(PLAN)


def test_of_batches_in_lockstep_decoding_is_from_the_first_token_of_all_to_the_last_but_for_others_first() -> None:
    total = Cost()
    total.add(
        TimedBatch(10.0, [12.0, 13.0, 15.0], 1, Traffic(streamed_bytes=10), Traffic(streamed_bytes=70), cpu=(1.0, 3.0)),
        TimedBatch(11.0, [14.0, 18.0], 2, Traffic(streamed_bytes=50), Traffic(streamed_bytes=100), cpu=(2.0, 5.0)),
        passes=7,
    )
    metrics = total.metrics(PLAN)
    assert metrics["time_to_first_token_seconds"] == 2.5, "each waits from when it joined"
    assert (metrics["prefill_seconds"], metrics["decode_cpu_seconds_per_token"]) == (2.0 + 1.0, 4 * 5 / 6 / 3)
    assert metrics["decode_tokens_per_second"] == 4 / 5
    assert (metrics["decode_seconds_per_token"], metrics["streamed_bytes_per_token"]) == (5 / 3, 30)
    assert total.token_seconds == [1.0, 2.0, 4.0]
    assert metrics["passes"] == 7
    assert "passes" not in cost().metrics(PLAN)


def test_tokens_that_share_a_pass_share_what_is_read_and_not_the_reading_of_memory() -> None:
    total = Cost()
    spans = [TimedBatch(0.0, [1.0, 2.0, 3.0], 1, NOTHING, Traffic(streamed_bytes=60)) for _ in range(4)]
    total.add(*spans, passes=2)
    assert (total.steps, total.traffic.streamed_bytes) == (8, 60)
    assert total.lower_bound_seconds(PLAN) == (80 + 30) / 1000
    assert total.lower_bound_seconds(ACCELERATED) == 30 / 10 / 4


def test_links_are_told_by_the_token_and_of_decoding_alone() -> None:
    traffic = Traffic()
    traffic.count_use(1, at_rest=100, carried=100)
    first = traffic.copy()
    traffic.count_use(1, at_rest=30, carried=40)
    traffic.count_stall(1, 0.5)
    total = Cost()
    total.add(TimedBatch(10.0, [12.0, 13.0, 14.0], 1, first, traffic.copy()))
    traffic.count_use(1, at_rest=100, carried=100)
    metrics = total.metrics(PLAN)
    assert (metrics["transfer_bytes_per_token.1"], metrics["transfer_stall_seconds_per_token.1"]) == (20, 0.25)
