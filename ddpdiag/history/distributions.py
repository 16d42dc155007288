"""Probability distributions, and tests on ranks, in plain Python: `history` must not need scipy."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from ddpdiag.stats import quantile

_EPSILON = 1e-12


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by Lentz's continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # there the fraction converges slowly; DLMF 8.17.4
        return 1 - beta_cdf(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d, result = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1)), 0.0
    result = d
    for m in range(1, 400):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _nonzero(1 + numerator * d)
            c = _nonzero(1 + numerator / c)
            result *= c * d
        if abs(c * d - 1) < _EPSILON:
            break
    return math.exp(log_front) * result / a


def _nonzero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


def rate_interval(successes: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a rate by Clopper and Pearson (1934); (0, 1) without trials."""
    tail = (1 - confidence) / 2
    if trials <= 0:
        return 0.0, 1.0
    low = solve(lambda p: beta_cdf(p, successes, trials - successes + 1), tail) if successes > 0 else 0.0
    high = solve(lambda p: beta_cdf(p, successes + 1, trials - successes), 1 - tail) if successes < trials else 1.0
    return low, high


def solve(rising: Callable[[float], float], target: float) -> float:
    """The share of 1 at which a rising function reaches `target`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2


def binomial_tail(k: int, n: int, rate: float) -> float:
    """The probability of `k` or more of `n` events, each with probability `rate`."""
    return 1.0 if k <= 0 else 0.0 if k > n else beta_cdf(rate, k, n - k + 1)


def beta_binomial_tail(k: int, n: int, a: float, b: float) -> float:
    """The probability of `k` or more of `n` events whose rate has a beta distribution: hosts differ from each other."""
    if k <= 0:
        return 1.0
    # The terms fall from k on, because k is above the mean wherever the result matters.
    total = 0.0
    for i in range(k, n + 1):
        term = math.exp(beta_binomial_log(i, n, a, b))
        total += term
        if term < total * _EPSILON:
            break
    return min(1.0, total)


def beta_binomial_log(k: int, n: int, a: float, b: float) -> float:
    """The logarithm of the probability of `k` of `n` events whose rate has a beta distribution."""
    log_gamma = math.lgamma
    ways = log_gamma(n + 1) - log_gamma(k + 1) - log_gamma(n - k + 1)
    return (
        ways
        + log_gamma(k + a)
        + log_gamma(n - k + b)
        - log_gamma(n + a + b)
        + log_gamma(a + b)
        - log_gamma(a)
        - log_gamma(b)
    )


def false_discovery_limit(p_values: Sequence[float], tests: int, rate: float) -> float:
    """The limit of Benjamini and Hochberg (1995): at most the share `rate` of the p-values up to it is due to chance.

    `tests` is the number of all tests; those that are not in `p_values` have larger values. 0 if none is accepted.
    """
    limits = [(p, rate * number / tests) for number, p in enumerate(sorted(p_values), 1)]
    return max((limit for p, limit in limits if p <= limit), default=0.0)


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[begin]]:
            for index in order[begin:end]:
                result[index] = (begin + end + 1) / 2
            begin = end
    return result


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 if all values are equal."""
    first, second = ranks(xs), ranks(ys)
    middle = (len(xs) + 1) / 2
    product = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    norm = math.sqrt(sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second))
    return product / norm if norm else 0.0


def theil_sen(xs: Sequence[float], ys: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """The median of the slopes between all pairs of points, with its interval (Sen, 1968). `xs` rise."""
    slopes = sorted(
        (ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(len(xs)) for j in range(i + 1, len(xs)) if xs[j] > xs[i]
    )
    n = len(xs)
    half = z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = max(0.0, len(slopes) / 2 - half), min(len(slopes) - 1.0, len(slopes) / 2 + half)
    return quantile(slopes, 0.5), slopes[int(low)], slopes[int(high)]


def median(values: Sequence[float]) -> float:
    """The median of a non-empty sequence."""
    return quantile(sorted(values), 0.5)


def autocorrelation(values: Sequence[float]) -> float:
    """The correlation of each value with the next; 0 if all values are equal."""
    mean = sum(values) / len(values)
    square = sum((value - mean) ** 2 for value in values)
    return sum((a - mean) * (b - mean) for a, b in pairwise(values)) / square if square else 0.0
