"""The command `mirage-hf`, outside of the package, so that it runs if the package does not.

If `mirage_hf` cannot be imported, every command says why in a line, and `mirage-hf doctor` names
the requirements that are missing. This needs only the standard library.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata

PACKAGE = "mirage_hf"

#: How a finding is marked: works, works with a limit, does not work.
OK, LIMIT, PROBLEM = "ok", "limit", "problem"


@dataclass(frozen=True)
class Finding:
    """What `mirage-hf doctor` says about one thing.

    Attributes:
        status: OK, LIMIT or PROBLEM.
        name: The thing.
        text: What was found.
        way_out: What to do about it. Empty if nothing has to be done.
    """

    status: str
    name: str
    text: str
    way_out: str = ""

    def __str__(self) -> str:
        """Return the finding as a line, and the way out as a second one."""
        way_out = f"\n{'':<10}{'':<22}-> {self.way_out}" if self.way_out else ""
        return f"{self.status:<10}{self.name:<22}{self.text}{way_out}"


def requirements(extra: str = "") -> list[Finding]:
    """Return a finding for each requirement of the package, or of one of its extras.

    A requirement of an extra that is missing or of another version is a limit, not a problem.
    """
    try:
        declared = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        way_out = "install it with pip, also in a checkout: pip install ."
        return [Finding(PROBLEM, PACKAGE, "is not installed, only its files are here", way_out)]
    try:
        from packaging.requirements import Requirement
    except ImportError:  # transformers requires it
        way_out = "pip install transformers"
        return [Finding(PROBLEM, "packaging", "is not installed", way_out)]
    found = []
    for requirement in map(Requirement, declared):
        marker = requirement.marker
        is_of_extra = marker is not None and not marker.evaluate({"extra": ""})
        if is_of_extra != bool(extra):
            continue
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        found.append(_of_requirement(requirement.name, requirement.specifier, extra))
    return found


def _of_requirement(name: str, wanted: object, extra: str) -> Finding:
    bad = LIMIT if extra else PROBLEM
    way_out = f"pip install '{PACKAGE}[{extra}]'" if extra else f"pip install '{name}{wanted}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(bad, name, f"is not installed, wanted {wanted}", way_out)
    if not wanted.contains(version, prereleases=True):  # type: ignore[attr-defined]
        return Finding(bad, name, f"{version}, wanted {wanted}", way_out)
    return Finding(OK, name, version)


def main() -> None:
    """Run the command line."""
    try:
        from mirage_hf.cli.main import app
    except (ImportError, OSError) as error:  # OSError: a library of torch that cannot be loaded
        sys.exit(_without_the_package(error, sys.argv[1:]))
    app()


def _without_the_package(error: BaseException, arguments: list[str]) -> int:
    """Say why the package cannot be imported. Return the exit code."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    text = f"{PACKAGE} cannot be imported ({reason})"
    if arguments[:1] != ["doctor"]:
        print(f"error: {text}; `mirage-hf doctor` says what is missing", file=sys.stderr)
        return 1
    way_out = "repair what is named here, then run `mirage-hf doctor` again"
    if f"{PACKAGE}._core" in reason or "_core" in (getattr(error, "name", None) or ""):
        way_out = "its C++ core was not built: install a wheel, or pip install . with g++ >= 10"
    for finding in (*requirements(), Finding(PROBLEM, PACKAGE, text, way_out)):
        print(finding)
    return 1
