"""Numbers and configurations in words, alike on the console, in the report and in the images."""

from __future__ import annotations

from collections.abc import Iterable

from loadgen.results import Scalar


def number(value: float | None) -> str:
    """Three significant digits, with separators from a thousand on; `-` where nothing was measured."""
    if value is None:
        return "-"
    if value != 0 and abs(value) < 0.001:
        return f"{value:.2e}"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def factor(value: float) -> str:
    """A ratio: `1.84x`, `12.6x`, `150x`."""
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x" if value < 99.95 else f"{value:.0f}x"


def setting(value: Scalar) -> str:
    """An axis's value as a person would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and abs(value) >= 100_000:
        for scale, unit in ((1_000_000, "M"), (1_000, "k")):
            if value % (scale // 100) == 0 and abs(value) >= scale:
                return f"{value / scale:g}{unit}"
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)


def short(axis: str, axes: Iterable[str]) -> str:
    """The last part of a dotted axis, where no other axis ends alike."""
    last = axis.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in axes) <= 1 else axis


def arm_text(arm: dict[str, Scalar], axes: list[str]) -> str:
    """The axes that tell this configuration from the others: `tp 8, live_sessions 16`."""
    return ", ".join(f"{short(axis, axes)} {setting(arm.get(axis))}" for axis in axes) or "the only configuration"
