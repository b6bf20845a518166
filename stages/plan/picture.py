"""The plan as a picture: a bar for each device, filled by layers, slots dotted, reserve hatched, a line at the budget.

Each bar has its own scale, since a disk holds a hundred times what an accelerator does; the labels give the sizes.
Mid-tone fills and ``currentColor`` on no background are read on a light page as on a dark one.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from offstage.stages.plan.plan import Plan
from offstage.stages.plan.table import rows, slots_told
from offstage.stages.units import DeviceId

FILE_NAME = "plan.svg"

_BAR, _LEFT, _ROW, _HEIGHT = 640, 90, 84, 34
_HUES = ("#4c8bf5", "#2fa37c", "#c78a1e", "#b565c8", "#d0605e", "#5b9bb0")
_STYLE = """<style>
svg { color: #222; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { color: #ddd; } }
text { fill: currentColor; }
.face { font-size: 11px; text-anchor: middle; fill: #fff; paint-order: stroke; stroke: #0008; stroke-width: 2px; }
.frame { fill: none; stroke: currentColor; opacity: 0.4; }
.budget { stroke: #d0342c; stroke-width: 2; }
</style>
<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line x1="0" y1="0" x2="0" y2="6" stroke="currentColor" stroke-width="2" opacity="0.6"/></pattern>
<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse">
<circle cx="3" cy="3" r="1.2" fill="currentColor" opacity="0.6"/></pattern></defs>"""


def draw(plan: Plan, sizes: Mapping[str, int]) -> str:
    """Return the picture of ``plan`` as SVG text. ``sizes`` are the bytes of every tensor."""
    devices = list(plan.resident_bytes)
    bars = [_bar(plan, device, sizes, top=20 + _ROW * index) for index, device in enumerate(devices)]
    width, height = _LEFT + _BAR + 30, 30 + _ROW * len(devices)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{escape(f"plan: {plan.policy}")}">\n{_STYLE}\n' + "\n".join(bars) + "\n</svg>\n"
    )


def _bar(plan: Plan, device: DeviceId, sizes: Mapping[str, int], *, top: int) -> str:
    """Return the bar of one device: its layers in order, its slots, then its reserve, and the line of its budget."""
    held, slots = plan.resident_bytes[device], plan.slots.get(device, 0)
    reserve = plan.reserves.get(device, 0)
    budget = plan.budgets.get(device)
    scale = _BAR / max(held + slots + reserve, budget or 0, 1)
    parts = [f'<text x="{_LEFT - 10}" y="{top + 22}" text-anchor="end" font-weight="600">{device}</text>']
    left, shown = float(_LEFT), 0
    for index, row in enumerate(row for row in rows(plan, sizes) if row.device == device):
        count = min(row.bytes, held - shown)
        shown += count
        parts.append(_segment(left, top, count * scale, _HUES[index % len(_HUES)], f"{row.name}: {gib(row.bytes)}"))
        left += count * scale
    if slots:
        told = f"{slots_told(plan, device)}: {gib(slots)}"
        parts.append(_segment(left, top, slots * scale, "url(#dots)", told))
        left += slots * scale
    if reserve:
        parts.append(_segment(left, top, reserve * scale, "url(#hatch)", f"reserve: {gib(reserve)}"))
    parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_BAR}" height="{_HEIGHT}" class="frame"/>')
    if budget is not None:
        x = _LEFT + budget * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top - 5}" x2="{x:.1f}" y2="{top + _HEIGHT + 5}" class="budget"/>')
    label = [*([plan.names[device]] if device in plan.names else []), f"weights {gib(held)}"]
    label += [f"slots {gib(slots)}"] if slots else []
    label += [f"reserve {gib(reserve)}"] if reserve else []
    brought = plan.link_bytes_per_token.get(device, 0)
    label += [f"{gib(brought)} a token over its link"] if brought else []
    label.append("no limit" if budget is None else f"budget {gib(budget)}")
    parts.append(f'<text x="{_LEFT}" y="{top + _HEIGHT + 18}" font-size="12">{escape(" · ".join(label))}</text>')
    return "\n".join(parts)


def _segment(left: float, top: float, width: float, fill: str, title: str) -> str:
    """Return one part of a bar, named by its tooltip, and on its face where there is room."""
    box = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_HEIGHT}" fill="{fill}" stroke="#8888">'
    name = title.rpartition(":")[0]
    face = ""
    if width > 7 * len(name) + 8:
        middle = left + width / 2
        face = f'<text x="{middle:.1f}" y="{top + 22}" class="face">{escape(name)}</text>'
    return f"{box}<title>{escape(title)}</title></rect>{face}"


def gib(count: int) -> str:
    """Return ``count`` bytes in GiB, with as many places as a small model needs."""
    value = count / 2**30
    return f"{value:.2f} GiB" if value >= 0.1 or not count else f"{value:.5f} GiB"
