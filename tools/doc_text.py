"""Markdown from docstrings: tables, first sentences, and the sections of a Google-style docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_HEAD = re.compile(r"^(Args|Attributes|Returns|Raises):$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Doc:
    """A docstring taken apart.

    Attributes:
        text: The paragraphs before the first section, in Markdown.
        args: What ``Args`` or ``Attributes`` says, by name.
        returns: What ``Returns`` says; empty if it says nothing.
        raises: What ``Raises`` says, by exception.
    """

    text: str
    args: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)


def parse(docstring: str | None) -> Doc:
    """Take a Google-style docstring apart."""
    text, *rest = _HEAD.split(inspect.cleandoc(docstring or ""))
    paragraphs = [plain(paragraph) for paragraph in text.strip().split("\n\n")]
    parts = dict(zip(rest[::2], rest[1::2], strict=True))
    return Doc(
        "\n\n".join(paragraphs),
        _entries(parts.get("Args", parts.get("Attributes", ""))),
        plain(parts.get("Returns", "")),
        _entries(parts.get("Raises", "")),
    )


def _entries(text: str) -> dict[str, str]:
    found = re.findall(r"^    ([*\w.]+): (.*?)(?=^    \S|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name.lstrip("*"): plain(about) for name, about in found}


def plain(text: str) -> str:
    """A paragraph on one line, with its code in Markdown's way."""
    return " ".join(text.split()).replace("``", "`")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def first_sentence(text: str | None) -> str:
    """The first paragraph of a docstring, cut after its first sentence, in Markdown."""
    return re.sub(r"(?<=[^.])\.\s.*", ".", plain(inspect.cleandoc(text or "").split("\n\n")[0]))


def code(value: object) -> str:
    """As code, or a dash for nothing."""
    return "-" if value is None else f"`{value}`"
