"""Options and fixtures of all tests."""

from __future__ import annotations

import difflib
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.thorough import THOROUGH

HERE = Path(__file__).parent

#: A test process may keep this much GPU memory for the next test.
KEPT_BYTES = 1 << 30

# Tests run in several processes. Threads of one process would wait for those of another.
torch.set_num_threads(1)

# A test must not read results of earlier runs or of the user's own work.
os.environ.setdefault("MIRAGE_HF_CACHE", tempfile.mkdtemp(prefix="mirage_hf_tests_"))
# The same holds for what this machine has proven.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="mirage_hf_tests_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what tests/golden compares with, instead of comparing",
    )


#: The files that take longest, in CPU seconds, the longest first. Those of processes that they wait
#: for, such as Triton's interpreter, count. They start first when several processes share the work,
#: so that no long one is left at the end.
LONGEST = (
    "formats/test_kernels.py",
    "decode/test_traced_steps.py",
    "codegen/test_coded_mutants.py",
    "codegen/test_append.py",
    "patterns/test_attention.py",
    "decode/test_traced_drafts.py",
    "decode/test_drafts.py",
    "decode/test_encoder_drafts.py",
    "docs/test_pages.py",
    "codegen/test_coded.py",
    "swap/test_traced.py",
    "api/test_background.py",
    "formats/test_random_linears.py",
    "codegen/test_cuda_on_cpu.py",
    "decode/test_step_forms.py",
    "decode/test_step.py",
    "decode/test_prefill_by_kernels.py",
    "scripts/test_bench_generate.py",
    "pipeline/test_windows.py",
    "patterns/test_mla.py",
    "decode/test_encoder_decoder.py",
    "api/test_optimize.py",
    "pipeline/test_searching_ahead.py",
    "swap/test_lora.py",
    "api/test_searched.py",
    "search/test_clusters.py",
    "patterns/test_lora_kernels.py",
    "search/test_search.py",
    "pipeline/test_background.py",
    "decode/test_generate.py",
    "pipeline/test_superoptimizer.py",
    "decode/test_generate_life.py",
    "codegen/test_ragged.py",
    "codegen/test_rope.py",
    "codegen/test_triton.py",
    "cli/test_cli.py",
    "decode/test_coded_models.py",
    "decode/test_sampling.py",
    "pipeline/test_kernels.py",
    "codegen/test_cuda.py",
    "scripts/test_soak.py",
    "scripts/test_bench_first_use.py",
    "decode/test_deepseek.py",
    "decode/test_rings.py",
    "decode/test_routers.py",
    "decode/test_prefill_early.py",
    "decode/test_coded_changes.py",
    "pipeline/test_symbolic.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # else xdist begins with the most tests
    runs_no_tests = bool(getattr(config.option, "numprocesses", None))  # its workers do
    if not runs_no_tests:  # in pyproject.toml, it would import mirage_hf in that process too
        config.addinivalue_line("filterwarnings", "error::mirage_hf.errors.OptimizeWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if "thorough" in item.keywords and not THOROUGH]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if "thorough" not in item.keywords or THOROUGH]
    place = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.relative_to(HERE).as_posix(), len(place)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda.is_available() is False")
            )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collect no garbage while modules are imported, because they leave little of it.

    A process that only hands tests to others collects none of them.
    """
    config = session.config
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        gc.disable()


def pytest_collection_finish() -> None:
    """Leave modules out of garbage collections: torch and transformers are 700,000 objects."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leave_gpu_usable() -> Iterator[None]:
    """Leave the next test a GPU that works and has memory, because several processes share one."""
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # a fault stays in its process, and would fail all tests that follow
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # pytest-xdist reports this test, and begins a new process
        raise
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        gc.collect()
        torch.cuda.empty_cache()


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
            f"{name} changed; if that is meant, use --update-golden and look at the "
            f"diff:\n{diff[:4000]}"
        )

    return compare


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Replace the resolver by one whose kernels are the programs themselves.

    Yields:
        The list of programs that were resolved.
    """
    from mirage_hf.pipeline import resolver
    from tests.helpers import tiny_models

    asked: list[Any] = []

    def resolve(program: Any, **_: Any) -> tiny_models.Resolved:
        asked.append(program)
        return tiny_models.Resolved(program)

    monkeypatch.setattr(resolver, "resolve", resolve)
    yield asked


@pytest.fixture
def remembered_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove and check each µGraph once in this process (tests/helpers/remembered_verdicts.py)."""
    from tests.helpers.remembered_verdicts import remember

    remember(monkeypatch)
