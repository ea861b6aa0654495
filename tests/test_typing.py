"""The public types, as pyright sees them in its strict mode; ``test_tasks`` asks mypy the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import taskq

CORPUS = Path(__file__).parent / "typing"


def test_pyright_finds_every_line_that_is_wrong_and_no_other(tmp_path: Path) -> None:
    project = tmp_path / "pyrightconfig.json"
    config = {"include": [str(CORPUS)], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    project.write_text(json.dumps(config | {"extraPaths": [str(Path(taskq.__file__).parents[1])]}))
    ran = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(project), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
        timeout=300,
        check=False,
    )
    report = json.loads(ran.stdout)
    assert report["summary"]["filesAnalyzed"] == len(list(CORPUS.glob("*.py")))
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    }
    expected = {
        (page.name, number)
        for page in CORPUS.glob("*.py")
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if "# E: " in line
    }
    assert len(expected) > 80
    assert found == expected, ran.stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files("taskq").joinpath("py.typed").is_file()
