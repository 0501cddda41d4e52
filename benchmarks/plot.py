"""Draws the result: for each workload, each contender's multiple of the raw baseline."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Measurement, Result
from benchmarks.scores import ratio, raw_baseline
from benchmarks.workloads import NAIVE, NATIVE

_COLOURS = {NATIVE: "#4c72b0", NAIVE: "#c44e52"}
_OURS, _RAW = "#55a868", "#b8b8b8"


def draw(result: Result, path: Path) -> bool:
    """Write the picture as PNG; False when nothing was measured next to a baseline."""
    import matplotlib as mpl

    mpl.use("agg")  # This backend needs no screen.
    import matplotlib.pyplot as plt

    groups = _groups(result)
    if not groups:
        return False
    bars = sum(len(bars) for bars in groups.values())
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(9, 0.8 * len(groups) + 0.3 * bars), layout="constrained",
        gridspec_kw={"height_ratios": [len(bars) for bars in groups.values()]}, squeeze=False,
    )  # fmt: skip
    for ax, (title, contenders) in zip(axes[:, 0], groups.items(), strict=True):
        names = [one.contender for one, _ in contenders]
        values = [multiple for _, multiple in contenders]
        drawn = ax.barh(names, values, color=[_colour(one) for one, _ in contenders])
        ax.bar_label(drawn, labels=[f"{value:.2f}×" for value in values], padding=3, fontsize=8)
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_xlim(0, 1.15 * max(values))
        ax.invert_yaxis()
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Times the raw baseline (less is better)", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _groups(result: Result) -> dict[str, list[tuple[Measurement, float]]]:
    """Returns the contenders by workload and backlog, with their multiples of the raw baseline."""
    groups: dict[str, list[tuple[Measurement, float]]] = {}
    for one in result.measurements:
        raw = raw_baseline(one.workload, one.backlog, result.measurements)
        score = raw and ratio("", [m.seconds for m in one.rounds], [m.seconds for m in raw.rounds])
        if raw and score:
            title = f"{' '.join(filter(None, (one.workload, one.backlog)))} (1× = {raw.contender})"
            groups.setdefault(title, []).append((one, score.median))
    return groups


def _colour(one: Measurement) -> str:
    return _COLOURS.get(one.contender, _RAW if one.baseline else _OURS)
