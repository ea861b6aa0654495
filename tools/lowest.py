"""Make a venv with the lowest versions that pyproject.toml admits: each ``name>=version`` installed as ``==version``.

Run by ``make test-lowest``. Development tools stay at the versions of constraints.txt, since nobody depends on them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lowest(requirement: str) -> str:
    """The requirement at its lowest version."""
    found = re.fullmatch(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*>=\s*([0-9.]+).*", requirement)
    if found is None:
        raise SystemExit(f"pyproject.toml: {requirement!r} names no lowest version (name>=version)")
    return f"{found[1]}{found[2] or ''}=={found[3]}"


def main(venv: str) -> None:
    """Make the venv and install into it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [lowest(r) for r in (*project["dependencies"], *project["optional-dependencies"]["embedded"])]
    tools = [
        r
        for r in project["optional-dependencies"]["dev"]
        if re.split(r"[>=\[]", r)[0] in ("pytest", "hypothesis", "mypy", "pyyaml")
    ]
    pip = [f"{venv}/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    subprocess.run([*pip, *wanted, *tools], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    subprocess.run([*pip[:-3], "list"], check=False)


if __name__ == "__main__":
    main(sys.argv[1])
