"""How much of the host's memory a process can have. A container has less than its machine: Linux
kills a process at the limit of its control group."""
import os
import re
import resource
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Memory(NamedTuple):
    """Where a version of Linux's control groups keeps what: the file of the limit, the file of the
    usage, and the numbers in memory.stat of what it gives back when memory gets short."""
    limit: str
    usage: str
    given_back: tuple


VERSIONS = {1: Memory("memory.limit_in_bytes", "memory.usage_in_bytes",
                      ("total_inactive_file", "total_active_file")),
            2: Memory("memory.max", "memory.current",
                      ("inactive_file", "active_file", "slab_reclaimable"))}
# bytes of addresses for each core: the stacks of its threads, and malloc's arenas
OF_THREADS = 2**28


def groups_of(root, controller):
    """(folder, version of control groups) of each group of this process that may limit what a
    controller, such as memory, gives. Not every folder is there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        place = f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup"
        # A group that contains this one has a limit, too. In a container the name may be the
        # host's: then only the last folder is there, and it is the container's group.
        for group in (PurePosixPath(name), *PurePosixPath(name).parents):
            yield root / place / str(group).lstrip("/"), 1 if controllers else 2


def free_in_groups(root):
    """The bytes that are free in each of this process's control groups that has a limit."""
    for folder, version in groups_of(root, "memory"):
        kind = VERSIONS[version]
        try:
            limit, usage = (int((folder / name).read_text()) for name in (kind.limit, kind.usage))
            stat = dict(re.findall(r"(\w+) (\d+)", (folder / "memory.stat").read_text()))
            yield limit - usage + sum(int(stat.get(name, 0)) for name in kind.given_back)
        except (OSError, ValueError):  # the folder is not there, or the limit is "max"
            continue


def free_of_machine(root):
    try:
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+) kB",
                                    (root / "proc/meminfo").read_text())[1])
    except (OSError, TypeError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_addresses(root):
    """The bytes below `ulimit -v`, without what threads will reserve; none if there is no such
    limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        limit -= OF_THREADS * os.cpu_count()
        try:
            pages = (root / "proc/self/statm").read_text().split()[0]
            yield limit - os.sysconf("SC_PAGE_SIZE") * int(pages)
        except OSError:  # not Linux
            yield limit


def available_memory(root=Path("/")):
    """How many bytes of the host's memory can be allocated."""
    return max(0, min([free_of_machine(root), *free_in_groups(root), *free_addresses(root)]))
