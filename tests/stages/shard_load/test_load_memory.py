"""How much anonymous memory a load takes beyond the weights that stay, measured in a process of its own."""

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offstage.stages.empty_init.init import init_empty_weights
from tests.stages.shard_load.checkpoints import load, make_context

MIB = 2**20
TENSORS, TENSOR_BYTES = 8, 32 * MIB
WEIGHTS = TENSORS * TENSOR_BYTES
SLACK = 12 * MIB  # what Python and torch take for themselves on the way


class Heavy(nn.Module):
    """``WEIGHTS`` bytes of bfloat16, in so many tensors."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        shape = (WEIGHTS // tensors // 2 // 4096, 4096)
        weights = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(tensors))
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])


def save(folder: Path, suffix: str, dtype: torch.dtype, tensors: int = TENSORS) -> Path:
    shape = (WEIGHTS // tensors // 2 // 4096, 4096)
    state = {f"weights.{i}": torch.full(shape, float(i), dtype=dtype) for i in range(tensors)}
    path = folder / f"m.{suffix}"
    if suffix == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=suffix == "bin")
    return path


def anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def measure(root: Path, path: Path, home: str, spills: bool, tensors: int = TENSORS) -> int:
    """Load ``path`` and return the peak of anonymous memory above what the process held before."""

    def make() -> nn.Module:
        with init_empty_weights():
            return Heavy(tensors)

    config = {"offload_state_dict": spills}
    context = make_context(root, path, make, lambda name: home, **config)
    done, peak, before = threading.Event(), [0], anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    load(context, root / "out")
    done.set()
    watcher.join()
    return peak[0] - before


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Another process, which has loaded something: what it imports for that is no part of a load. Not a fork, since
    torch's threads don't survive one.
    """
    folder = tmp_path_factory.mktemp("first")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(measure, (folder, save(folder, "safetensors", torch.bfloat16), "disk", False))
        yield pool


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("suffix", "dtype", "home", "spills", "allowed"),
    [
        ("safetensors", torch.bfloat16, "cpu", False, WEIGHTS + 64 * MIB),
        pytest.param("safetensors", torch.bfloat16, "disk", False, 0, marks=pytest.mark.long_form),
        pytest.param("safetensors", torch.float32, "cpu", False, WEIGHTS + 64 * MIB, marks=pytest.mark.long_form),
        ("safetensors", torch.float32, "disk", False, TENSOR_BYTES + 64 * MIB),
        pytest.param("bin", torch.bfloat16, "cpu", False, WEIGHTS + TENSOR_BYTES, marks=pytest.mark.long_form),
        pytest.param("bin", torch.bfloat16, "disk", False, TENSOR_BYTES, marks=pytest.mark.long_form),
        pytest.param("old.bin", torch.bfloat16, "cpu", False, 2 * WEIGHTS, marks=pytest.mark.long_form),
        pytest.param("old.bin", torch.bfloat16, "cpu", True, WEIGHTS + TENSOR_BYTES, marks=pytest.mark.long_form),
    ],
)
def test_a_load_takes_little_more_than_what_stays(
    process: Pool, tmp_path: Path, suffix: str, dtype: torch.dtype, home: str, spills: bool, allowed: int
) -> None:
    path = save(tmp_path, suffix, dtype)
    assert process.apply_async(measure, (tmp_path, path, home, spills)).get(600) < allowed + SLACK


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("home", "allowed"), [("cpu", WEIGHTS + 64 * MIB), ("disk", 0)])
def test_a_tensor_larger_than_what_may_pass_through_is_never_held_twice(
    process: Pool, tmp_path: Path, home: str, allowed: int
) -> None:
    path = save(tmp_path, "safetensors", torch.bfloat16, tensors=1)
    assert process.apply_async(measure, (tmp_path, path, home, False, 1)).get(600) < allowed + SLACK
