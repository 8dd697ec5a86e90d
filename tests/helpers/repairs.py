"""The remedy of damage to an output: `verify --discard`, then measure, plan and write."""

from offline_packing.runs.run import Run
from offline_packing.verify.verify import discard
from tests.helpers.datasets import pack_all


def repair(run: Run) -> str:
    """Make again what is damaged or lost; returns what was."""
    found = discard(run)
    pack_all(run)
    return found
