"""What the host's kernels take is what was measured here, on whatever processor and with whatever kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from offstage.pipeline.cache.sealed_files import read_sealed, write_sealed
from offstage.stages.machine.kernels import (
    FILE_NAME,
    NOMINAL,
    Kernels,
    PeakMeter,
    has_tiles,
    identity,
    local_kernels,
    measure as measure_kernels,
)
from tests.long_form import in_ci

MIB = 2**20
PROCESS = Path("/proc/self")
OTHERS = {"mm bfloat16": [9, 9, 9]}
"""Figures that no kernel has."""
VARIANTS = [
    {},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
]
"""What makes one processor stand for lesser ones; it changes nothing on a processor that is a lesser one itself."""
TRIAL = """
import sys
from dataclasses import dataclass
from pathlib import Path
from offstage.pipeline.kept_memory import return_freed_memory
return_freed_memory()
import torch
from offstage.stages.machine.kernels import PeakMeter
from offstage.stages.machine.kernels import local_kernels
result_factor = local_kernels(Path(sys.argv[1])).get("mm bfloat16", (0, 0, 0))[2]
left, right = torch.zeros(1024, 640).bfloat16(), torch.zeros(3072, 640).bfloat16()
with PeakMeter(Path("/proc/self")) as meter:
    beside = meter.beside(lambda: left @ right.t())
print(result_factor * 1024 * 3072 * 2, beside)
"""


@dataclass(frozen=True)
class Measured:
    """What one measurement found, where it was kept, and this process's peak memory: with less, before and after it."""

    folder: Path
    kernels: Kernels
    peaks: tuple[int, int, int]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Return what was measured in a folder that knows another environment's kernels, for a user who has none."""
    folder = tmp_path_factory.mktemp("measured")
    write_sealed(folder / FILE_NAME, {identity({"ATEN_CPU_CAPABILITY": "another"}): OTHERS})
    peak = peak_bytes()
    memory = np.ones(2**28, np.uint8)
    highest = peak_bytes()
    del memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "user"))
        kernels = local_kernels(folder)
    return Measured(folder, kernels, (peak, highest, peak_bytes()))


@pytest.fixture(autouse=True)
def _of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


linux = pytest.mark.skipif(not PROCESS.is_dir(), reason="no /proc")


@linux
def test_the_peak_of_a_call_is_seen_though_nothing_is_left_of_it() -> None:
    def call(beside: int) -> torch.Tensor:
        torch.ones(beside, dtype=torch.uint8)
        return torch.ones(64 * MIB, dtype=torch.uint8)

    with PeakMeter(PROCESS) as meter:
        assert meter.beside(lambda: call(96 * MIB)) == pytest.approx(32 * MIB, abs=4 * MIB), "they follow one another"
        assert meter.beside(lambda: call(1)) == pytest.approx(0, abs=4 * MIB)


@linux
@pytest.mark.parametrize(
    "variant",
    in_ci(VARIANTS[0], of=VARIANTS),
    ids=lambda variant: " ".join(variant.values()) or "as they are",
)
def test_a_product_of_another_shape_takes_what_the_probe_found(variant: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRIAL, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **variant}, capture_output=True, text=True, check=True)
    predicted, beside = map(float, done.stdout.split())
    assert beside == pytest.approx(predicted, rel=0.3, abs=2 * MIB)


def test_it_is_measured_once_and_read_without_torch_ever_after(measured: Measured) -> None:
    script = (
        "import sys; from pathlib import Path; from offstage.stages.machine.kernels import local_kernels;"
        "print(dict(local_kernels(Path(sys.argv[1])))); assert 'torch' not in sys.modules"
    )
    if identity() in read_sealed(measured.folder / FILE_NAME):
        command = [sys.executable, "-c", script, str(measured.folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(dict(measured.kernels))
    else:
        assert measured.kernels == NOMINAL


def test_figures_of_other_kernels_are_not_taken_for_these(measured: Measured, tmp_path: Path) -> None:
    assert len({identity({}), identity({"ONEDNN_MAX_CPU_ISA": "AVX2"}), identity({"OMP_NUM_THREADS": "7"})}) == 3
    assert measured.kernels.get("mm bfloat16") != (9, 9, 9)
    write_sealed(tmp_path / FILE_NAME, {identity(): OTHERS})
    assert local_kernels(tmp_path) == {"mm bfloat16": (9, 9, 9)}


def test_a_system_that_tells_no_peak_has_nominal_figures(tmp_path: Path) -> None:
    assert measure_kernels(tmp_path) is None
    tmp_path.joinpath("status").write_text("Name:\tpython\n")
    tmp_path.joinpath("clear_refs").touch()
    assert measure_kernels(tmp_path) is None


@linux
def test_measuring_leaves_the_peak_of_the_process_as_it_is(measured: Measured) -> None:
    lower, before, after = measured.peaks
    assert before >= max(lower, 2**28)
    assert after > before - 2**24  # the kernel counts pages in batches


def peak_bytes() -> int:
    """Return the most that this process has held, 0 where the system doesn't tell."""
    if not PROCESS.is_dir():
        return 0
    status = PROCESS.joinpath("status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_figures_are_coarse(measured: Measured) -> None:
    kernels = measured.kernels
    assert all(factor * 2 == round(factor * 2) >= 0 for factors in kernels.values() for factor in factors)


def test_a_processor_has_tiles_if_its_features_say_so(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n\nprocessor\t: 1\n")
    assert has_tiles(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_int8\n\n")
    assert not has_tiles(cpuinfo)
    assert not has_tiles(tmp_path / "none")
