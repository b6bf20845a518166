"""What a report's page has in it: its data as its script finds them, and its own markup without the libraries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from offstage.pipeline.report.figures import Picture

_SCRIPT = re.compile(r'<script type="(text/javascript|module)">(.*?)</script>', re.DOTALL)
_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)


def scripts(page: Path) -> list[str]:
    """Return the scripts of ``page`` that run, in their order."""
    return [script for _, script in _SCRIPT.findall(page.read_text())]


def markup(page: Path) -> str:
    """Return ``page`` without scripts that run and without style."""
    return _STYLE.sub("", _SCRIPT.sub("", page.read_text()))


def figures(page: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of ``page`` by their ids."""
    matches = re.findall(
        r'<figure id="([^"]*)".*?<script type="application/json">(.*?)</script>', markup(page), re.DOTALL
    )
    return {name: json.loads(content) for name, content in matches}


def entries(picture: Picture) -> list[str]:
    """Return what the legend of ``picture`` has, in its order."""
    return [trace.name for trace in picture.figure.data if trace.showlegend is not False]


def traces(picture: Picture, name: str) -> list[Any]:
    """Return the traces of ``picture`` that are called so."""
    return [trace for trace in picture.figure.data if trace.name == name]
