"""Workflows can't be run here: that they are well formed, and that our commands in them parse."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.documentation import ROOT
from tests.support.understanding import understood

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
KERNELS = "kernels.yml"


def jobs(workflow: Path) -> dict[str, Any]:
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content.keys() == {"name", True, "jobs"}  # YAML 1.1 reads "on" as true
    return content["jobs"]


def commands(workflow: Path) -> list[str]:
    steps = [step for job in jobs(workflow).values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_uses_or_runs_something(workflow: Path) -> None:
    for job in jobs(workflow).values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert step.keys() <= {"name", "if", "uses", "with", "run", "timeout-minutes"}
            assert re.fullmatch(r"\S+@v\d+", step.get("uses", "x@v1"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_our_commands_parse(workflow: Path) -> None:
    found = []
    for line in commands(workflow):
        words = shlex.split(line.partition("|")[0])
        if words[:3] == ["python", "-m", "dspine_mlx"]:
            found.append(understood(words[3:]).name)
        elif words[:3] == ["python", "-m", "pytest"]:
            assert (ROOT / words[-1]).exists()
    assert workflow.name != KERNELS or found == ["bench", "bench", "bench", "doctor", "report"]


def test_what_a_mac_finds_is_kept() -> None:
    """Whatever fails before; a pipe into tee hides no failure."""
    (job,) = jobs(ROOT / ".github" / "workflows" / KERNELS).values()
    *_, measured, exact, packed, told, kept = job["steps"]
    assert kept["uses"].startswith("actions/upload-artifact@")
    assert all(
        step["if"] == "${{ !cancelled() }}" for step in (measured, exact, packed, told, kept)
    )
    lines = [line for step in (measured, exact, packed, told) for line in step["run"].splitlines()]
    ours = [line for line in lines if "mlx_lm convert" not in line]
    assert all(f"{kept['with']['path']}/" in line for line in ours)
    assert {"found/rows.json", "found/exact.json", "found/report.md"} <= {
        word for line in lines for word in line.split()
    }
    assert job["defaults"]["run"]["shell"] == "bash"
