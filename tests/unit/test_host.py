# SPDX-License-Identifier: Apache-2.0
"""Host memory under cgroups, read from trees laid out as a kernel would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_omni_patch.patches.available_memory.host import host_memory
from vllm_omni_patch.patches.available_memory.neuron.kv_budget import GIB

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_SENTINEL = 9_223_372_036_854_771_712


class Tree:
    """A host's files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: str, text: object) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def available(self, bytes_: int) -> None:
        self.put("/proc/meminfo", f"MemTotal:  1 kB\nMemFree:  1 kB\nMemAvailable:   {bytes_ // 1024} kB")

    def v2(self, path: str, limit: object, current: object, inside: str = "/sys/fs/cgroup") -> None:
        self.put(f"{inside}{path}/memory.max", limit)
        self.put(f"{inside}{path}/memory.current", current)

    def v1(self, path: str, limit: object, usage: object) -> None:
        self.put(f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes", limit)
        self.put(f"/sys/fs/cgroup/memory{path}/memory.usage_in_bytes", usage)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    host = Tree(tmp_path)
    host.available(600 * GIB)
    return host


def put_v2(tree: Tree, group: str) -> None:
    tree.put("/proc/self/cgroup", f"0::{group}")
    tree.put("/proc/self/mountinfo", V2_MOUNT)


def put_v1(tree: Tree, group: str) -> None:
    tree.put("/proc/self/cgroup", f"5:devices:/elsewhere\n4:memory,hugetlb:{group}\n0::/")
    tree.put("/proc/self/mountinfo", V1_MOUNT)


def test_a_host_without_cgroups(tree: Tree) -> None:
    memory = host_memory(tree.root)
    assert (memory.available, memory.source, memory.notes) == (600 * GIB, "MemAvailable of /proc/meminfo", [])


def test_the_real_host_answers() -> None:
    assert host_memory().available > 0


def test_v2_limit_less_use(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.v2("/pod", 150 * GIB, 10 * GIB)
    memory = host_memory(tree.root)
    assert memory.available == 140 * GIB
    assert "memory.max" in memory.source and "/pod" in memory.source


def test_v2_max_is_no_limit(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.v2("/pod", "max", 10 * GIB)
    assert host_memory(tree.root).available == 600 * GIB


def test_v1_limit_less_use(tree: Tree) -> None:
    put_v1(tree, "/docker/abc")
    tree.v1("/docker/abc", 64 * GIB, 8 * GIB)
    tree.v1("", V1_SENTINEL, 20 * GIB)
    assert host_memory(tree.root).available == 56 * GIB


@pytest.mark.parametrize("sentinel", [V1_SENTINEL, 9_223_372_036_854_710_272, (1 << 63) - 1])
def test_v1_sentinel_is_no_limit(tree: Tree, sentinel: int) -> None:
    put_v1(tree, "/docker/abc")
    tree.v1("/docker/abc", sentinel, 8 * GIB)
    memory = host_memory(tree.root)
    assert memory.available == 600 * GIB
    assert [bound.source for bound in memory.bounds] == ["MemAvailable of /proc/meminfo"]


def test_the_tightest_of_nested_limits(tree: Tree) -> None:
    put_v2(tree, "/pod/worker")
    tree.v2("/pod", 150 * GIB, 10 * GIB)
    tree.v2("/pod/worker", 40 * GIB, 5 * GIB)
    assert host_memory(tree.root).available == 35 * GIB
    tree.v2("/pod", 150 * GIB, 148 * GIB)  # the pod is nearly full, whatever its child may take
    assert host_memory(tree.root).available == 2 * GIB


def test_a_limit_above_the_host_does_not_raise_it(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.v2("/pod", 900 * GIB, 0)
    assert host_memory(tree.root).available == 600 * GIB


def test_the_throttling_limit_counts(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.v2("/pod", 150 * GIB, 10 * GIB)
    tree.put("/sys/fs/cgroup/pod/memory.high", 100 * GIB)
    assert host_memory(tree.root).available == 90 * GIB


def test_use_above_the_limit_is_zero_not_negative(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.v2("/pod", 10 * GIB, 11 * GIB)
    assert host_memory(tree.root).available == 0


def test_cache_from_reading_the_weights_is_not_use(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.v2("/pod", 64 * GIB, 60 * GIB)
    tree.put("/sys/fs/cgroup/pod/memory.stat", f"anon {8 * GIB}\ninactive_file {52 * GIB}\nactive_file 0")
    assert host_memory(tree.root).available == 56 * GIB


def test_cache_of_v1_counts_the_children(tree: Tree) -> None:
    put_v1(tree, "/pod")
    tree.v1("/pod", 64 * GIB, 60 * GIB)
    tree.put("/sys/fs/cgroup/memory/pod/memory.stat", f"inactive_file 0\ntotal_inactive_file {52 * GIB}")
    assert host_memory(tree.root).available == 56 * GIB


def test_an_unreadable_limit_is_noted_and_left_out(tree: Tree) -> None:
    put_v2(tree, "/pod")
    # A folder in the file's place cannot be read by anybody, root included.
    (tree.root / "sys/fs/cgroup/pod/memory.max").mkdir(parents=True)
    memory = host_memory(tree.root)
    assert memory.available == 600 * GIB
    assert any("memory.max" in note and "cannot be read" in note for note in memory.notes)
    assert any(bound.available is None and bound.state == "unknown" for bound in memory.bounds)


def test_a_forbidden_limit_is_noted_and_left_out(tree: Tree) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads every file")
    put_v2(tree, "/pod")
    tree.v2("/pod", 150 * GIB, 10 * GIB)
    (tree.root / "sys/fs/cgroup/pod/memory.max").chmod(0)
    assert host_memory(tree.root).notes


def test_garbage_in_a_limit_is_noted(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.v2("/pod", "lots", 10 * GIB)
    memory = host_memory(tree.root)
    assert memory.available == 600 * GIB and any("'lots'" in note for note in memory.notes)


def test_a_limit_whose_use_is_unknown_still_bounds(tree: Tree) -> None:
    put_v2(tree, "/pod")
    tree.put("/sys/fs/cgroup/pod/memory.max", 150 * GIB)
    memory = host_memory(tree.root)
    assert memory.available == 150 * GIB
    assert [bound.state for bound in memory.bounds] == ["measured", "unknown"]
    assert any("usage of" in note for note in memory.notes)


def test_a_bind_mounted_group_is_read_at_its_top(tree: Tree) -> None:
    # Host cgroup names inside, and only the container's own group mounted: docker without a cgroup namespace.
    tree.put("/proc/self/cgroup", "0::/docker/abc")
    tree.put("/proc/self/mountinfo", "31 23 0:28 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n")
    tree.v2("", 16 * GIB, 4 * GIB)
    assert host_memory(tree.root).available == 12 * GIB


def test_a_group_that_is_not_visible_falls_back_to_what_is(tree: Tree) -> None:
    put_v2(tree, "/docker/abc/inner")
    tree.v2("", 16 * GIB, 4 * GIB)
    assert host_memory(tree.root).available == 12 * GIB


def test_a_group_above_the_namespace(tree: Tree) -> None:
    put_v2(tree, "/../sibling")
    tree.v2("", 16 * GIB, 4 * GIB)
    tree.v2("/../sibling", 1 * GIB, 0)
    assert host_memory(tree.root).available == 12 * GIB


def test_the_usual_place_without_a_mount_table(tree: Tree) -> None:
    tree.put("/proc/self/cgroup", "0::/pod")
    tree.v2("/pod", 150 * GIB, 10 * GIB)
    assert host_memory(tree.root).available == 140 * GIB


def test_a_mount_elsewhere_with_a_space_in_its_name(tree: Tree) -> None:
    tree.put("/proc/self/cgroup", "0::/pod")
    tree.put("/proc/self/mountinfo", "31 23 0:28 / /my\\040groups rw - cgroup2 cgroup2 rw\n")
    tree.v2("/pod", 150 * GIB, 10 * GIB, inside="/my groups")
    assert host_memory(tree.root).available == 140 * GIB


def test_v1_memory_beside_v2(tree: Tree) -> None:
    tree.put("/proc/self/cgroup", "4:memory:/a\n0::/b")
    tree.put("/proc/self/mountinfo", V1_MOUNT + V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "))
    tree.v1("/a", 64 * GIB, 8 * GIB)
    tree.v2("/b", 32 * GIB, 2 * GIB, inside="/sys/fs/cgroup/unified")
    assert host_memory(tree.root).available == 30 * GIB


def test_no_mem_available_is_an_error_not_a_number(tree: Tree) -> None:
    tree.put("/proc/meminfo", "MemTotal: 5 kB\nMemFree: 4 kB")
    with pytest.raises(RuntimeError, match="MemAvailable"):
        host_memory(tree.root)
    tree.put("/proc/meminfo", "MemAvailable: many kB")
    with pytest.raises(RuntimeError, match="cannot be read"):
        host_memory(tree.root)
    (tree.root / "proc/meminfo").unlink()
    with pytest.raises(RuntimeError, match="cannot be read"):
        host_memory(tree.root)
