"""How many of the machine's cores a process may use: taskset, a scheduler or a launcher may bind it
to some, and a container may have a quota of time."""
import os
import platform
import re
from pathlib import Path

from dev.common.host_memory import groups_of


def bound_to(process=0):
    """The cores on which a process may run; 0: this one."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(process)
    return {*range(os.cpu_count())}  # not Linux


def quotas(root):
    """The cores that the quota of each of this process's control groups is worth."""
    for folder, version in groups_of(root, "cpu"):
        try:
            if version == 1:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text())
                                 for name in ("quota", "period"))
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
        except (OSError, ValueError):  # the folder is not there, or the quota is "max"
            continue
        if quota > 0:  # -1: none
            yield quota / period


def usable_cores(processes=1, root=Path("/")):
    """The cores for this process, as one of several of a run on this machine: 1 or more. They share
    a quota, and the cores to which their launcher is bound; a launcher may bind each to its own."""
    own = len(bound_to())
    if processes > 1 and bound_to() == bound_to(os.getppid()):
        own //= processes
    return max(1, int(min([own, *(quota / processes for quota in quotas(root))])))


def physical_cores(root=Path("/")):
    """How many of the usable cores are left if the threads of one count once."""
    found = set()
    for core in bound_to():
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        found.add(path.read_text() if path.exists() else core)
    return min(len(found), usable_cores(root=root))


def processor(root=Path("/")):
    """The processor's name, or at least its kind."""
    try:
        named = re.search(r"^model name\s*: (.+)", (root / "proc/cpuinfo").read_text(), re.M)
    except OSError:  # not Linux
        named = None
    return named[1] if named else platform.processor() or platform.machine()
