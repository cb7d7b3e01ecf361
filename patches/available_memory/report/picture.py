# SPDX-License-Identifier: Apache-2.0
"""One stacked bar of device memory for every worker, drawn by matplotlib (extra ``plots``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .report import (
    ACTIVATION_PEAK,
    DEVICE_GROWTH,
    DEVICE_TOTAL,
    GRAPH_ESTIMATE,
    NON_TORCH,
    OTHER_PROCESSES,
    OWN_PROCESS,
    WEIGHTS,
    BudgetReport,
)
from .units import GIB, byte_count, gib

OWN_REST = "other memory of this process"
OWN_ALL = "memory of this process, weights included"
# Okabe and Ito's palette, which stays apart for colour-blind readers; grey tones for what is not this worker's.
COLOURS = {
    "other processes": "#7f7f7f",
    "weights": "#0072b2",
    "model-local KV, resident": "#56b4e9",
    OWN_REST: "#999933",
    OWN_ALL: "#707020",
    "outside torch, neighbours included": "#b0a040",
    "activation peak": "#e69f00",
    "graph estimate": "#cc79a7",
    "KV cache": "#009e73",
    "model-local KV, pending": "#d55e00",
    "not claimed": "#e8e8e8",
    "not claimed, or not known": "#d8d8d8",
}


class PictureError(RuntimeError):
    """No picture can be drawn. The text says why and what to do."""


@dataclass(frozen=True)
class Bar:
    """One worker. ``parts``: (name, bytes) from the bottom of the device up; ``total``: its bytes, if known."""

    title: str
    parts: tuple[tuple[str, int], ...]
    total: int | None

    @property
    def height(self) -> int:
        """Bytes up to the top of the bar; above ``total`` when more is planned than the device has."""
        return sum(size for _, size in self.parts)


def bar(report: BudgetReport) -> Bar:
    """The parts of one worker's memory. A part that is unknown is left out, and so is one of 0 bytes.

    The rest of this process is its own memory less the weights where both were measured, otherwise the
    non-torch memory. Resident model-local KV is a part of it and is shown apart. With a part unknown, what is left of
    the device is not free for certain, and its name says so.
    """
    values = {item.name: byte_count(item.value) for item in report.inputs}
    weights, own = values.get(WEIGHTS), values.get(OWN_PROCESS)
    held = max(own - (weights or 0), 0) if own is not None else values.get(NON_TORCH)
    rest = held or 0
    unknown = held is None or any(values.get(name) is None for name in (OTHER_PROCESSES, WEIGHTS))
    resident = min(report.local_kv("resident_bytes") or 0, rest)
    sizes = {
        "other processes": values.get(OTHER_PROCESSES) or 0,
        "weights": weights or 0,
        "model-local KV, resident": resident,
        OWN_REST if own is None or weights is not None else OWN_ALL: rest - resident,
        "outside torch, neighbours included": 0 if held is not None else values.get(DEVICE_GROWTH) or 0,
        "activation peak": values.get(ACTIVATION_PEAK) or 0,
        "graph estimate": values.get(GRAPH_ESTIMATE) or 0,
        "KV cache": report.kv_bytes,
        "model-local KV, pending": report.local_kv("pending_bytes") or 0,
    }
    total = values.get(DEVICE_TOTAL)
    if total is not None:
        left = "not claimed, or not known" if unknown else "not claimed"
        sizes[left] = max(total - sum(sizes.values()), 0)
    title = f"{report.worker} {report.device}".strip()
    title += "" if report.dp_rank is None else f", DP rank {report.dp_rank}"
    title += "" if report.rank is None else f", rank {report.rank}"
    return Bar(f"{title}, pid {report.pid}", tuple((name, size) for name, size in sizes.items() if size), total)


def png(reports: list[BudgetReport], path: Path) -> None:
    """Draw the bars into a PNG file.

    Raises:
        PictureError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(f"A PNG needs matplotlib ({error}). Install vllm-omni-patch[plots].") from None
    bars = [bar(report) for report in reports]
    figure = Figure(figsize=(11, 1.9 + 0.75 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labelled: set[str] = set()
    for number, each in enumerate(bars):
        start = 0.0
        for name, size in each.parts:
            label = name if name not in labelled else "_"  # matplotlib leaves a label with an underscore out
            labelled.add(name)
            axes.barh(number, size / GIB, left=start, height=0.6, color=COLOURS[name], label=label)
            if size > 0.06 * max(each.height, 1):
                axes.text(start + size / GIB / 2, number, gib(size), ha="center", va="center", fontsize=8)
            start += size / GIB
        if each.total is not None and each.height > each.total:
            axes.vlines(each.total / GIB, number - 0.4, number + 0.4, color="#cc0000")
    axes.set_yticks(range(len(bars)), [each.title for each in bars])
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_title("KV cache budget")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png", dpi=130)
