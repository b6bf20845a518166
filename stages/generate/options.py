"""Generation options: every option of transformers' GenerationConfig, by its own name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from pipeline.errors import CheckpointError, ConfigError, Fault, closest
from stages.generate.prompts import OWN_KEYS

FILE_NAME = "generation_config.json"
PLAIN_OPTIONS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id")
"""What the plain loop understands, for models without a ``generate`` of their own."""


def given_options(generate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the config node ``generate`` gives; null means: not given."""
    return {str(k): v for k, v in generate.items() if k not in OWN_KEYS and v is not None}


def check_options(generate: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield the options that transformers doesn't know, and those whose values it refuses."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"}
    options = given_options(generate)
    unknown = [name for name in options if name not in known]
    for name in unknown:
        yield Fault(f"generate.{name}", f"no such option{closest(name, [*known, *OWN_KEYS])}; see GenerationConfig")
    length = options.get("max_new_tokens", 1)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        yield Fault("generate.max_new_tokens", f"{length!r} is no number of tokens; give a whole number from 1")
        return
    try:
        GenerationConfig(**{name: value for name, value in options.items() if name in known}).validate()
    except (ValueError, TypeError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        yield Fault("generate", f"transformers refuses these options: {message}")


def checkpoint_defaults(folder: Path) -> GenerationConfig | None:
    """Return what the checkpoint's ``generation_config.json`` says, or None if it has none."""
    if not folder.joinpath(FILE_NAME).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder / FILE_NAME}: {message}; mend or remove the file") from error


def plain_options(options: Mapping[str, Any], defaults: GenerationConfig | None) -> dict[str, Any]:
    """Return the options of the plain loop, or raise a ``ConfigError`` that names those it doesn't understand."""
    strangers = sorted(set(options) - set(PLAIN_OPTIONS))
    if strangers:
        raise ConfigError(
            f"generate.{strangers[0]}: this model has no generate() of transformers, and the plain loop knows only "
            + ", ".join(PLAIN_OPTIONS)
        )
    found = {name: getattr(defaults, name, None) for name in PLAIN_OPTIONS} if defaults else {}
    return {**{name: value for name, value in found.items() if value is not None}, **options}
