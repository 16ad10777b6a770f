"""Test gradients that are written into slots in their owners' memory: the kernels, who owns which
numbers, and trainings beside those whose gradients collectives sum.

dev/tests/test_ranks.py trains with slots, too, wherever it has --zero 1.
"""
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from dev.common.config import Config
from dev.cpu.emulated import Emulated
from dev.features.devices import address_of, make_device
from dev.features.ranks.peers import piece_bytes
from dev.features.ranks.slots import MEETING, SOURCE, Slotted
from dev.tests.checks import EXACT, check
from dev.tests.jobs import POISONED, SMALL, counts_of, data_files, train, wrapped
from dev.tests.test_ranks import merged
from train_gpt2 import offsets

C = Config(maxT=8, V=11, L=1, NH=2, C=64, Vp=32)
KERNELS = "add_slots", "fill_slot", "gather_shares", "meet"
runs_on = counts_of


def device_with_slots(name):
    """A device with these kernels: "cpu" has loops in place of all but the last."""
    if name == "emulated":
        return Emulated("fp32", C, [SOURCE, MEETING], only=KERNELS)
    return make_device(name, "fp32", C, beside=[SOURCE, MEETING] if name == "cuda" else [SOURCE])


def addresses(device, arrays):
    found = device.empty(8 * len(arrays)).view(np.uint64)
    device.put(found, [address_of(array) for array in arrays])
    return found


def arrays_of(device, values):
    """Arrays of the device, with 99 numbers behind each that must stay."""
    found = []
    for each in values:
        array = device.empty(4 * (each.size + 100)).view(np.float32)
        device.put(array, np.append(each, np.full(100, 7, np.float32)))
        found.append(array)
    return found


def test_kernels(device_name):
    """The kernels, and their loops, do what NumPy does with whole pieces."""
    chance = np.random.default_rng(4)
    for name in (device_name, *["cpu"] * (device_name != "cuda")):
        device = device_with_slots(name)
        for ranks, piece, pieces in ((1, 4, 1), (2, 8, 5), (3, 1024, 7)):
            case, n = f"{name}, {ranks} ranks of {pieces} pieces:", piece * pieces - piece // 2
            values = chance.standard_normal((ranks, n)).astype(np.float32)
            slots, summed = arrays_of(device, values), values[0].copy()
            for each in values[1:]:
                summed += each  # in the order of ranks
            owner, own = np.arange(n) // piece % ranks, []
            for rank in range(ranks):
                wish = summed[owner == rank]
                share, = arrays_of(device, [np.zeros(wish.size, np.float32)])
                device.launch("add_slots", wish.size, share, addresses(device, slots), wish.size,
                              piece, rank, ranks)
                yield f"{case} sums", device.get(share), np.append(wish, [7.0] * 100), EXACT
                own.append(share)
            params, = arrays_of(device, [np.zeros(n, np.float32)])
            device.launch("gather_shares", n - 4, params, addresses(device, own), 4, n - 4, piece,
                          ranks) if n > 4 else None
            wish = np.concatenate([[0.0] * min(n, 4), summed[4:], [7.0] * 100])
            yield f"{case} gathered", device.get(params), wish, EXACT
            filled, = arrays_of(device, [np.zeros(n, np.float32)])
            device.launch("fill_slot", n, filled, slots[0], n)
            yield f"{case} filled", device.get(filled), device.get(slots[0]), EXACT


def test_meeting(device_name):
    """A rank that meets sends its value to all, and takes theirs, whichever letters are older. On a
    GPU two ranks are two streams, which meet 99 times."""
    device = device_with_slots(device_name)
    ranks, letters = 2, np.zeros((2, 2, 2), np.uint64)
    boxes = [device.empty(8 * 4).view(np.uint64) for _ in range(ranks)]
    dates = [device.empty(4).view(np.int32) for _ in range(ranks)]
    values, value = ([device.empty(4 * n).view(np.float32) for _ in range(ranks)] for n in (2, 1))
    for rank in range(ranks):
        device.zero(boxes[rank])
        device.zero(dates[rank])
        device.put(value[rank], [0.5 + rank])
    where = addresses(device, boxes)
    if device_name == "cuda":
        streams = [device.cupy.cuda.Stream(non_blocking=True) for _ in range(ranks)]
        device.cupy.cuda.runtime.deviceSynchronize()
        for _ in range(99):
            for rank, stream in enumerate(streams):
                with stream:
                    device.launch("meet", 32, where, dates[rank], values[rank], value[rank], rank,
                                  ranks)
        device.cupy.cuda.runtime.deviceSynchronize()
        for rank in range(ranks):
            yield f"rank {rank}: values", device.get(values[rank]), [0.5, 1.5], EXACT
            yield f"rank {rank}: meetings", device.get(dates[rank]), [99], EXACT
        return
    # Emulated, a kernel waits for no other: the letter of rank 1 is there.
    letters = np.zeros((2, 2), np.uint64)
    for date in (1, 2, 3):
        letters[date % 2, 1] = (date << 32) + int(np.float32(10 + date).view(np.uint32))
        device.put(boxes[0], np.concatenate([device.get(boxes[0]).reshape(2, 2)[:, :1],
                                             letters[:, 1:]], axis=1).reshape(-1))
        device.launch("meet", 32, where, dates[0], values[0], value[0], 0, ranks)
        yield f"meeting {date}: values", device.get(values[0]), [0.5, 10 + date], EXACT
        sent = device.get(boxes[1]).reshape(2, 2)[date % 2, 0]
        wish = (date << 32) + int(np.float32(0.5).view(np.uint32))
        check(f"meeting {date}: the letter", int(sent) == wish, f"{int(sent):x}")


