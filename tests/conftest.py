"""Options and fixtures of all tests."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
torch.set_num_threads(
    1
)  # tests run in several processes; threads of one would wait for those of another
sys.path.insert(0, str(HERE))  # programs.py and ugraphs.py are imported by tests of several folders
from thorough import THOROUGH  # noqa: E402

# results of earlier runs, and of the user's own work, are no part of a test
os.environ.setdefault("MIRAGE_HF_CACHE", tempfile.mkdtemp(prefix="mirage_hf_tests_"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what tests/golden compares with, instead of comparing",
    )


LONGEST = (
    "test_fusable_dags",
    "test_windows",
    "test_superoptimizer",
    "test_searched",
    "test_attention",
    "test_codegen_random",
    "test_append",
    "test_step",
    "test_traced",
    "test_kernels",
    "test_optimize",
    "test_cli",
    "test_search",
    "test_oracle",
)
"""Files that begin first where several processes take one file after the other, so that none is left at the end."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if "thorough" in item.keywords and not THOROUGH]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if "thorough" not in item.keywords or THOROUGH]
    place = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda.is_available() is False")
            )


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare a text with a file of tests/golden/, or write it there with --update-golden."""

    def compare(name: str, text: str) -> None:
        path = HERE / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), (
            f"{name} has no golden file; write it with --update-golden and look at it"
        )
        want = path.read_text(encoding="utf-8")
        diff = "\n".join(
            difflib.unified_diff(want.splitlines(), text.splitlines(), "golden", "now", lineterm="")
        )
        assert text == want, (
            f"{name} changed; if that is meant, use --update-golden and look at the diff:\n{diff[:4000]}"
        )

    return compare
