"""JSON lines logs and a plot of them without a plotting library."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class JsonLog:
    """Appends one JSON object a line, with the time; also prints it."""

    def __init__(self, path: Path, echo: bool = True) -> None:
        self.path, self.echo = Path(path), echo
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **fields: Any) -> None:
        """Writes one line at once, so that a killed run keeps it."""
        line = json.dumps({"time": round(time.time(), 2), **fields})
        with self.path.open("a") as f:
            f.write(line + "\n")
        if self.echo:
            print(line, flush=True)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a log."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def plot(log: Path, out: Path, x: str = "step", ys: tuple[str, ...] = ("loss",), smooth: int = 20) -> None:
    """An SVG line chart of the fields `ys` over `x`."""
    rows = [r for r in read_log(log) if x in r and any(y in r for y in ys)]
    width, height, pad = 900, 420, 50
    curves: list[tuple[str, list[tuple[float, float]]]] = []
    for y in ys:
        points = [(float(r[x]), float(r[y])) for r in rows if isinstance(r.get(y), (int, float))]
        mean: list[tuple[float, float]] = []
        for i, (px, _) in enumerate(points):
            window = [v for _, v in points[max(0, i - smooth + 1) : i + 1]]
            mean.append((px, sum(window) / len(window)))
        if mean:
            curves.append((y, mean))
    if not curves:
        raise ValueError(f"{log}: no line has both {x!r} and one of {ys}; was the stage run?")
    xs = [p for _, c in curves for p, _ in c]
    vs = sorted(v for _, c in curves for _, v in c)
    x0, x1, y0, y1 = min(xs), max(xs), vs[0], vs[int(len(vs) * 0.98)]
    sx = (width - 2 * pad) / (x1 - x0 or 1)
    sy = (height - 2 * pad) / (y1 - y0 or 1)
    colours = ["#1f5fbf", "#c2410c", "#15803d", "#7e22ce"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>',
             f'<path d="M{pad},{pad}V{height - pad}H{width - pad}" fill="none" stroke="#888"/>']
    for k in range(5):
        vx, vy = x0 + (x1 - x0) * k / 4, y0 + (y1 - y0) * k / 4
        parts.append(f'<text x="{pad + (vx - x0) * sx:.0f}" y="{height - pad + 18}" text-anchor="middle">{vx:.0f}</text>')
        parts.append(f'<text x="{pad - 6}" y="{height - pad - (vy - y0) * sy + 4:.0f}" text-anchor="end">{vy:.2f}</text>')
    for i, (name, curve) in enumerate(curves):
        path = " ".join(f"{pad + (px - x0) * sx:.1f},{height - pad - (min(v, y1) - y0) * sy:.1f}" for px, v in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[i % 4]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{width - pad - 120}" y="{pad + 16 * i}" fill="{colours[i % 4]}">{name}</text>')
    out.write_text("\n".join([*parts, "</svg>"]))
