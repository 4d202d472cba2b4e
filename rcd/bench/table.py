"""Figures as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rcd.bench.decode import Figure


def lines(figures: Sequence[Figure], cpu: bool = False) -> list[str]:
    """A head, and a line for each figure; medians with quartiles in brackets. `cpu`: the process's time, too."""
    head = f"{'batch':>5} {'prefix':>7} {'threads':>7}  {'method':10} {'steps':>5} {'ms/step':>24} {'x stock':>20} "
    head += f"{'x SeqD':>20} {'tokens/s':>9} {'of limit':>8} {'alpha':>5} {'GiB':>5}"
    out = [head + (f" {'CPU ms':>9} {'x stock':>7} {'x SeqD':>7}" if cpu else "")]
    for one in figures:
        row = f"{one.batch:5d} {one.prefix:7,d} {one.threads:7d}  {one.method:10} {one.steps:5d} "
        row += (
            f"{spread(one.ms_per_step, one.ms_quartiles):>24} {spread(one.over_stock, one.over_stock_quartiles):>20} "
        )
        row += f"{spread(one.over_seqd, one.over_seqd_quartiles):>20} {shown(one.tokens_per_second, ',.0f'):>9} "
        row += f"{shown(one.limit_share, '.1%'):>8} {shown(one.mean_alpha, '.2f'):>5} {shown(one.peak_gib, '.1f'):>5}"
        if cpu:
            row += f" {one.cpu_ms:9.3f} {shown(one.cpu_over_stock, '.3f'):>7} {shown(one.cpu_over_seqd, '.3f'):>7}"
        out.append(row)
    return out


def spread(value: float | None, quartiles: tuple[float, float] | None) -> str:
    if value is None or quartiles is None:
        return "-"
    return f"{value:.3f} [{quartiles[0]:.3f}-{quartiles[1]:.3f}]"


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
