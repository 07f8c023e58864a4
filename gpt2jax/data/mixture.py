"""Which source a row comes from, in exact proportions and without state.

Rows are dealt as evenly as they can be: the sources are split off one after the other, the last first, and of the first n rows of a run floor(n w) go to the
sources before the one that is split off, w being their share. So the
count of each stays within k rows of its share of k sources, at any n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from gpt2jax.errors import InputError


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The least whole numbers in the proportion of `weights`, each taken as the decimal that it is written as: 0.7 and 0.3 are 7 and 3.

    InputError for none, and for a weight that is not above 0 and finite.
    """
    if not weights:
        raise InputError("a mix of sources names none; give it one or more, with their weights")
    for weight in weights:
        if not weight > 0 or not math.isfinite(weight):
            raise InputError(f"the weight {weight} of a source must be above 0; leave a source out that should not be read")
    exact = [Fraction(str(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(number // math.gcd(*whole) for number in whole)


def place(row: int, shares: Sequence[int]) -> tuple[int, int]:
    """(source, number of the row among those of its source) of row 0, 1, ... of a run. In Python's whole numbers, which do not overflow."""
    for source, (before, after) in reversed(list(enumerate(itertools.pairwise(itertools.accumulate(shares)), 1))):
        earlier = row * before // after
        if (row + 1) * before // after == earlier:
            return source, row - earlier
        row = earlier
    return 0, row
