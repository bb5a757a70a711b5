"""Say whether the kernels of two git revisions are the same code, up to names and comments.

    python -m scripts.compare_kernels 53eabdb             # that revision against the working tree
    python -m scripts.compare_kernels 53eabdb main --verbose

Compares every `kernel_zoo/**/kernel.py` and every golden file under `tests/golden` that holds
Python or CUDA.

- Python: parsed with `ast`. Docstrings, comments, formatting and the wording of messages are
  dropped. Names that the file binds itself are numbered in the order in which they first occur.
  Names from elsewhere (`tl.load`, `range`) and constants must be equal.
- CUDA: cut into tokens. Comments and white space are dropped. Identifiers are numbered in the same
  way, except C++ keywords and built-in names.

A zoo folder is found again after its key changed. Folders are paired by pattern, shapes, dtype and
target, then by equal code. Exits with 1 if a file differs or has no counterpart.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernel_zoo", "tests/golden")
WORKING_TREE = "working tree"


# -- files of a revision --------------------------------------------------------------------------


def generated_files(revision: str) -> dict[str, str]:
    """Return the text of each generated Python and CUDA file by its path."""
    if revision == WORKING_TREE:
        paths = [str(p.relative_to(ROOT)) for f in FOLDERS for p in (ROOT / f).rglob("*.*")]
        return {p: (ROOT / p).read_text(encoding="utf-8") for p in paths if is_generated(p)}
    paths = git("ls-tree", "-r", "--name-only", revision, *FOLDERS).splitlines()
    paths = [p for p in paths if is_generated(p)]
    request = "".join(f"{revision}:{p}\n" for p in paths)
    command = ["git", "cat-file", "--batch"]
    answer = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, input=request.encode()
    ).stdout
    files = {}
    for path in paths:
        header, _, answer = answer.partition(b"\n")
        size = int(header.split()[-1])
        files[path] = answer[:size].decode("utf-8")
        answer = answer[size + 1 :]
    return files


def is_generated(path: str) -> bool:
    """True for kernel.py files of the zoo and for golden Python and CUDA files."""
    if path.startswith("kernel_zoo/"):
        return path.endswith("/kernel.py")
    golden_file = re.fullmatch(r"tests/golden/\w+/[^/]+", path)  # the folder itself holds the tests
    return golden_file is not None and path.endswith((".py", ".cu"))


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


# -- Python ---------------------------------------------------------------------------------------


def python_normal_form(text: str) -> str:
    """Return the code of a Python file without its own names, docstrings, comments and messages."""
    tree = ast.parse(text)
    _drop_docstrings(tree)
    _drop_messages(tree)
    _drop_unused_imports(tree)
    module_names = _Numbering("G")
    for node in tree.body:
        for name in _bound_at_module_level(node):
            module_names.add(name)
    jit_parameters = _jit_parameters(tree)
    for node in tree.body:
        local_names = _Numbering("L")
        if isinstance(node, ast.FunctionDef):
            for name in _bound_in_function(node):
                local_names.add(name)
        _Renamer(local_names, module_names, jit_parameters).visit(node)
    return ast.unparse(ast.fix_missing_locations(tree))


class _Numbering:
    """Numbers names in the order in which they are first used."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._known: set[str] = set()
        self._numbered: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def add(self, name: str) -> None:
        """Add a name that is numbered."""
        self._known.add(name)

    def __call__(self, name: str) -> str:
        return self._numbered.setdefault(name, f"{self._prefix}{len(self._numbered)}")


class _Renamer(ast.NodeTransformer):
    """Replaces names that the file binds by numbered ones."""

    def __init__(self, local: _Numbering, module: _Numbering, jit_parameters: set[str]) -> None:
        self._local, self._module, self._jit_parameters = local, module, jit_parameters

    def _new(self, name: str) -> str:
        if name in self._local:
            return self._local(name)
        return self._module(name) if name in self._module else name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._new(node.arg)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._new(node.name)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg in self._jit_parameters:
            node.arg = f"jit_parameter_{sorted(self._jit_parameters).index(node.arg)}"
        return self.generic_visit(node)


def _jit_parameters(tree: ast.Module) -> set[str]:
    """Return the names of `tl.constexpr` parameters, which launches pass by keyword."""
    return {
        a.arg
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef)
        for a in f.args.args
        if a.annotation is not None and ast.unparse(a.annotation) == "tl.constexpr"
    }


