"""One number per pod: a column over the slots, cheap to change one by one and to read at once."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Column:
    """A float per slot.

    `cells[slot]` is a plain float and costs a tenth of what an element of an array does;
    `values` is an array over the same memory, shape (slots,), for taking many at once.
    """

    __slots__ = ("cells", "values")

    def __init__(self, slots: int, start: float = 0.0):
        self.cells = array("d", [start]) * slots
        self.values: Floats = np.frombuffer(self.cells, dtype=np.float64)
