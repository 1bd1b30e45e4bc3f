# SPDX-License-Identifier: Apache-2.0
"""Comparisons by alternation: what is compared takes turns, each turn gives one ratio, and the ratios are the result.

A shared machine changes its speed from minute to minute, so that values of one turn are compared with one another and
never with those of another turn. The spread is the interquartile range of the ratios over their median.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Comparison:
    """One quantity of `subject` and of another one over the same turns, in `unit`; `better` says which way is better.

    section  table that it belongs to
    load     what was asked, such as "4 streams"
    """

    section: str
    load: str
    quantity: str
    unit: str
    better: Better
    subject: str
    ours: list[float]
    other: str
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, turn by turn."""
        return [a / b if b else math.nan for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> float:
        """Interquartile range of the ratios over their median; 0 of fewer than two turns."""
        if len(self.ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return (high - low) / self.ratio

    @property
    def is_lost(self) -> bool:
        """True where the other one is better by more than the spread."""
        margin = max(0.02, self.spread / 2)
        return self.ratio < 1 - margin if self.better == "higher" else self.ratio > 1 + margin


@dataclass
class Report:
    """All that a run measured. `facts` are numbers without another one to compare with: (section, line, value)."""

    machine: dict[str, str]
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    facts: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    def write(self, folder: Path) -> list[Path]:
        """bench.json, bench.md, and one PNG per section where matplotlib is installed."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = [asdict(c) | {"ratio": c.ratio, "spread": c.spread, "lost": c.is_lost} for c in self.comparisons]
        whole = {"machine": self.machine, "comparisons": rows, "facts": self.facts}
        (folder / "bench.json").write_text(json.dumps(whole, indent=1) + "\n")
        (folder / "bench.md").write_text(self.markdown())
        return [folder / "bench.json", folder / "bench.md", *plots(self.comparisons, folder)]

    def markdown(self) -> str:
        """The report as tables, a section each; then where another one is better."""
        lines = ["# Measured", "", ", ".join(f"{key} {value}" for key, value in self.machine.items()), ""]
        for section in dict.fromkeys([c.section for c in self.comparisons] + [fact[0] for fact in self.facts]):
            lines += [f"## {section}", "", *_table([c for c in self.comparisons if c.section == section])]
            lines += [f"* {line}: {value}" for name, line, value in self.facts if name == section] + [""]
        lost = [c for c in self.comparisons if c.is_lost]
        lines += ["## Where we lose", ""]
        lines += [
            f"* {c.section}, {c.load}: {c.quantity} of {c.subject} {c.ratio:.2f}× that of {c.other}" for c in lost
        ] or ["* nowhere"]
        return "\n".join(lines) + "\n"


def _table(comparisons: Sequence[Comparison]) -> list[str]:
    if not comparisons:
        return []
    lines = ["| load | quantity | of | value | beside | value | ratio | spread | turns |", "|" + "---|" * 9]
    for c in comparisons:
        ours, theirs = statistics.median(c.ours), statistics.median(c.theirs)
        quantity = f"{c.quantity}, {c.unit}" if c.unit else c.quantity
        lines.append(
            f"| {c.load} | {quantity} | {c.subject} | {ours:.4g} | {c.other} | {theirs:.4g} "
            f"| {c.ratio:.2f} | {c.spread:.0%} | {len(c.ours)} |"
        )
    return [*lines, ""]


def plots(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """one plot per section: every ratio of every turn, better to the right. None without matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    plt.switch_backend("agg")
    made: list[Path] = []
    for number, section in enumerate(dict.fromkeys(c.section for c in comparisons)):
        rows = [c for c in comparisons if c.section == section][::-1]
        figure, axes = plt.subplots(figsize=(8, 1.2 + 0.45 * len(rows)))
        for y, c in enumerate(rows):
            gains = [r if c.better == "higher" else 1 / r for r in c.ratios if r]
            axes.plot(gains, [y] * len(gains), "o", color="tab:blue", alpha=0.5)
            axes.plot([statistics.median(gains)] * 2, [y - 0.3, y + 0.3], color="black")
        axes.axvline(1, color="tab:red", linewidth=1)
        axes.set_yticks(range(len(rows)), [f"{c.quantity}, {c.load}: {c.subject} / {c.other}" for c in rows])
        axes.set_xscale("log")
        axes.set_xlabel("times better than the other one, every turn; the bar is the median")
        axes.set_title(section)
        figure.tight_layout()
        made.append(folder / f"bench-{number + 1}.png")
        figure.savefig(made[-1], dpi=120)
        plt.close(figure)
    return made


Values = Mapping[str, float]
"""Quantity → value of one turn."""


def alternate(subjects: Mapping[str, Callable[[], Values]], turns: int) -> dict[str, list[Values]]:
    """Let all subjects take `turns` turns; the order is reversed each time, so that no one always comes first."""
    found: dict[str, list[Values]] = {name: [] for name in subjects}
    for turn in range(turns):
        names = list(subjects) if turn % 2 == 0 else list(subjects)[::-1]
        for name in names:
            found[name].append(subjects[name]())
    return found


def compare(
    found: Mapping[str, Sequence[Values]], ours: str, other: str, section: str, load: str,
    quantities: Mapping[str, tuple[str, Better]],
) -> list[Comparison]:  # fmt: skip
    """`quantities` (name → unit and direction) of two subjects, where both have them."""
    return [
        Comparison(
            section, load, name, unit, better, ours,
            [values[name] for values in found[ours]], other, [values[name] for values in found[other]],
        )
        for name, (unit, better) in quantities.items()
        if all(name in values for values in (*found[ours], *found[other]))
    ]  # fmt: skip
