"""List the longest and the hardest sentences of docs, docstrings and comments.

    python -m scripts.prose [--most 50] [PATH ...]

A report and no gate: it points at sentences that want another look. Length counts words; hardness
is the automated readability index of textstat, which needs no dictionary from the network. Code,
tables and formulas are left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("README.md", "CHANGELOG.md", "docs", "mirage_hf", "patterns", "scripts", "tests")
#: Sentences of at most so many words are never listed.
SHORT = 20
#: Private phrases that a newcomer cannot know; each hit is listed.
RIDDLES = re.compile(
    r"\b(of which|that which|but for|nobody's|of those the|what \w+ of|is told|are told)\b"
)


@dataclass(frozen=True)
class Sentence:
    """One sentence and where it stands."""

    text: str
    path: Path
    line: int

    @property
    def words(self) -> int:
        """How many words it has."""
        return len(re.findall(r"[A-Za-z][\w'’-]*", self.text))

    @property
    def is_riddle(self) -> bool:
        """Whether it uses a phrase of RIDDLES."""
        return RIDDLES.search(self.text) is not None


def sentences(text: str, path: Path, line: int) -> Iterator[Sentence]:
    """Split prose into sentences; a blank line or a list item ends one."""
    for part in re.split(r"\n\s*\n|\n\s*(?=[-*\d]+[.)]?\s)|\n(?=\s*\w+:\s)", text):
        joined = " ".join(part.split())
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-ZµλΣ`\"(])", joined):
            if sentence and not sentence.startswith((">>>", "|", "```")):
                yield Sentence(sentence, path, line)
        line += part.count("\n") + 1


def of_markdown(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a page, without code, tables and generated parts."""
    text = path.read_text(encoding="utf-8")
    for ignored in (r"^```.*?^```", r"<!--.*?-->", r"^(?:\||#|    ).*?$"):
        text = re.sub(ignored, lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    yield from sentences(text, path, 1)


def of_python(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a file's docstrings and comments."""
    source = path.read_text(encoding="utf-8")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield from sentences(without_code(text), path, getattr(node, "lineno", 1))
    for block, line in comment_blocks(source):
        yield from sentences(block, path, line)


def without_code(docstring: str) -> str:
    """Drop examples and indented paragraphs, which are code or formulas."""
    paragraphs = re.split(r"\n[ ]*\n", docstring)
    prose = [p for p in paragraphs if not p.startswith("    ") and ">>> " not in p]
    return "\n\n".join(prose)


def comment_blocks(source: str) -> Iterator[tuple[str, int]]:
    """Yield runs of comment lines, with the line where each begins."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield "\n".join(block), first
            block = []
        first = first if block else line
        block.append(token.string.lstrip("#: "))
        last = line
    if block:
        yield "\n".join(block), first


def collect(paths: list[Path]) -> list[Sentence]:
    """Return the sentences of all files below the paths."""
    found: list[Sentence] = []
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if "_build" in file.parts or "kernel_zoo" in file.parts or "golden" in file.parts:
                continue
            if file.suffix == ".md":
                found += of_markdown(file)
            elif file.suffix == ".py":
                found += of_python(file)
    return found


def grade(sentence: Sentence) -> float:
    """Return the automated readability index, or the number of words without textstat."""
    try:
        import textstat
    except ImportError:
        return float(sentence.words)
    return float(textstat.automated_readability_index(sentence.text))


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders (default: all)")
    parser.add_argument("--most", type=int, default=50, help="sentences of each list (default 50)")
    args = parser.parse_args()
    found = collect([p.resolve() for p in args.paths] or [ROOT / name for name in FOLDERS])
    long = sorted((s for s in found if s.words > SHORT), key=lambda s: -s.words)
    hard = sorted(long, key=grade, reverse=True)
    riddles = [s for s in found if s.is_riddle]
    counted = len(found) or 1
    print(
        f"{len(found)} sentences, {len(long)} of more than {SHORT} words "
        f"({100 * len(long) / counted:.0f}%)"
    )
    for title, listed in (("longest", long), ("hardest", hard), ("riddles", riddles)):
        print(f"\n{title}:")
        for s in listed[: args.most]:
            place = s.path.relative_to(ROOT) if s.path.is_relative_to(ROOT) else s.path
            print(f"  {place}:{s.line} ({s.words} words) {s.text[:240]}")


if __name__ == "__main__":
    sys.exit(main())
