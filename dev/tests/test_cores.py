"""Test how many threads a CPU's run starts: where it is bound, and what its container may use."""
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dev.common.cores import physical_cores, processor, quotas, usable_cores
from dev.cpu.device import found_faster, take_faster_threads
from dev.tests.checks import EXACT, TOP, check, fast

V1, V2 = "4:cpu,cpuacct:/docker/a\n", "0::/job/step\n"


@fast
def test_quotas(folder):
    """The least of the quotas of all groups around a process, of either version; a part of a core
    is one thread."""
    def cores(name, files, processes=1, bound=range(64), parents=range(64)):
        for path, text in files.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
        with mock.patch("os.sched_getaffinity", lambda process: {*(
                parents if process else bound)}, create=True):
            return usable_cores(processes, folder / name)

    v1 = {"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/docker/a/cpu.cfs_period_us": "100000\n"}
    quota = "sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us"
    v2, step = {"proc/self/cgroup": V2}, "sys/fs/cgroup/job/step/cpu.max"
    for name, found, expected in (
            ("no groups", cores("none", {}), 64),
            ("v1", cores("v1", v1 | {quota: "200000\n"}), 2),
            ("v1 without a quota", cores("v1 -1", v1 | {quota: "-1\n"}), 64),
            ("v2", cores("v2", v2 | {step: "250000 100000\n"}), 2),
            ("v2 without a quota", cores("v2 max", v2 | {step: "max 100000\n"}), 64),
            ("v2, the job around it has less", cores("v2 job", v2 | {
                step: "800000 100000\n", "sys/fs/cgroup/job/cpu.max": "300000 100000\n"}), 3),
            ("half a core", cores("half", v2 | {step: "50000 100000\n"}), 1),
            ("bound to 4", cores("four", {}, bound=range(4), parents=range(4)), 4),
            ("one of 4 processes of a taskset of 4", cores(
                "taskset", {}, 4, bound=range(4), parents=range(4)), 1),
            ("one of 4, bound by its launcher", cores(
                "bound", {}, 4, bound=range(16), parents=range(64)), 16),
            ("one of 2 in a container of 6", cores(
                "shared", v2 | {step: "600000 100000\n"}, 2), 3),
            ("more processes than cores", cores("many", {}, 100), 1)):
        yield name, found, expected, EXACT
    check("a group that is not there", [*quotas(folder / "none")] == [])


@fast
def test_threads_of_a_core(folder):
    """The threads of a core are counted once: with two each, on a processor of which two cores have
    one, and within a quota. One thread a core or all: which multiplies faster is taken."""
    siblings = ["0,4", "1,5", "2-3", "2-3", "0,4", "1,5", "6", "7"]
    for core, text in enumerate(siblings):
        path = folder / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    for bound, wish in ((range(8), 5), ((0, 4), 1), ((0, 1), 2), ((3, 6, 7), 3), ((8, 9), 2)):
        with mock.patch("os.sched_getaffinity", lambda process, bound=bound: {*bound}, create=True):
            yield f"cores of {[*bound]}", physical_cores(folder), wish, EXACT
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(V2)
    (folder / "sys/fs/cgroup/job/step").mkdir(parents=True)
    (folder / "sys/fs/cgroup/job/step/cpu.max").write_text("300000 100000\n")
    with mock.patch("os.sched_getaffinity", lambda process: {*range(8)}, create=True):
        yield "with a quota", physical_cores(folder), 3, EXACT

    class Device:
        """Its products move its clock by the seconds for its threads."""
        real, now, path = np.float32, 0, "a library"

        def __init__(self, seconds):
            self.library, self.seconds, self.threads = self, seconds, 8

        def matmul(self, out, left, right):
            self.now += self.seconds[self.threads]

        def omp_set_num_threads(self, count):
            self.threads = count

    for seconds, single, wish, said in (({5: 1, 8: 2}, 5, 5, "one thread of a core"),
                                        ({5: 2, 8: 1}, 5, 8, "all threads of a core"),
                                        ({}, 8, 8, "")):
        device = Device(seconds)
        with mock.patch("time.perf_counter", lambda device=device: device.now):
            found = [take_faster_threads(device, single, 8) for _ in range(2)]
        check(f"threads that take {seconds}", device.threads == wish and found[0] == found[1] and
              (said in found[0] if said else not found[0]), found)
        found_faster.clear()


@fast
def test_processor(folder):
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text("vendor_id\t: X\nmodel name\t: Abacus 3\nmodel\t: 1\n")
    check("its name", processor(folder) == "Abacus 3")
    check("without one", processor(folder / "none"))


@pytest.mark.parametrize("threads", ("", "3"))
def test_threads_of_a_run(threads):
    """A process that is bound to one core has one thread, says so, and OMP_NUM_THREADS decides."""
    if not hasattr(os, "sched_setaffinity") or os.cpu_count() == 1:
        pytest.skip("needs Linux and two cores")
    core = min(os.sched_getaffinity(0))
    program = (f"import os; os.sched_setaffinity(0, [{core}])\n"
               "from dev.features.devices import on_cpu\nfrom train_gpt2 import Config\n"
               "device = on_cpu('cpu', 'fp32', Config(C=64, NH=2))\n"
               "print(device.library.omp_get_max_threads(), device, sep='|')")
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    if not threads:
        del environment["OMP_NUM_THREADS"]
    done = subprocess.run([sys.executable, "-c", program], env=environment, text=True,
                          cwd=Path(TOP), capture_output=True)
    said = f"{threads} threads" if threads else "1 thread"
    expected = f"{threads or 1}|the CPU, {said} on {os.cpu_count()} cores, fp32"
    check(expected, done.stdout.splitlines()[-1:] and
          done.stdout.splitlines()[-1].startswith(expected), done.stdout + done.stderr)
