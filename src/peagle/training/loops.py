"""Where a text repeats itself exactly: answers of small models often end in loops, which any drafter predicts."""

from __future__ import annotations

import numpy as np

LONGEST_PERIOD = 256
SHORTEST_RUN = 16


def repeating(ids: np.ndarray) -> np.ndarray:
    """ids [N] -> bool [N]: tokens of a block's second and later copies in a row.

    A loop of period p is a run of at least max(p, 16) positions with x[i] == x[i - p]; p up to 256.
    """
    n = len(ids)
    found = np.zeros(n, dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, n - 1) + 1):
        same = np.concatenate(([0], (ids[period:] == ids[:-period]).astype(np.int8), [0]))
        edges = np.diff(same)
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        for i in np.flatnonzero(ends - begins >= max(period, SHORTEST_RUN)):
            found[period + begins[i] : period + ends[i]] = True
    return found
