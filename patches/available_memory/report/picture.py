# SPDX-License-Identifier: Apache-2.0
"""The reports of a folder as one picture: a stacked bar of the device's memory for every worker.

``html`` needs nothing and fetches nothing: one file with its drawing inside. ``png`` is drawn by matplotlib (extra
``plots``). Both read the JSON files that the workers wrote; neither needs vLLM.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import (
    ACTIVATION_PEAK,
    DEVICE_GROWTH,
    DEVICE_TOTAL,
    GRAPH_ESTIMATE,
    NON_TORCH,
    OTHER_PROCESSES,
    OWN_PROCESS,
    REQUESTED,
    WEIGHTS,
    as_text,
    byte_count,
    gib,
)

GIB = 1 << 30
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
    "model-local KV, still to come": "#d55e00",
    "not claimed": "#e8e8e8",
    "not claimed, or not known": "#d8d8d8",
}


class PictureError(RuntimeError):
    """Nothing can be shown. The text says why and what to do."""


@dataclass(frozen=True)
class Bar:
    """One worker. ``parts``: (name, bytes) from the bottom of the device up; ``total``: bytes of the device, if known.

    ``requested``: where the worker's share ends when it is drawn from 0, without neighbours; ``None`` when unknown.
    """

    title: str
    parts: tuple[tuple[str, int], ...]
    total: int | None
    requested: int | None

    @property
    def height(self) -> int:
        """Bytes up to the top of the bar; above ``total`` when more is planned than the device has."""
        return sum(size for _, size in self.parts)


def load(folder: Path, name: str = "memory") -> list[dict[str, Any]]:
    """The ``<name>-<pid>.json`` reports of ``folder``, by rank and PID. A file that is not a report is left out.

    Raises:
        PictureError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise PictureError(f"{folder} is not a folder. Name the one that VLLM_OMNI_PATCH_REPORT_DIR was set to.")
    found = []
    for path in sorted(folder.glob(f"{name}-*.json")):
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(data, dict):
            found.append({**data, "file": path.name})
    return sorted(found, key=lambda data: (_rank(data), _number(data.get("pid"))))


def bar(data: dict[str, Any]) -> Bar:
    """The parts of one worker's memory. A part that is unknown is left out, and so is one of 0 bytes.

    What this process holds beside weights is its own memory less the weights where both were measured, otherwise the
    non-torch memory. Resident model-local KV is a part of it and is shown apart. With a part unknown, what is left of
    the device is not free for certain, and its name says so.
    """
    values = {item.get("name"): byte_count(item.get("value")) for item in data.get("inputs", [])}
    local = data.get("model_local_kv") or {}
    weights, own = values.get(WEIGHTS), values.get(OWN_PROCESS)
    held = max(own - (weights or 0), 0) if own is not None else values.get(NON_TORCH)
    rest = held or 0
    unknown = held is None or any(values.get(name) is None for name in (OTHER_PROCESSES, WEIGHTS))
    resident = min(byte_count(local.get("resident_bytes")) or 0, rest)
    sizes = {
        "other processes": values.get(OTHER_PROCESSES) or 0,
        "weights": weights or 0,
        "model-local KV, resident": resident,
        OWN_REST if own is None or weights is not None else OWN_ALL: rest - resident,
        "outside torch, neighbours included": 0 if held is not None else values.get(DEVICE_GROWTH) or 0,
        "activation peak": values.get(ACTIVATION_PEAK) or 0,
        "graph estimate": values.get(GRAPH_ESTIMATE) or 0,
        "KV cache": byte_count(data.get("kv_bytes")) or 0,
        "model-local KV, still to come": byte_count(local.get("pending_bytes")) or 0,
    }
    total = values.get(DEVICE_TOTAL)
    if total is not None:
        left = "not claimed, or not known" if unknown else "not claimed"
        sizes[left] = max(total - sum(sizes.values()), 0)
    rank = data.get("rank")
    title = f"{data.get('worker', '?')} {data.get('device', '')}".strip()
    title += f", pid {data.get('pid')}" if rank is None else f", rank {rank}, pid {data.get('pid')}"
    parts = tuple((name, size) for name, size in sizes.items() if size)
    return Bar(title, parts, total, values.get(REQUESTED))


