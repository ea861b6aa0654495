"""The migration files: finding, checking, freezing and rendering them. Knows nothing of any database.

A folder holds ``VV.VV.VV_NN_{pre|post}_name.sql``; the manifest beside it holds one line ``<sha256>  <filename>`` for
each file that is frozen, in the order of the names. The template is hashed, before the schema's name is filled in.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from taskq.errors import MigrationChanged, MigrationError, MigrationMissing, MigrationReordered, MigrationUnknown
from taskq.settings import check_schema

Kind = Literal["pre", "post"]

MANIFEST = "released_migrations.sha256"
_FILENAME = re.compile(r"(\d\d\.\d\d\.\d\d)_(\d\d)_(pre|post)_([a-z0-9]+(?:_[a-z0-9]+)*)\.sql")
_PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_NO_TRANSACTION = re.compile(r"^-- taskq: no-transaction[ \t]*$", re.MULTILINE)
_NEXT = re.compile(r"^-- taskq: next[ \t]*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^-- taskq:(.*)$", re.MULTILINE)
_TRANSACTION_CONTROL = re.compile(r"^(?:begin|commit|rollback|start\s+transaction)\s*;", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration file, as it stands in the folder."""

    filename: str
    version: str
    """The release that brings it, ``VV.VV.VV``."""
    kind: Kind
    template: str
    sha256: str
    """Hash of the file's bytes, in hexadecimal."""
    transactional: bool
    """False for a file whose header says ``-- taskq: no-transaction``."""

    def render(self, schema: str) -> str:
        """The SQL with the schema's name filled in."""
        return _PLACEHOLDER.sub(check_schema(schema), self.template)

    def statements(self, schema: str) -> list[str]:
        """What is sent at a time: the whole file, or, outside a transaction, each part between ``-- taskq: next``."""
        text = self.render(schema)
        parts = [text] if self.transactional else _NEXT.split(text)
        return [part.strip() for part in parts if strip_comments(part).strip()]


def strip_comments(text: str) -> str:
    """Drop whole-line comments; enough to tell what a statement begins with."""
    return re.sub(r"^\s*--.*$", "", text, flags=re.MULTILINE)


def code_version() -> str:
    """The installed version of taskq, or ``unknown`` when it is not installed as a package."""
    try:
        return version("taskq")
    except PackageNotFoundError:
        return "unknown"


