"""Which memory of this process asks for huge pages."""

from __future__ import annotations

import re
from pathlib import Path


def is_huge(address: int) -> bool:
    """Return whether huge pages are asked for at ``address``."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    spans = ((re.match(r"([0-9a-f]+)-([0-9a-f]+) ", one), one) for one in maps)
    (mapping,) = (one for span, one in spans if span and int(span[1], 16) <= address < int(span[2], 16))
    return "hg" in mapping.rpartition("VmFlags:")[2].split()