def test_owners():
    """Each number has one owner. Shares are in the order of all numbers, tensors in them begin at
    multiples of 32, and no rank has more than a piece more than another."""
    for c in (Config(), Config(maxT=8, V=61, L=3, NH=2, C=64, Vp=128)):
        table = c.parameter_table()
        for count in (2, 3, 4):
            seen, sizes = np.zeros(sum(row.size for row in table), np.int8), []
            for rank in range(count):
                kind = type("Model", (Slotted,), dict(ranks=SimpleNamespace(
                    rank=rank, count=count, peers=SimpleNamespace(unit=4096))))
                for row, start in zip(table, offsets(table)):
                    for owner, first, _, size in kind.parts_of(table)[row.name]:
                        seen[start // 4 + first :][:size] += owner == rank
                share = kind.share(table)
                assert all(row.size % 32 == 0 for row in share), share
                sizes.append(sum(row.size for row in share))
            piece = piece_bytes(4 * seen.size, count, 4096) // 4
            check(f"{count} ranks: each number has an owner", (seen == 1).all())
            check(f"{count} ranks: sizes", max(sizes) - min(sizes) <= piece, f"{sizes}")
            check(f"{count} ranks: pieces", seen.size / piece <= 256 * count, f"{piece}")


@pytest.fixture
def data(folder):
    data_files(folder)


def test_as_collectives(device_name, folder, data):
    """Two ranks have the same moments and parameters as with collectives, to the last bit without
    clipping, and three to rounding; in a step of one micro-batch, which products put into slots,
    and of two. From a checkpoint with slots a run goes on without, and the other way."""
    cases = (2, 1, "fp32"), (2, 2, "bf16"), (counts_of(device_name)[-1], 1, "fp32")
    for count, micros, dtype in dict.fromkeys(cases):  # two GPUs have no third
        flags = (*SMALL, "-d", 8 * count * micros, "--shuffle", 0, "--dtype", dtype, "--clip", 0,
                 "-z", 1, "-x", 4, "-n", 2)
        sets, case = {}, f"{count} ranks, {micros} micro-batches, {dtype}"
        for slots in (0, 1):
            output = folder / f"{case} {slots}"
            text = train(device_name, count, folder, output, *flags, "--slots", slots,
                         trainer=wrapped(folder, late=POISONED))
            in_slots = "\nsums         | in slots" in text
            check(f"{case}: a line", in_slots == bool(slots), text[:900])
            sets[slots], _ = merged(output, 4, count, 1)
        # AdamW makes steps of any gradient, of one that is nothing but rounding, too
        limits = [EXACT] * 3 if count == 2 else [1e-6, 1e-6, 2e-3]
        for what, found, wish, limit in zip(("m", "v", "parameters"), sets[1], sets[0], limits):
            yield f"{case}: {what}", found, wish, limit
        for slots in (0, 1) if micros == 1 else ():
            output = folder / f"{case} {slots}"
            for path in output.glob("*_00000004*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            train(device_name, count, folder, output, *flags, "-y", 1, "--slots", 1 - slots)
            for what, found, wish, limit in zip(("m", "v", "parameters"),
                                                merged(output, 4, count, 1)[0], sets[0], limits):
                yield f"{case}: {what}, resumed", found, wish, limit


def test_no_memory_to_share(device_name, folder, data):
    """Where a rank cannot see another's memory, all say so, and collectives sum."""
    program = wrapped(folder, late="""
from dev.features.ranks import peers
for kind in (peers.GpuPeers, peers.HostPeers):
    real = kind.shared
    def shared(self, nbytes, real=real):
        arrays = real(self, nbytes)
        return [array.copy() for array in arrays] if rank == 1 else arrays
    kind.shared = shared
""")
    text = train(device_name, 2, folder, folder / "out", *SMALL, "-d", 16, "-z", 1, "-x", 2,
                 trainer=program)
    why = "\nsums         | by collectives, not in --slots: rank "
    check("a line says why", why in text, text[:900])
    check("it trains", "step    2/2" in text, text[-300:])
