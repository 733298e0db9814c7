"""Kernels launched before the one ahead of them has ended: Hopper's programmatic dependent launch.

A decoding step is a chain of some three hundred kernels that each take a few microseconds; between two of them the
memory idles. A kernel of this chain

- begins with `gdc_launch_dependents`, which lets the next one be launched as soon as all of its programs run;
- may then do what depends on no other kernel, such as fetching weights;
- calls `gdc_wait`, which returns when the kernel ahead has ended and its results can be read. Since that one waited
  too, so has everything before it: whatever a step computes is read and written behind the wait alone, and memory may
  be used again as if kernels ran one after the other.

Kernels of others need no care: they begin when everything ahead of them has ended, and nothing begins before they end.
"""

from __future__ import annotations

from typing import Any


def early_launch(is_chained: bool) -> dict[str, Any]:
    """Launch options of a kernel that waits as described; none for others, also because Triton's interpreter knows no
    such option."""
    return {"launch_pdl": True} if is_chained else {}
