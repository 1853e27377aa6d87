"""The fenced blocks of README and `docs/`, as who runs or checks them wants them. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FOREGROUND = re.compile(r"(Each s|S)tays until Ctrl-C\b")
_BLOCK = re.compile(r"^(?:\*(?P<mark>[^*\n]+):\*\n\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block. `mark` is the line in italics above it, which says how it is to be run, or why it is not."""

    page: Path
    line: int
    language: str
    mark: str | None
    body: str

    @property
    def foreground(self) -> bool:
        """Whether each of its lines runs until it is interrupted."""
        return self.mark is not None and FOREGROUND.match(self.mark) is not None


def blocks(page: Path) -> Iterator[Block]:
    """In order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        yield Block(page, line, match["language"], match["mark"], match["body"])


def fences(page: Path) -> int:
    """How many blocks there are, counted in another way."""
    return len(re.findall(r"^\s*```", page.read_text(encoding="utf-8"), re.M)) // 2
