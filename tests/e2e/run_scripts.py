"""Runs scripts, each in a process of its own that is forked from one which has imported what all of them need.

``python run_scripts.py MODULE,… FOLDER…`` runs ``script.py`` in each folder, where ``printed`` is then what it prints,
``errors`` what it says of errors and ``status`` its exit status.
"""

import gc
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path


def main(modules: list[str], folders: list[str]) -> None:
    for module in modules:
        import_module(module)
    gc.freeze()  # or each collection in a script would go through all that was imported
    for folder in folders:
        child = os.fork()
        if child == 0:
            run(folder)
            return
        Path(folder, "status").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def run(folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    for descriptor, name in ((1, "printed"), (2, "errors")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    runpy.run_path("script.py", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
