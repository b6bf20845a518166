"""The workflow runs all the checks, on each Python that it names, and on none that the project doesn't take."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_it_runs_the_checks_on_push_and_pull_request() -> None:
    # YAML 1.1, which this parser and not GitHub's reads, takes the key `on` for true.
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}
    job = workflow["jobs"]["checks"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_a_job_beside_them_runs_tests_that_are_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    words = [word for step in workflow["jobs"]["trackers"]["steps"] for word in step.get("run", "").split()]
    paths = [word for word in words if word.startswith("tests/")]
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_its_oldest_python_is_the_oldest_that_the_project_takes() -> None:
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
