"""The import graph: stages import earlier stages only, and there are no circles.

Imports inside functions and under TYPE_CHECKING count like any others. The order of stages is read
from the import-linter contract in pyproject.toml, so there is one list of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mirage_hf"

#: Folders that become packages of mirage_hf when it is installed.
INSTALLED = {ROOT / "mirage_hf": PACKAGE, ROOT / "patterns": f"{PACKAGE}.patterns"}

#: The compiled module, which imports nothing.
CORE = f"{PACKAGE}._core"

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the file of every module, by the name under which it is installed."""
    files = {}
    for folder, name in INSTALLED.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            is_link = any((folder / Path(*parts[:n])).is_symlink() for n in range(1, len(parts)))
            if is_link or "kernel_zoo" in parts:  # the zoo's files are data
                continue
            files[".".join([name, *(p for p in parts if p != "__init__")])] = path
    return files


def imported(path: Path, name: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Iterate over the modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for found in names:
            while found and found not in known:  # a name inside of a module
                found = found.rpartition(".")[0]
            if found and found != name:
                yield found


def import_graph() -> dict[str, set[str]]:
    """Return what each module imports."""
    known = modules()
    graph = {name: set(imported(path, name, {**known, CORE: path})) for name, path in known.items()}
    return {name: targets - {CORE} for name, targets in graph.items()}


def room(module: str) -> str:
    """Return the folder of a module.

    A file directly in the package counts as a folder of its own.
    """
    return ".".join(module.split(".")[:2])


def rooms(graph: Graph) -> dict[str, set[str]]:
    """Return the folders that the files of each folder import."""
    between: dict[str, set[str]] = {room(name): set() for name in graph}
    for name, targets in graph.items():
        between[room(name)] |= {room(t) for t in targets} - {room(name)}
    return between


def circles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def contracts() -> dict[str, dict[str, Any]]:
    """Return the import-linter contracts, by id."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return {c["id"]: c for c in tomllib.loads(text)["tool"]["importlinter"]["contracts"]}


def layers() -> dict[str, float]:
    """Return the layer of each folder. The lowest is 0."""
    listed = contracts()["stages"]["layers"]
    return {
        name: number
        for number, layer in enumerate(reversed(listed))
        for name in re.split(r"\s*[:|]\s*", layer)
    }


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph()


def test_no_circle_among_files(graph: Graph) -> None:
    assert not circles(graph)


def test_no_circle_among_rooms(graph: Graph) -> None:
    assert not circles(rooms(graph))


def test_every_module_is_in_a_layer(graph: Graph) -> None:
    known = layers()
    assert not {room(name) for name in graph} - {PACKAGE} - set(known)
    assert not set(known) - {room(name) for name in graph}


def test_a_stage_imports_earlier_stages_only(graph: Graph) -> None:
    known = layers()
    # The package itself imports all stages. Only the command line, the last one, imports it.
    known[f"{PACKAGE}.cli"] += 1
    known[PACKAGE] = known[f"{PACKAGE}.cli"] - 0.5
    wrong = [
        f"{name} imports {target}"
        for name, targets in sorted(graph.items())
        for target in sorted(targets)
        if room(name) != room(target) and known[room(target)] >= known[room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_patterns_import_graphs_and_ops_only(graph: Graph) -> None:
    allowed = {f"{PACKAGE}.{name}" for name in ("patterns", "graph", "ops", "errors")}
    wrong = [
        f"{name} imports {target}"
        for name, targets in sorted(graph.items())
        if room(name) == f"{PACKAGE}.patterns"
        for target in sorted(targets)
        if room(target) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_linter_knows_no_exceptions() -> None:
    """The compiled module is the only exception: the linter takes it for the whole package."""
    ignored = [line for c in contracts().values() for line in c.get("ignore_imports", [])]
    assert ignored == [f"{PACKAGE}.search.* -> {PACKAGE}"]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_imports_in_functions_and_for_types_count(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from p.a import A\n"
        "def f():\n    from p import b\n    import p.c.name\n"
    )
    known = {name: file for name in ("p", "p.a", "p.b", "p.c", "p.m")}
    assert sorted(imported(file, "p.m", known)) == ["p.a", "p.b", "p.c"]