def local_kv_lines(data: dict[str, Any]) -> list[str]:
    """A ``model-local-kv-<pid>.json`` report as lines of text, for the tables beside the budget."""
    lines = []
    for part in data.get("loads", []):
        lines.append(f"{part.get('model')} in {part.get('runner')}: {part.get('status')}")
        for entry in part.get("entries", []):
            name = f"{entry.get('owner', '')}.{entry.get('name', '')}".strip(".")
            size = byte_count(entry.get("declared_peak"))
            lines.append(f"  {name}: {gib(size)}, {entry.get('charge', 'unknown')}: {entry.get('charge_reason', '')}")
        lines += [f"  failed: {failed}" for failed in part.get("failed", [])]
    figures = data.get("figures") or {}
    if figures:
        known = (f"{key.removesuffix('_bytes')} {gib(byte_count(figures[key]))}" for key in _FIGURES if key in figures)
        lines.append("  " + ", ".join(known))
    return lines


_FIGURES = ("declared_bytes", "resident_bytes", "uncharged_bytes", "pending_bytes")


def html_page(reports: list[dict[str, Any]], local: list[dict[str, Any]]) -> str:
    """One HTML document: the bars as SVG, and every worker's table. Refers to nothing outside itself."""
    bars = [bar(data) for data in reports]
    tables = "".join(
        f"<section><h2>{html.escape(each.title)}</h2><pre>{html.escape(as_text(data))}</pre></section>"
        for each, data in zip(bars, reports, strict=True)
    )
    for data in local:
        text = "\n".join(local_kv_lines(data))
        tables += f"<section><h2>model-local KV, pid {html.escape(str(data.get('pid')))}</h2>"
        tables += f"<pre>{html.escape(text)}</pre></section>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>KV cache budget</title><style>'
        "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}"
        "pre{overflow-x:auto;background:#f6f6f6;padding:.8rem;font-size:13px}svg{width:100%;height:auto}"
        "h1{font-size:1.4rem}h2{font-size:1.05rem}</style></head><body><h1>KV cache budget</h1>"
        f"{_svg(bars)}{tables}</body></html>\n"
    )


def _svg(bars: list[Bar]) -> str:
    """Horizontal bars on one scale, each part labelled by a tooltip, and a legend."""
    left, width, row, top = 10, 980, 62, 8
    most = max((max(each.height, each.total or 0) for each in bars), default=1) or 1
    used = [name for name in COLOURS if any(name == part for each in bars for part, _ in each.parts)]
    lines = (len(used) + 2) // 3
    height = top + row * len(bars) + 24 * lines + 12
    out = [f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="Memory of every worker, stacked">']
    for number, each in enumerate(bars):
        y = top + number * row
        total = "" if each.total is None else f" of {gib(each.total)}"
        title = f"{each.title}: KV cache {gib(dict(each.parts).get('KV cache', 0))}{total}"
        out.append(f'<text x="{left}" y="{y + 13}" font-size="14">{html.escape(title)}</text>')
        x = float(left)
        for name, size in each.parts:
            share = size / most * width
            out.append(
                f'<rect x="{x:.2f}" y="{y + 20}" width="{share:.2f}" height="28" fill="{COLOURS[name]}">'
                f"<title>{html.escape(name)}: {gib(size)} ({size} bytes)</title></rect>"
            )
            if share > 70:
                dark = name in ("other processes", "weights", "KV cache", "model-local KV, still to come")
                ink = "#fff" if dark else "#111"
                out.append(
                    f'<text x="{x + share / 2:.2f}" y="{y + 39}" font-size="12" text-anchor="middle" fill="{ink}">'
                    f"{gib(size)}</text>"
                )
            x += share
        if each.total is not None and each.height > each.total:
            edge = left + each.total / most * width
            out.append(
                f'<line x1="{edge:.2f}" x2="{edge:.2f}" y1="{y + 16}" y2="{y + 52}" stroke="#c00" stroke-width="2">'
                f"<title>the device ends here: {gib(each.total)}</title></line>"
            )
    for number, name in enumerate(used):
        x, y = left + (number % 3) * 330, top + row * len(bars) + 24 * (number // 3)
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[name]}"/>')
        out.append(f'<text x="{x + 20}" y="{y + 12}" font-size="13">{html.escape(name)}</text>')
    return "".join([*out, "</svg>"])


def png(reports: list[dict[str, Any]], path: Path) -> None:
    """Draw the bars into a PNG file.

    Raises:
        PictureError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(
            f"A PNG needs matplotlib ({error}). Install vllm-omni-patch[plots], or use --html, which needs nothing."
        ) from None
    bars = [bar(data) for data in reports]
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


def _rank(data: dict[str, Any]) -> int:
    return _number(data.get("rank"))


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
