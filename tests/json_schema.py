"""The JSON Schema (draft 2020-12) of ``run.json``: made of the type hints that a record is read by.

``python -m tests.json_schema`` writes it to ``.github/run.schema.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import getdoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator

from offstage.pipeline.decoding import CHOICES, default_of, json_key
from offstage.pipeline.plain_data import as_json
from offstage.pipeline.run_schema import Run

SCHEMA = Path(__file__).parents[1] / ".github" / "run.schema.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: Mapping[object, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null",
}  # fmt: skip


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """Return the schema of the dataclass ``kind``: other keys are allowed, and those without a default required."""
    parts: dict[str, Any] = {}
    whole = _schema(kind, parts)
    return {"$schema": DIALECT, "title": kind.__name__, **whole, "$defs": dict(sorted(parts.items()))}


def _schema(hint: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the type ``hint``; those of dataclasses go to ``parts``, by their names."""
    kind, arms = get_origin(hint) or hint, get_args(hint)
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    if kind in (Union, UnionType):
        made = [_schema(arm, parts) for arm in arms]
        plain = [one["type"] for one in made if one.keys() == {"type"}]
        names = [name for name in plain if name != "integer" or "number" not in plain]
        return {"type": names} if len(plain) == len(made) else {"anyOf": made}
    if kind is Literal:
        return {"enum": list(arms)}
    if is_dataclass(kind):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}
            parts[kind.__name__] |= _object(kind, parts)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if kind is tuple and arms[-1] is Ellipsis:
        return {"type": "array", "items": _schema(arms[0], parts)}
    if kind is tuple:
        items = [_schema(arm, parts) for arm in arms]
        return {"type": "array", "prefixItems": items, "minItems": len(arms), "maxItems": len(arms)}
    if isinstance(kind, type) and issubclass(kind, Mapping):
        inner = _schema(arms[1], parts)
        return {"type": "object", "additionalProperties": inner} if inner else {"type": "object"}
    return {}


def _object(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    written = [entry for entry in fields(kind) if isinstance(json_key(entry), str)]
    choices = {entry.name: {"enum": list(entry.metadata[CHOICES])} for entry in written if CHOICES in entry.metadata}
    return {
        "description": getdoc(kind),
        "type": "object",
        "properties": {json_key(one): choices.get(one.name) or _schema(hints[one.name], parts) for one in written},
        "required": [json_key(one) for one in written if default_of(one) is MISSING],
    }


def schema_text() -> str:
    """Return what stands in the file."""
    return as_json(json_schema(Run))


@cache
def run_validator() -> Draft202012Validator:
    """Return what a record is held against the schema by."""
    schema = json_schema(Run)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


if __name__ == "__main__":
    SCHEMA.write_text(schema_text())
