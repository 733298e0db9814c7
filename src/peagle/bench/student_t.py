"""Student's t at 97.5 % and at 80 %: what a two-sided test at the 5 % level with a power of 80 % needs."""

from __future__ import annotations

# by degrees of freedom; two samples of the same size have an even number
_FEW = {2: (4.303, 1.061), 4: (2.776, 0.941), 6: (2.447, 0.906), 8: (2.306, 0.889), 10: (2.228, 0.879)}
_NORMAL = (1.959964, 0.841621)


def level_and_power(degrees: int) -> tuple[float, float]:
    """Both quantiles, right to three decimals, for an even number of degrees of freedom."""
    few = _FEW.get(degrees)
    return few if few is not None else (_quantile(_NORMAL[0], degrees), _quantile(_NORMAL[1], degrees))


def _quantile(z: float, n: int) -> float:
    """From the normal distribution's, by powers of 1/n (Abramowitz and Stegun 26.7.5)."""
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3
