"""Memory groups: in both versions of the interface, drawn in a folder, and for real where this process may."""

import subprocess
import sys
from pathlib import Path

import pytest

from offstage.pipeline.memory_cgroups import CapError, make_group

V1_MOUNT = "33 32 0:29 {group} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw shared:10 - cgroup2 cgroup2 rw\n"


def draw(root: Path, *, membership: str, mount: str, folder: str, files: dict[str, str]) -> Path:
    """Draw the files of the kernel that say which group this process is in; returns the group's folder."""
    root.joinpath("proc/self").mkdir(parents=True)
    root.joinpath("proc/self/cgroup").write_text(membership)
    root.joinpath("proc/self/mountinfo").write_text(mount)
    group = root / folder
    group.mkdir(parents=True)
    for name, text in files.items():
        group.joinpath(name).write_text(text)
    return group


@pytest.mark.parametrize(("group", "inside"), [("/", "sys/fs/cgroup/memory/job"), ("/job", "sys/fs/cgroup/memory")])
def test_version_1_makes_a_group_below_its_own(group: str, inside: str, tmp_path: Path) -> None:
    mount = V1_MOUNT.format(group=group)
    own = draw(tmp_path, membership="4:memory:/job\n0::/\n", mount=mount, folder=inside, files={})
    made = make_group(tmp_path)
    assert made.version == 1
    assert made.folder.parent.resolve() == own.resolve()
    made.limit(1000)
    assert made.folder.joinpath("memory.limit_in_bytes").read_text() == "1000"
    assert made.folder.joinpath("memory.memsw.limit_in_bytes").read_text() == "1000"
    made.folder.joinpath("memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert made.kills() == 2


def test_version_2_passes_the_controller_on_and_allows_no_swap(tmp_path: Path) -> None:
    files = {"cgroup.controllers": "cpu memory", "cgroup.subtree_control": ""}
    own = draw(tmp_path, membership="0::/job\n", mount=V2_MOUNT, folder="sys/fs/cgroup/job", files=files)
    made = make_group(tmp_path)
    assert made.version == 2
    assert made.folder.parent.resolve() == own.resolve()
    assert own.joinpath("cgroup.subtree_control").read_text() == "+memory"
    made.limit(1000)
    assert made.folder.joinpath("memory.max").read_text() == "1000"
    assert made.folder.joinpath("memory.swap.max").read_text() == "0"
    made.folder.joinpath("memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert made.kills() == 1


@pytest.mark.parametrize(
    ("membership", "mount"),
    [("0::/job\n", V2_MOUNT), ("9:pids:/job\n", V1_MOUNT.format(group="/")), ("", "")],
    ids=["a group without the controller", "another controller", "no groups"],
)
def test_where_there_can_be_no_group_it_says_so(membership: str, mount: str, tmp_path: Path) -> None:
    draw(tmp_path, membership=membership, mount=mount, folder="sys/fs/cgroup/job", files={})
    with pytest.raises(CapError, match="no memory group can be made"):
        make_group(tmp_path)


def test_a_real_group_ends_what_needs_more_and_lets_be_what_does_not() -> None:
    try:
        group = make_group()
    except CapError as error:
        pytest.skip(str(error))
    try:
        group.limit(64 * 2**20)
        code = "import sys; block = b'x' * (int(sys.argv[1]) * 2**20)"
        ends = [
            subprocess.run(group.entering([sys.executable, "-c", code, size]), check=False).returncode
            for size in ("16", "300")
        ]
        assert ends == [0, -9]
        assert group.kills() == 1
    finally:
        group.remove()
    assert not group.folder.exists()
