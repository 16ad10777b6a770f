"""Does a model fit into the device's memory? This is checked before anything is allocated, and the
error names the largest batch that fits.
"""
import bisect

from dev.common.host_memory import available_memory
from dev.features.feature import Feature
from train_gpt2 import BF16, UserError, offsets, size_of

# Bytes that the first step takes besides: CuPy, cuBLAS and the driver; on the CPU NumPy and
# threads.
SPARE = 2**28


def free_bytes(device):
    """The memory that a device has for a model's tables."""
    free = available_memory() if device.name == "cpu" else device.gpu.mem_info[0]
    return max(0, free - SPARE)


def shared_bytes(c, device):
    """The shared memory of a block of attention, and of one that goes back through a layernorm."""
    attention = device.attention_sizes
    of_heads = max(attention.shared_forward, attention.shared_backward)
    # Llama's norms take less.
    has_layernorms = any(row.name == "ln1b" for row in c.parameter_table())
    return of_heads, device.layernorm_sizes.shared_of_row if has_layernorms else 0


def check_shared(c, device):
    """Raise UserError unless a block has the shared memory that the kernels need."""
    of_heads, of_rows = shared_bytes(c, device)
    larger = max(of_heads, of_rows)
    if larger > device.max_shared:
        remedies = ["smaller heads"] * (of_heads > device.max_shared)
        remedies += ["a smaller C"] * (of_rows > device.max_shared)
        remedies += ["bf16"] * (device.real != BF16 and getattr(device, "capability", 80) >= 80
                                and larger // 2 <= device.max_shared)
        raise UserError(f"C = {c.C}, NH = {c.NH}: a block needs {larger:,} bytes of shared memory, "
                        f"and this device ({device}) has {device.max_shared:,}: choose "
                        f"{' or '.join(remedies)}")


class Fitting:
    """A model that checks its device first."""

    @classmethod
    def memory(cls, c, device, B, T):
        """(bytes of the tables, free bytes, the largest B that fits)."""
        def bytes_of(B):
            return sum(offsets(table)[-1] for table in cls.tables(c, device, B, T).values())

        free = free_bytes(device)
        return bytes_of(B), free, bisect.bisect_right(range(1, 2**16), free, key=bytes_of)

    def __init__(self, config, device, B, T):
        self.check(config, device, B, T)
        super().__init__(config, device, B, T)

    def check(self, config, device, B, T):
        """Raise UserError unless the model can have such batches on this device."""
        if device.compiled_for != config.switches():
            raise UserError("the device's kernels are compiled for "
                            f"{' '.join(device.compiled_for)}: expected a device for "
                            f"{' '.join(config.switches())}")
        check_shared(config, device)
        if any(row.name == "wpe" for row in config.parameter_table()) and T > config.maxT:
            raise UserError(f"-t {T}: expected at most maxT = {config.maxT}: wpe has no more "
                            "positions")
        asked, free, fits = self.memory(config, device, B, T)
        if asked > free:
            memory = "memory" if device.name == "cpu" else "device memory"
            raise UserError(f"-b {B} -t {T}: the tables ask for {asked / 2**30:.2f} GiB of "
                            f"{memory}, and {free / 2**30:.2f} are free; the largest -b that fits "
                            f"is {fits}" + self.smaller(config, device, B, T, fits))

    def smaller(self, config, device, B, T, fits):
        """The end of the error: other ways to a smaller model."""
        return "" if fits else "; choose a smaller -t or -e"


class Told:
    """Prints how much memory a run takes."""

    def prepared(self, run):
        asked, free, fits = run.Model.memory(run.config, run.device, run.flags.batch_size, run.T)
        run.say(f"memory       | {size_of(asked)}; -b {fits} would fit into "
                f"{free / 2**30:.2f} GiB")


FEATURE = Feature("memory", model=Fitting, observer=Told)
