"""Least squares with a handful of unknowns that must not be negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def fit_relative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 of least squared relative error sum((row . c - value) / value)^2; values must be above 0.

    Exact: every set of unknowns that are not 0 is tried (few unknowns), by normal equations. Columns of zeros get 0.
    """
    width = len(rows[0])
    scaled = [[x / value for x in row] for row, value in zip(rows, values, strict=True)]
    best, least = [0.0] * width, float(len(rows))
    for size in range(1, width + 1):
        for used in combinations(range(width), size):
            found = _solve(scaled, used)
            if found is None or min(found) < 0.0:
                continue
            loss = sum((sum(row[column] * c for column, c in zip(used, found, strict=True)) - 1.0) ** 2 for row in scaled)
            if loss < least - 1e-12:
                least = loss
                best = [0.0] * width
                for column, c in zip(used, found, strict=True):
                    best[column] = c
    return best


def _solve(rows: Sequence[Sequence[float]], used: Sequence[int]) -> list[float] | None:
    """Least squares of rows . c = 1 over the columns `used`; None where they do not determine it."""
    size = len(used)
    norms = [max(abs(row[column]) for row in rows) for column in used]  # columns differ by orders of magnitude
    if min(norms) == 0.0:
        return None
    table = [[row[column] / norm for column, norm in zip(used, norms, strict=True)] for row in rows]
    matrix = [[sum(row[i] * row[j] for row in table) for j in range(size)] + [sum(row[i] for row in table)] for i in range(size)]
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
