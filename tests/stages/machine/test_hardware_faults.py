"""What is said of a machine that the config describes wrongly: each key with its place, and what may stand there."""

from __future__ import annotations

from typing import Any

import pytest

from offstage.stages.machine.hardware_faults import hardware_faults
from offstage.stages.machine.rates import Rates, read_rates

DEVICE_KEYS = "here may stand memory, name, host_to_device, rates, ledger"
GB = 10**9


def device(**keys: Any) -> dict[str, Any]:
    return {"devices": [{"memory": "24GB"}, {"memory": "12GB", **keys}]}


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"hosts": {"memory": "1GB"}}, "hardware.hosts", "names no hosts; give null for one, auto for those that torchrun"),
    ({"exact_hosts": "yes"}, "hardware.exact_hosts", "'yes' is neither; give true to have hosts with unlike kernels"),
    ({"hosst": {"memory": "1GB"}}, "hardware.hosst", "unknown key (did you mean 'host'?); here may stand devices"),
    ({"hosts": [{"devices": 3}, {}]}, "hardware.hosts[0].devices", "3 is no list"),
    ({"zzz": 1}, "hardware.zzz", "unknown key; here may stand devices, host, rates"),
    ({1: 1}, "hardware.1", "unknown key; here may stand"),
    ({"host": {"memory": "1GB", "memroy": "1GB"}}, "hardware.host.memroy", "(did you mean 'memory'?); here may"),
    (device(nam="x"), "hardware.devices[1].nam", f"unknown key (did you mean 'name'?); {DEVICE_KEYS}"),
    (device(bandwidth="1GB"), "hardware.devices[1].bandwidth", f"unknown key; {DEVICE_KEYS}"),
    (
        device(rates={"host_to_dvice": "1GB"}), "hardware.devices[1].rates.host_to_dvice",
        "(did you mean 'host_to_device'?); there are host_to_device",
    ),
    (device(rates={"storage": "1GB"}), "hardware.devices[1].rates.storage", "give it as hardware.rates.storage"),
    (device(rates="1GB"), "hardware.devices[1].rates", "'1GB' is no mapping; give {host_to_device: 3GB}"),
    (device(rates={"device": 0}), "hardware.devices[1].rates.device", "0 is no speed"),
    (device(host_to_device="fast"), "hardware.devices[1].host_to_device", "'fast' is not a size"),
    (
        device(host_to_device="1GB", rates={"host_to_device": "2GB"}),
        "hardware.devices[1].host_to_device", "rates.host_to_device too, '2GB'; leave one",
    ),
    (device(name=["x"]), "hardware.devices[1].name", "is no name"),
    (device(name=True), "hardware.devices[1].name", "is no name"),
    (device(name="a\nb"), "hardware.devices[1].name", "is no name"),
    (device(name=61 * "a"), "hardware.devices[1].name", "at most 60 characters"),
    ({"rates": {"hots": "1GB"}}, "hardware.rates.hots", "unknown rate (did you mean 'host'?); there are storage, host"),
    ({"rates": {"links": "1GB"}}, "hardware.rates.links", "unknown rate; there are storage, host, host_to_device"),
]  # fmt: skip


@pytest.mark.parametrize(("hardware", "key", "words"), FAULTS, ids=[key for _, key, _ in FAULTS])
def test_a_key_that_nobody_reads_is_named_with_its_place(hardware: dict[str, Any], key: str, words: str) -> None:
    (fault,) = hardware_faults(hardware)
    assert fault.key == key
    assert words in str(fault)


@pytest.mark.parametrize("hardware", [
    {}, {"devices": None, "rates": {}}, {"host": None, "rates": None},
    {"rates": {"root": None, "host_to_device": "1GB"}}, device(ledger="1GB"),
    device(name="RTX 3060", host_to_device="6GB", rates={"device": "360GB"}), device(name=3060, rates={}),
])  # fmt: skip
def test_what_may_stand_there_is_no_fault(hardware: dict[str, Any]) -> None:
    assert list(hardware_faults(hardware)) == []


def test_what_a_device_has_of_its_own_goes_before_what_all_have_and_that_before_nominal_rates() -> None:
    given = {"rates": {"host_to_device": "25GB"}, **device(host_to_device="6GB", rates={"device": "360GB"})}
    rates = read_rates(given)
    assert rates.apart == {
        0: {"host_to_device": 25 * GB, "device": Rates().device}, 1: {"host_to_device": 6 * GB, "device": 360 * GB},
    }  # fmt: skip
    assert (rates.link_of(1), rates.link_of(0), rates.link_of("cpu")) == (6 * GB, 25 * GB, 25 * GB)
    assert (rates.slowest_link, rates.storage) == (6 * GB, Rates().storage)
    assert read_rates({**given, "devices": device(rates={"host_to_device": "6GB"})["devices"]}).link_of(1) == 6 * GB
    assert Rates(**rates.shared, apart=rates.apart) == rates, "as a plan keeps them"


def test_without_rates_of_their_own_devices_are_alike() -> None:
    rates = read_rates(device(name="RTX 3060", rates={"host_to_device": None}))
    assert (rates, rates.apart) == (Rates(), {})
