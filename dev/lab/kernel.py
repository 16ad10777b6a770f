"""The names that test files still import from here; they are in bench.py, inputs.py and ladder.py."""
from dev.lab.bench import BF16_LIMIT, KERNEL_LIMIT, Bench, noting, orders  # noqa: F401
from dev.lab.inputs import bf16, f32, stored  # noqa: F401
from dev.lab.ladder import describe_choice as words  # noqa: F401
from dev.lab.ladder import find_ladder as find_kernel  # noqa: F401
from dev.lab.ladder import launched_by, model_of, parse_sizes  # noqa: F401
