"""Least squares with a handful of unknowns that must not be negative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

_MOST_STEPS = 50
_LEAST_RATIO = 1e-3  # of what is fitted to what was measured: logarithms need more than 0


def fit_ratios(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 of least sum(log((row . c) / value)^2); values must be above 0. Columns of zeros get 0.

    Twice a value is as far from it as half of it. By least squared relative errors it would not be: values that noise made too small
    would weigh more than those it made too large, and the fit would be too small, by about one and a half times the noise's variance.
    """
    shares = [[x / value for x in row] for row, value in zip(rows, values, strict=True)]
    found = _least_squares(shares, [1.0] * len(shares))
    loss = _loss(shares, found)
    for _ in range(_MOST_STEPS):  # Gauss-Newton: log(r) is about log(r0) + r / r0 - 1
        ratios = _ratios(shares, found)
        aim = _least_squares(
            [[x / ratio for x in row] for row, ratio in zip(shares, ratios, strict=True)], [1.0 - math.log(ratio) for ratio in ratios]
        )
        step = 1.0
        while (less := _loss(shares, moved := [c + step * (a - c) for c, a in zip(found, aim, strict=True)])) >= loss:
            step /= 2
            if step < 1e-3:
                return found
        done = less > loss * (1 - 1e-9)
        found, loss = moved, less
        if done:
            break
    return found


def _ratios(shares: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    return [max(_LEAST_RATIO, sum(x * c for x, c in zip(row, coefficients, strict=True))) for row in shares]


def _loss(shares: Sequence[Sequence[float]], coefficients: Sequence[float]) -> float:
    return sum(math.log(ratio) ** 2 for ratio in _ratios(shares, coefficients))


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 of least sum((row . c - value)^2), exactly: every set of unknowns that are not 0 is tried (few unknowns)."""
    width = len(rows[0])
    best, least = [0.0] * width, sum(value * value for value in values)
    for size in range(1, width + 1):
        for used in combinations(range(width), size):
            found = _solve(rows, values, used)
            if found is None or min(found) < 0.0:
                continue
            loss = sum(
                (sum(row[column] * c for column, c in zip(used, found, strict=True)) - value) ** 2
                for row, value in zip(rows, values, strict=True)
            )
            if loss < least - 1e-12:
                least = loss
                best = [0.0] * width
                for column, c in zip(used, found, strict=True):
                    best[column] = c
    return best


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float], used: Sequence[int]) -> list[float] | None:
    """Least squares of rows . c = values over the columns `used`, by normal equations; None where they do not determine it."""
    size = len(used)
    norms = [max(abs(row[column]) for row in rows) for column in used]  # columns differ by orders of magnitude
    if min(norms) == 0.0:
        return None
    table = [[row[column] / norm for column, norm in zip(used, norms, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in table) for j in range(size)] + [sum(row[i] * v for row, v in zip(table, values, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-12 * len(rows):
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / norms[i] for i in range(size)]
