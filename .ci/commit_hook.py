"""Has a wheel, and a source distribution, say which commit it was built from: a record of a run names that."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TOLD = Path("pipeline/git_commit.txt")


class CommitHook(BuildHookInterface[Any]):
    """Adds the file ``TOLD`` to what is built, a wheel's package too; nothing is written into the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the commit that is checked out; what a source distribution says already stays."""
        root = Path(self.root)
        if version == "editable" or (root / TOLD).exists() or not (root / ".git").exists():
            return
        asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            self.folder = tempfile.TemporaryDirectory()
            target_file = Path(self.folder.name, "git_commit.txt")
            target_file.write_text(done.stdout)
            build_data["force_include"][str(target_file)] = str(
                "offstage" / TOLD if self.target_name == "wheel" else TOLD
            )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file that was added."""
        folder = getattr(self, "folder", None)
        if folder is not None:
            folder.cleanup()
