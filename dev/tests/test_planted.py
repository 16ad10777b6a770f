"""Plant some faults in the kernels for Hopper, on a CPU that emulates it, and see that their checks
find each one. `python -m dev.tests.mutants` plants all.
"""
import pytest

from dev.tests.checks import TOP, check
from dev.tests.mutant_table import HOPPER, RACE
from dev.tests.mutants import survivors, way_of, wrong_by


@pytest.mark.parametrize("name, some", (("gelu_products", 3), ("swiglu_products", 3),
                                        ("symmetric", 1)))
def test_some(name, some):
    missed = survivors([fault for fault in HOPPER if fault.kernel == name][:some])
    check(f"{name}: found", not missed, missed)


def test_no_races():
    """No access is a race."""
    first = next(fault for fault in HOPPER if fault.said == RACE)
    said = wrong_by(way_of(first), TOP, False)
    check(f"{first.kernel}: no races", said == "", said)
