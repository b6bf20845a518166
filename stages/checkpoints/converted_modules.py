"""Which modules' weights a config declares quantised: by the names that it leaves out, and those that it means.

Names are patterns of a stranger, so who asks bounds the time that it takes. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.grouped_scheme import left_out
from offstage.stages.checkpoints.quantization import COMPRESSED, method_of

LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
"""Under which key a method's config lists what stays as it is."""

Converts = Callable[[Collection[str], str], bool]
"""Whether a module is quantised, by the names that it has (in the checkpoint, in the model) and that of its class."""


def converted_modules(quantization: Mapping[str, object], default: Iterable[str]) -> Converts:
    """Return what tells which modules ``quantization`` means; ``default`` are left out where it lists none.

    A ``CheckpointError`` names a pattern that is none.
    """
    if method_of(quantization) == COMPRESSED:
        return _of_groups(quantization)
    listed = next((key for key in LEFT_OUT if isinstance(quantization.get(key), list)), None)
    patterns = [str(pattern) for pattern in default]
    if listed is not None:
        patterns = _texts(listed, quantization[listed])
    patterns = [*patterns, *left_out(quantization)]
    whole, ends = _any_of(patterns, listed or "", then=r"(?:(?<=\.)|(?=\.|$))"), tuple(patterns)

    def converts(names: Collection[str], _class_name: str) -> bool:
        return not any(name.endswith(ends) or (whole and whole.match(name)) for name in names)

    return converts


def _of_groups(quantization: Mapping[str, object]) -> Converts:
    """Return what tells which modules the groups of a config of compressed-tensors mean."""
    groups = quantization.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    targets = [_texts("targets", group.get("targets")) for group in groups if isinstance(group, Mapping)]
    meant = _named("targets", [target for some in targets for target in some] or ["Linear"])
    ignored = _named("ignore", _texts("ignore", quantization.get("ignore")))
    return lambda names, class_name: meant(names, class_name) and not ignored(names, class_name)


def _named(key: str, listed: Collection[str]) -> Converts:
    """Return whether a module is one of those ``listed``: names, classes, or patterns that begin with ``re:``."""
    pattern = _any_of([text.removeprefix("re:") for text in listed if text.startswith("re:")], key)
    exact = {text for text in listed if not text.startswith("re:")}

    def among(names: Collection[str], class_name: str) -> bool:
        every = {class_name, *names}
        return bool(every & exact) or any(pattern and pattern.match(name) for name in names)

    return among


def _texts(key: str, value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CheckpointError(f"config.json: {key} {str(value)[:40]!r}: a list of names of modules belongs here")
    return value


def _any_of(patterns: Collection[str], key: str, then: str = "") -> re.Pattern[str] | None:
    """Return what matches whatever one of ``patterns`` does, followed by ``then``; null for none.

    Configs list hundreds, and a mixture has ten thousands of names: as one they are tried without Python.
    """
    for pattern in patterns:
        _compiled(pattern, key)
    return _compiled(f"(?:{'|'.join(f'(?:{pattern})' for pattern in patterns)}){then}", key) if patterns else None


def _compiled(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"config.json: {key}: {pattern[:80]!r} is no pattern: {error}") from error