def _bound_at_module_level(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return [
            n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
    return []


def _bound_in_function(function: ast.FunctionDef) -> list[str]:
    names = []
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.FunctionDef) and node is not function:
            names.append(node.name)
    return names


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node, False):
            node.body = node.body[1:] or [ast.Pass()]


def _drop_messages(tree: ast.Module) -> None:
    """Drop the words of printed and raised messages, not the values in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.msg is not None:
            node.msg = ast.Constant("")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "SystemExit"):
            node.args = [_without_words(x) for x in node.args]


def _without_words(x: ast.expr) -> ast.expr:
    if isinstance(x, ast.JoinedStr):
        return ast.JoinedStr([v for v in x.values if isinstance(v, ast.FormattedValue)])
    return ast.Constant("") if isinstance(x, ast.Constant) else x


def _drop_unused_imports(tree: ast.Module) -> None:
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                body[:] = [x for x in body if not _is_unused_import(x, used)] or body[:1]


def _is_unused_import(node: ast.stmt, used: set[str]) -> bool:
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    return not any((a.asname or a.name).split(".")[0] in used for a in node.names)


# -- CUDA -----------------------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\.?\d(?:[eE][+-]|[\w.])*'
    r"|<<<|>>>|::|->|[-+*/%&|^<>=!]=|&&|\|\||<<|>>|\S"
)
_KEPT = frozenset(
    """
    alignas asm auto bool break case char class const constexpr continue default define do
    double else endif enum extern false float for if ifdef ifndef include inline int long
    namespace operator pragma reinterpret_cast return short signed sizeof static static_cast
    struct switch template true typedef typename union unroll unsigned using void volatile
    while blockIdx blockDim threadIdx gridDim x y z
    """.split()
)


def cuda_normal_form(text: str) -> str:
    """Return the tokens of a CUDA file, one a line, with its identifiers numbered."""
    numbered: dict[str, str] = {}
    tokens = []
    for token in _TOKEN.findall(_COMMENT.sub(" ", text)):
        is_identifier = re.fullmatch(r"[A-Za-z_]\w*", token) is not None
        if is_identifier and token not in _KEPT and not token.startswith("__"):
            token = numbered.setdefault(token, f"i{len(numbered)}")
        tokens.append(token)
    return "\n".join(tokens)


# -- comparison -----------------------------------------------------------------------------------


def normal_form(path: str, text: str) -> str:
    """Return the text that must be equal in both revisions."""
    return cuda_normal_form(text) if path.endswith(".cu") else python_normal_form(text)


def stable_name(path: str) -> str:
    """Return the path without the eight digits of a zoo key."""
    return re.sub(r"-[0-9a-f]{8}(?=/)", "", path)


def compare(old: Mapping[str, str], new: Mapping[str, str], verbose: bool) -> list[str]:
    """Return a line for each file that differs or has no counterpart."""
    differences = []
    by_name: defaultdict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, files in enumerate((old, new)):
        for path in files:
            by_name[stable_name(path)][side].append(path)
    for olds, news in by_name.values():
        remaining = {path: normal_form(path, new[path]) for path in news}
        for path in olds:
            wanted = normal_form(path, old[path])
            equal = [p for p, form in remaining.items() if form == wanted]
            if equal:
                remaining.pop(path if path in equal else equal[0])
                continue
            differences.append(f"{path}: differs")
            other = path if path in remaining else next(iter(remaining), None)
            if verbose and other is not None:
                lines = wanted.splitlines(), remaining[other].splitlines()
                differences += difflib.unified_diff(*lines, path, other, lineterm="", n=2)
        if len(news) != len(olds):
            differences.append(f"{(olds or news)[0]}: {len(olds)} files became {len(news)}")
    return differences


def main() -> None:
    """Compare two revisions. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="the earlier git revision")
    parser.add_argument("new", nargs="?", default=WORKING_TREE, help="default: the working tree")
    parser.add_argument("--verbose", action="store_true", help="show how normal forms differ")
    args = parser.parse_args()
    old, new = generated_files(args.old), generated_files(args.new)
    differences = compare(old, new, args.verbose)
    for line in differences:
        print(line)
    count = sum(line.endswith((": differs",)) or " files became " in line for line in differences)
    python, cuda = (sum(p.endswith(kind) for p in new) for kind in (".py", ".cu"))
    kinds = f"{python} Python and {cuda} CUDA files"
    if count:
        print(f"{count} differences in {kinds} ({args.old} to {args.new})")
        sys.exit(1)
    print(
        f"{kinds} are identical except for renamed identifiers and comments ({args.old} to "
        f"{args.new})"
    )


if __name__ == "__main__":
    main()