def default_folder() -> Path:
    """Where the files are: inside an installed wheel, else in the source tree beside the package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_migrations", package.parent / "migrations"):
        if folder.is_dir():
            return folder
    raise MigrationMissing("taskq's migration files are not in this installation; it is damaged: install taskq again")


def manifest_path(folder: Path) -> Path:
    """The manifest inside the folder (a wheel), else beside it (the source tree)."""
    inside = folder / MANIFEST
    return inside if inside.exists() else folder.parent / MANIFEST


def read_folder(folder: Path | None = None) -> list[Migration]:
    """Read and parse all files in order of their names, without regard to the manifest.

    Raises:
        MigrationError: a name, placeholder or directive is wrong, or two files have one number.
    """
    folder = folder or default_folder()
    migrations = [_read(path) for path in sorted(folder.glob("*.sql"))]
    for earlier, later in itertools.pairwise(migrations):
        if earlier.filename[:11] == later.filename[:11]:
            raise MigrationReordered(
                f"{earlier.filename} and {later.filename} have the same number, so their order is in doubt; "
                "give the newer one the next number"
            )
    return migrations


def _read(path: Path) -> Migration:
    return _parsed(path.name, path.read_bytes())


@lru_cache(maxsize=128)  # every worker and client of a process reads the same files at its boot
def _parsed(filename: str, data: bytes) -> Migration:
    match = _FILENAME.fullmatch(filename)
    if match is None:
        raise MigrationUnknown(
            f"{filename} is not named VV.VV.VV_NN_pre_name.sql or VV.VV.VV_NN_post_name.sql; rename it, or move it "
            "out of the migrations folder"
        )
    text = data.decode("utf-8")
    for found in _PLACEHOLDER.finditer(text):
        if found[1] != "schema":
            line = text.count("\n", 0, found.start()) + 1
            raise MigrationError(
                f"{filename}, line {line}: {{{{{found[1][:40]}}}}} is not a placeholder; only {{{{schema}}}} is"
            )
    transactional = _NO_TRANSACTION.search(text) is None
    for directive in _DIRECTIVE.findall(text):
        allowed = {"no-transaction"} | (set() if transactional else {"next"})
        if directive.strip() not in allowed:
            raise MigrationError(
                f"{filename}: the directive '-- taskq:{directive}' is not known here; a file may say "
                "'-- taskq: no-transaction' and then, between its statements, '-- taskq: next'"
            )
    if _TRANSACTION_CONTROL.search(text):
        raise MigrationError(f"{filename} controls the transaction itself; the runner does that: take the line out")
    kind: Kind = "pre" if match[3] == "pre" else "post"
    return Migration(filename, match[1], kind, text, hashlib.sha256(data).hexdigest(), transactional)


def read_manifest(folder: Path | None = None) -> dict[str, str]:
    """The frozen files, name to SHA-256, in the manifest's order.

    Raises:
        MigrationMissing: there is no manifest.
        MigrationReordered: its lines are not in the order of the names.
    """
    path = manifest_path(folder or default_folder())
    if not path.is_file():
        raise MigrationMissing(f"{MANIFEST} is missing beside the migrations; restore it, or install taskq again")
    frozen: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)", line)
        if match is None or match[2] in frozen:
            raise MigrationError(f"{MANIFEST}, line {number}, is not '<sha256>  <filename>' of a new file; restore it")
        frozen[match[2]] = match[1]
    if list(frozen) != sorted(frozen):
        late = next(b for a, b in zip(frozen, list(frozen)[1:], strict=False) if b < a)
        raise MigrationReordered(f"{MANIFEST}: {late} was frozen after files that come after it; give it a later name")
    return frozen


def discrepancies(folder: Path | None = None) -> list[MigrationError]:
    """Everything in which folder and manifest differ, in the order of the names; empty when all is well."""
    found: list[MigrationError] = []
    files = {m.filename: m for m in read_folder(folder)}
    frozen = read_manifest(folder)
    for name in sorted({*files, *frozen}):
        if name not in files:
            found.append(MigrationMissing(f"{name} is frozen but missing; restore the file"))
        elif name not in frozen:
            found.append(
                MigrationUnknown(
                    f"{name} is not in {MANIFEST}, so nobody vouches for it; freeze it with "
                    "'python -m taskq.migrate freeze', or take it away"
                )
            )
        elif files[name].sha256 != frozen[name]:
            found.append(
                MigrationChanged(f"{name} differs from what was frozen; restore it and put the change in a new file")
            )
    return found


def load_migrations(folder: Path | None = None) -> list[Migration]:
    """All migrations in order, each agreeing with the manifest.

    Raises:
        MigrationError: the subclass of the first discrepancy between folder and manifest.
    """
    if found := discrepancies(folder):
        raise found[0]
    return read_folder(folder)


def freeze(folder: Path | None = None, *, rewrite: bool = False) -> list[str]:
    """Append the files that are not yet frozen to the manifest, and return their names.

    Args:
        folder: the migrations folder.
        rewrite: write the manifest anew from the folder. Only before 0.1.0, which nobody has deployed.

    Raises:
        MigrationError: a frozen file is changed or missing, or a new file sorts before a frozen one.
    """
    folder = folder or default_folder()
    files = read_folder(folder)
    path = manifest_path(folder)
    if rewrite:
        if not re.match(r"0\.(0\.|1\.0\.?(dev|a|b|rc))", code_version()):
            raise MigrationError("released migrations are frozen for good; put the change in a new file")
        frozen: dict[str, str] = {}
    else:
        frozen = read_manifest(folder) if path.is_file() else {}
        for problem in discrepancies(folder) if path.is_file() else []:
            if not isinstance(problem, MigrationUnknown):
                raise problem
    new_files = [m for m in files if m.filename not in frozen]
    if frozen and new_files and new_files[0].filename < max(frozen):
        raise MigrationReordered(
            f"{new_files[0].filename} sorts before {max(frozen)}, which is frozen already; give it a later name"
        )
    lines = [f"{digest}  {name}\n" for name, digest in frozen.items()]
    lines += [f"{m.sha256}  {m.filename}\n" for m in new_files]
    path.write_text("".join(lines), encoding="utf-8")
    return [m.filename for m in new_files]


def new(name: str, kind: Kind, *, folder: Path | None = None) -> Path:
    """Write the next migration file, with a header to fill in, and return its path.

    Args:
        name: what it does, in a few words; becomes ``a_few_words``.
        kind: ``pre`` runs before the new code, ``post`` after the old code is gone.
        folder: where to write it; by default the source tree's folder.

    Raises:
        MigrationError: the name has no letters or digits, the kind is wrong, or the numbers are used up.
    """
    folder = folder or default_folder()
    words = "_".join(re.findall(r"[a-z0-9]+", name.lower()))
    if not words or kind not in {"pre", "post"}:
        raise MigrationError("a migration needs a name of letters and digits, and a kind, pre or post")
    existing = read_folder(folder)
    release = re.match(r"(\d+)\.(\d+)\.(\d+)", code_version())
    current = ".".join(f"{int(part):02}" for part in release.groups()) if release else "00.00.00"
    if existing and existing[-1].version > current:
        current = existing[-1].version
    number = 1 + max((int(m.filename[9:11]) for m in existing if m.version == current), default=0)
    if number > 99:
        raise MigrationError(f"release {current} has 99 migrations already; put several changes in one file")
    path = folder / f"{current}_{number:02}_{kind}_{words}.sql"
    path.write_text(_HEADERS[kind].format(title=words.replace("_", " ").capitalize()), encoding="utf-8")
    return path


_HEADERS: dict[Kind, str] = {
    "pre": """\
-- {title}.
-- Runs before the new code, while the old code still works: add, never take away. New constraints are NOT VALID.
-- Must not depend on any post file. Name every object {{{{schema}}}}.name; search_path holds nothing of yours.
-- For statements that cannot run in a transaction, such as CREATE INDEX CONCURRENTLY, use a file of their own.

""",
    "post": """\
-- {title}.
-- Runs once the old code is gone: validate constraints, drop what nothing reads any more.
-- Name every object {{{{schema}}}}.name; search_path holds nothing of yours.

""",
}


def names(migrations: Sequence[Migration]) -> str:
    """Their file names, for a message."""
    return ", ".join(m.filename for m in migrations)
