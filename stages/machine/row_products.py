"""Whether the host's kernels give a product by blocks of the weight's rows to the bit: found out once, and kept.

Each number of ``x @ W.T`` depends on one row of ``W`` alone, but a kernel may sum it up in another order where it is
given fewer rows. No table says when: it hangs on the processor, torch's version, the environment and the dtype. What
was found so far: never with ``row_ranges``, in float32, bfloat16 and float16, with AVX-512, AVX2 and SSE4.1, of one
thread or two. A block of less than twelve rows, or one that doesn't end at a multiple of four where the weight goes on,
has other bits in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from offstage.stages.machine import own_process
from offstage.stages.machine.kept_figures import kept_for_user
from offstage.stages.machine.kernels import identity

FILE_NAME = "row_products.json"


def exact_dtypes(folder: Path, dtypes: Iterable[str]) -> frozenset[str]:
    """Return those of ``dtypes`` in which a product by ``row_ranges`` has the bits of the whole one on this machine.

    As kept in ``folder``, or found out now, with torch, and kept there.
    """
    keys = {f"{dtype}; {identity()}": dtype for dtype in dtypes}
    probes = {key: partial(_measure, dtype) for key, dtype in keys.items()}
    kept = kept_for_user(folder / FILE_NAME, probes, is_sound=_is_answer) if probes else {}
    return frozenset(dtype for key, dtype in keys.items() if kept.get(key) is True)


def _is_answer(figure: object) -> bool:
    return isinstance(figure, bool)


def _measure(dtype: str) -> bool | None:
    """Ask a process of its own, and return null where that fails: what kernels keep for so many shapes, some 70 MB of
    bfloat16, would stay in this one, and no plan counts it. It does where memory is too short for a second process.
    """
    if own_process.has_room():
        return {b"True": True, b"False": False}.get(own_process.measure_apart("row_product_probe", dtype) or b"")
    from offstage.stages.machine.row_product_probe import is_exact_by_rows

    return is_exact_by_rows(dtype)
