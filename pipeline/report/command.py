"""The command ``offstage-report``: run records in, a page, three files and a table out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from offstage.pipeline.atomic_files import mendable, replace_file
from offstage.pipeline.command_exit import run_command
from offstage.pipeline.errors import ConfigError, StorageError
from offstage.pipeline.record import RECORD
from offstage.pipeline.terminal import Screen

if TYPE_CHECKING:
    from offstage.pipeline.report.summary import Summary

_DESCRIPTION = """Read the records of runs, print the table of jobs, and write report.html,
report.csv, report.json and report.tex into the first PATH, or into --output.
PATH is the folder of a run, of a sweep, or one above several, such as outputs/."""
_EXAMPLES = """examples:
  offstage-report outputs/multirun/DATE/TIME         one sweep
  offstage-report outputs                            every run there is
  offstage-report --compare RUN_A RUN_B              what changed between two
  offstage-report --bundle RUN --output mine.tar.gz  a run for others to replay

exit codes: 0; 2 the arguments; 5 reading or writing; 130 interrupted"""


def main() -> None:
    """Run the command with the process's arguments, then exit with its code."""
    run_command("offstage-report", run)


def run(arguments: Sequence[str] | None = None) -> int:
    """Report or compare as ``arguments`` say and return 0. Raises an ``OffstageError`` for what a user can mend."""
    options = _parser().parse_args(arguments)
    if sum(map(bool, (options.paths, options.compare, options.bundle))) != 1:
        raise ConfigError("give either one PATH or more, --compare A B, or --bundle RUN…; see offstage-report --help")
    _require_libraries()
    if options.bundle:
        _bundle(options)
    elif options.compare:
        _compare(*options.compare, output=options.output)
    else:
        _report(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offstage-report",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="a run, a sweep, or a folder above them")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where to write; made if it is missing")
    parser.add_argument("--title", default="", help="what stands on top of the page; without it the paths do")
    parser.add_argument("--author", default="", help="who made the report")
    parser.add_argument("--caption", default="", help="a sentence about what it shows")
    parser.add_argument("--compare", metavar=("A", "B"), nargs=2, type=Path, help="two runs: say what changed")
    parser.add_argument(
        "--bundle", metavar="RUN", nargs="+", type=Path,
        help="write one archive that reproduces these runs elsewhere, their weights apart; --output names the file",
    )  # fmt: skip
    return parser


def _report(options: argparse.Namespace) -> None:
    from offstage.pipeline.report.run_folders import find
    from offstage.pipeline.report.summary import summarise
    from offstage.pipeline.report.terminal import show_summary

    paths: Sequence[Path] = options.paths
    folder = _folder(paths[0], options.output)
    summary = summarise(find(paths, page_folder=folder))
    _write(folder, _texts(summary, options, title=", ".join(map(str, paths))))
    screen = Screen()
    show_summary(screen, summary)
    screen.print(f"\n{folder / 'report.html'}", markup=False, soft_wrap=True)


def _texts(summary: Summary, options: argparse.Namespace, *, title: str) -> dict[str, str]:
    """Return the files of a report by name; the page is called ``title`` unless ``options`` say otherwise."""
    from offstage.pipeline.report.exports import as_csv, as_json, as_latex
    from offstage.pipeline.report.page import report_page

    page = report_page(summary, options.title or title, author=options.author, caption=options.caption)
    texts = {"html": page, "csv": as_csv(summary), "json": as_json(summary), "tex": as_latex(summary)}
    return {f"report.{kind}": text for kind, text in texts.items()}


def _bundle(options: argparse.Namespace) -> None:
    from offstage.pipeline.report.bundle import SUFFIX, bundle
    from offstage.pipeline.report.run_folders import find
    from offstage.pipeline.report.summary import summarise

    paths: Sequence[Path] = options.bundle
    runs = find(paths)
    if runs.problems:
        raise StorageError(f"{runs.problems[0].path}: {runs.problems[0].reason}; give runs that can be read")
    target = options.output or Path(f"{paths[0].resolve().name}{SUFFIX}")
    texts = _texts(summarise(runs), options, title=", ".join(path.name for path in paths))
    count = bundle([job.run.folder / RECORD for job in runs.jobs], texts, target)
    Screen().print(
        f"{target}: {len(runs.jobs)} run{'s' * (len(runs.jobs) != 1)}, {count} files", markup=False, soft_wrap=True
    )


def _compare(one: Path, other: Path, *, output: Path | None) -> None:
    from offstage.pipeline.report.comparison import compare_runs
    from offstage.pipeline.report.exports import comparison_json
    from offstage.pipeline.report.run_folders import find_one
    from offstage.pipeline.report.terminal import show_comparison

    comparison = compare_runs(find_one(one), find_one(other))
    folder = _folder(one, output)
    _write(folder, {"compare.json": comparison_json(comparison)})
    screen = Screen()
    show_comparison(screen, comparison)
    screen.print(f"\n{folder / 'compare.json'}", markup=False, soft_wrap=True)


def _require_libraries() -> None:
    """Say what to install where the extra is missing, before any record is read."""
    try:
        for name in ("jinja2", "pandas", "plotly", "itables", "scipy"):
            import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"offstage-report needs {error.name}, which isn't installed: pip install 'offstage-pipeline[report]'"
        ) from error


def _folder(path: Path, output: Path | None) -> Path:
    """Return where to write: ``output``, or the folder that ``path`` is or lies in."""
    return output or (path if path.is_dir() else path.parent)


def _write(folder: Path, files: dict[str, str]) -> None:
    with mendable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode("utf-8", "replace").decode("utf-8"))
