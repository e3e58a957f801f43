"""Memory limits of control groups, in the shapes that systemd, Docker and Podman make, and in a real group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.runner.device import cgroups, memory
from treadle.runner.device.cgroups import Group, limited_groups

V2_MOUNT = "31 23 0:28 {top} {place} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {top} {place} rw,relatime shared:9 - cgroup cgroup rw,memory"
OTHERS = (
    "25 30 0:23 / /proc rw,nosuid - proc proc rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\nbroken"
)
NO_LIMIT = "9223372036854771712"


class Tree:
    """A process's view of its groups, below a folder."""

    def __init__(self, root: Path, own: str, *mounts: str) -> None:
        self.root = root
        self.proc = root / "proc"
        self.proc.mkdir()
        (self.proc / "cgroup").write_text(own)
        (self.proc / "mountinfo").write_text("\n".join([OTHERS, *mounts]))

    def write(self, folder: str, **files: str) -> None:
        path = self.root / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(text)

    def groups(self) -> list[Group]:
        return limited_groups(self.proc, self.root)


def test_systemds_memory_max_is_found_below_the_root(tmp_path: Path) -> None:
    """The defect: the root group has no limit, and is not the process's own."""
    tree = Tree(tmp_path, "0::/system.slice/treadle.service\n", V2_MOUNT.format(top="/", place="/sys/fs/cgroup"))
    tree.write("sys/fs/cgroup", memory__stat="inactive_file 1")
    tree.write("sys/fs/cgroup/system.slice", memory__max="max", memory__high="max", memory__current="9")
    tree.write(
        "sys/fs/cgroup/system.slice/treadle.service",
        memory__max="3000",
        memory__current="1000",
        memory__stat="anon 5\ninactive_file 200\n",
    )
    assert tree.groups() == [Group(3000, 1000, 200)]
    assert tree.groups()[0].left == 2200


def test_the_smallest_limit_of_all_that_are_nested_counts(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a/b\n", V2_MOUNT.format(top="/", place="/sys/fs/cgroup"))
    tree.write("sys/fs/cgroup/a", memory__max="2000", memory__current="1500")
    tree.write("sys/fs/cgroup/a/b", memory__max="3000", memory__current="100")
    assert memory.host_total_bytes(tree.groups()) == 2000
    assert memory.host_available_bytes(tmp_path / "none", tree.groups()) == 500


def test_memory_high_slows_a_group_down_and_counts_as_its_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a\n", V2_MOUNT.format(top="/", place="/sys/fs/cgroup"))
    tree.write("sys/fs/cgroup/a", memory__max="3000", memory__high="2500", memory__current="100")
    assert tree.groups() == [Group(2500, 100, 0)]


def test_docker_with_a_namespace_of_its_own_shows_its_group_as_the_root(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/\n", V2_MOUNT.format(top="/", place="/sys/fs/cgroup"))
    tree.write("sys/fs/cgroup", memory__max="4000", memory__current="1")
    assert tree.groups() == [Group(4000, 1, 0)]


def test_docker_in_the_hosts_namespace_names_a_path_outside_of_its_mount(tmp_path: Path) -> None:
    place = "/sys/fs/cgroup/memory"
    tree = Tree(tmp_path, "4:memory:/docker/1f\n3:cpu:/\n", V1_MOUNT.format(top="/docker/1f", place=place))
    files = {"memory__limit_in_bytes": "5000", "memory__usage_in_bytes": "4000"}
    tree.write("sys/fs/cgroup/memory", **files, memory__stat="inactive_file 1\ntotal_inactive_file 700\n")
    assert tree.groups() == [Group(5000, 4000, 700)]


def test_a_group_that_is_not_below_what_is_mounted_is_taken_for_the_mount(tmp_path: Path) -> None:
    """As after a process was moved out of its namespace's root."""
    tree = Tree(tmp_path, "0::/../other\n", V2_MOUNT.format(top="/", place="/sys/fs/cgroup"))
    tree.write("sys/fs/cgroup", memory__max="6000", memory__current="1")
    assert tree.groups() == [Group(6000, 1, 0)]


def test_version_1_beside_version_2_and_a_mount_with_a_blank(tmp_path: Path) -> None:
    tree = Tree(
        tmp_path,
        "5:cpu,memory:/slice\n0::/unified\n",
        V1_MOUNT.format(top="/", place="/my\\040groups"),
        V2_MOUNT.format(top="/", place="/sys/fs/cgroup/unified"),
    )
    tree.write("my groups", memory__limit_in_bytes=NO_LIMIT, memory__usage_in_bytes="7")
    tree.write("my groups/slice", memory__limit_in_bytes="7000", memory__usage_in_bytes="6000")
    tree.write("sys/fs/cgroup/unified/unified", memory__max="8000")
    assert tree.groups() == [Group(7000, 6000, 0), Group(8000, 0, 0)]


@pytest.mark.parametrize("text", ["max", "", "-5", "12.5", "ü", NO_LIMIT])
def test_what_is_no_limit_sets_none(tmp_path: Path, text: str) -> None:
    tree = Tree(tmp_path, "0::/a\n", V2_MOUNT.format(top="/", place="/sys/fs/cgroup"))
    tree.write("sys/fs/cgroup/a", memory__max=text, memory__current="1")
    assert tree.groups() == []


def test_without_proc_there_are_none(tmp_path: Path) -> None:
    assert limited_groups(tmp_path / "nothing") == []
    assert memory.host_total_bytes([]) > 1 << 30


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A group of version 1 or 2 of this machine's, with a limit of 1 GiB; skipped where none can be made."""
    kinds = (("memory", "memory.limit_in_bytes"), ("", "memory.max"))
    for base, limit in ((Path("/sys/fs/cgroup") / folder, name) for folder, name in kinds):
        group = base / f"treadle-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(1 << 30))
            yield group
            return
        except OSError:
            pass
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_a_process_in_a_real_group_sees_its_limit(real_group: Path) -> None:
    code = "import sys; sys.stdin.read(); from treadle.runner.device.memory import *; "
    code += "print(host_total_bytes(), host_available_bytes())"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        (real_group / "cgroup.procs").write_text(str(process.pid))
        out, err = process.communicate("", 60)
    finally:
        process.kill()
        process.wait()
    assert out, err
    total, left = map(int, out.split())
    assert total == 1 << 30
    assert 0 < left <= 1 << 30


def test_this_process_itself_can_be_asked() -> None:
    assert all(group.limit > 0 for group in limited_groups(cgroups.PROC))
