"""What a command's process is made before anything else of it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HUSHED = """
from offstage.pipeline.process_setup import hush_libraries
{first}
hush_libraries()
import transformers
print(transformers.logging.get_verbosity() == transformers.logging.ERROR)
"""


@pytest.mark.parametrize(
    ("first", "said", "expected"), [("", None, "True"), ("import transformers", None, "True"), ("", "info", "False")]
)
def test_libraries_tell_errors_alone_unless_the_environment_says_more(
    first: str, said: str | None, expected: str
) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    variables |= {} if said is None else {"TRANSFORMERS_VERBOSITY": said}
    command = [sys.executable, "-c", HUSHED.format(first=first)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
