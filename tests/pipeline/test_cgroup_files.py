"""Memory groups as the kernel shows them, in both versions and in both at once."""

from pathlib import Path

import pytest

from offstage.pipeline.memory_cgroups import core_quota, memory_limits, mounted_groups

V1 = "32 31 0:29 {group} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "33 31 0:30 {group} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def groups(root: Path, membership: str, mounts: str) -> list[tuple[int, str, list[str]]]:
    """Return version, own folder (or nothing) and all folders of each group, below ``root``."""
    root.joinpath("proc/self").mkdir(parents=True)
    root.joinpath("proc/self/cgroup").write_text(membership)
    root.joinpath("proc/self/mountinfo").write_text(mounts)
    return [
        (
            group.interface.version,
            str(group.folder.relative_to(root)) if group.folder else "",
            [str(folder.relative_to(root)) for folder in group.folders],
        )
        for group in mounted_groups("memory", root)
    ]


@pytest.mark.parametrize(
    ("version", "membership", "mount", "top"),
    [(1, "4:cpu,memory:/job/step\n", V1, "sys/fs/cgroup/memory"), (2, "0::/job/step\n", V2, "sys/fs/cgroup")],
)
def test_a_group_is_found_with_those_around_it(
    version: int, membership: str, mount: str, top: str, tmp_path: Path
) -> None:
    cgroups = groups(tmp_path, membership, mount.format(group="/"))
    assert cgroups == [(version, f"{top}/job/step", [top, f"{top}/job", f"{top}/job/step"])]


def test_a_mount_may_begin_below_the_root_or_show_another_part(tmp_path: Path) -> None:
    mounts = V2.format(group="/job") + V2.format(group="/other")
    cgroups = groups(tmp_path, "0::/job/step\n", mounts)
    top = "sys/fs/cgroup"
    assert cgroups == [(2, f"{top}/step", [top, f"{top}/step"]), (2, "", [top])]


def test_both_versions_may_be_mounted_and_other_controllers_do_not_count(tmp_path: Path) -> None:
    cgroups = groups(tmp_path, "9:pids:/x\n4:memory:/a\n0::/b\n", V1.format(group="/") + V2.format(group="/"))
    assert [(version, own) for version, own, _ in cgroups] == [
        (1, "sys/fs/cgroup/memory/a"),
        (2, "sys/fs/cgroup/b"),
    ]


def test_a_system_without_groups_has_none(tmp_path: Path) -> None:
    assert list(mounted_groups("memory", tmp_path)) == []


CPU = "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/job/step\n",
            "proc/self/mountinfo": V2.format(group="/"),
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        },
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job/step\n",
            "proc/self/mountinfo": CPU,
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/job/step/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/job/step/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_a_quota_of_cores_is_that_of_all_groups_around(files: dict[str, str], tmp_path: Path) -> None:
    root = write(tmp_path, files)
    assert core_quota(root) == 1.5


def test_without_limits_there_is_neither_a_quota_nor_a_limit(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2.format(group="/")})
    assert (core_quota(root), list(memory_limits(root))) == (None, [])
