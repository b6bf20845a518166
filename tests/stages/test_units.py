from __future__ import annotations

import pytest

from offstage.stages.units import format_bytes, in_tier_order, parse_device, parse_size, tier


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (12, 12), ("12", 12), (0, 0), ("10GB", 10**10), ("10GiB", 10 * 2**30), ("1.5TB", 1_500_000_000_000),
        ("500MB", 5 * 10**8), ("64KiB", 65536), (" 2 GB ", 2 * 10**9), ("0.1GB", 10**8), ("100kB", 10**5),
        ("30GIB", 30 * 2**30), ("200kib", 200 * 2**10), ("12 B", 12), ("1mB", 10**6),
    ],
)  # fmt: skip
def test_a_size_is_read_in_bytes(text: int | str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("count", [0, 999, 1240, 2_500_000, 3 * 10**9, 10**13])
def test_a_size_is_read_as_it_is_printed(count: int) -> None:
    assert parse_size(format_bytes(count)) == count


def test_a_share_is_of_the_device() -> None:
    assert parse_size("80%", of=1000) == 800
    with pytest.raises(ValueError, match="not known"):
        parse_size("80%")
    with pytest.raises(ValueError, match="more than the whole"):
        parse_size("101%", of=1000)


@pytest.mark.parametrize(
    "text",
    ["10gb", "10Gb", "1b", "1.5", "-1GB", "-5", -5, "nan", "inf", "infGB", "GB", "", None, True, 1.5, "1e3", "\uff11B"],
)
def test_what_is_no_size_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(ValueError, match="accepted: a whole number of bytes"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "device"), [(0, 0), ("0", 0), ("cuda:3", 3), ("cpu", "cpu"), ("CPU", "cpu"), ("disk", "disk")]
)
def test_a_device_is_read(text: object, device: int | str) -> None:
    assert parse_device(text) == device


@pytest.mark.parametrize("text", ["gpu", "cuda", "cuda:", "-1", -1, True, None, 1.0, "cuda:x", "²"])
def test_what_is_no_device_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not a device; accepted"):
        parse_device(text)


def test_tiers_are_accelerators_then_cpu_then_disk() -> None:
    assert in_tier_order(["disk", 10, "cpu", 2, 2]) == [2, 10, "cpu", "disk"]
    assert tier(99) < tier("cpu") < tier("disk")


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1_240_000_000, "1.24 GB"), (2e12, "2.00 TB")])
def test_bytes_are_printed_in_powers_of_ten(count: float, text: str) -> None:
    assert format_bytes(count) == text
