"""README and docs.

Every code block runs, every table and chart is up to date, every link leads somewhere.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mirage_hf as mi
from mirage_hf.cli.main import app
from mirage_hf.tune import correction
from scripts import report

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = ROOT / "tests" / "assets" / "tiny_llama"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
#: Names in pages, and what stands for them on a machine without the checkpoint or without a GPU.
STAND_INS = {
    '"Qwen/Qwen3-0.6B"': repr(str(TINY_LLAMA)),
    '"meta-llama/Llama-3.1-8B"': repr(str(TINY_LLAMA)),
    '"meta-llama/Llama-3.2-1B"': repr(str(TINY_LLAMA)),
    '"tests/assets/tiny_llama"': repr(str(TINY_LLAMA)),
}
if not torch.cuda.is_available():
    STAND_INS |= {'"cuda"': '"cpu"', "torch.bfloat16": "torch.float32"}


#: Pages whose code needs a library that `make formats` installs.
NEED = {"quantized.md": "torchao"}


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page."""

    page: Path
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"


def code_blocks(language: str) -> list[CodeBlock]:
    """Return every block in a language, in the order of the pages."""
    return [
        CodeBlock(page, number, found[1], found[2])
        for page in PAGES
        for number, found in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")), 1)
        if found[1] == language
    ]


def test_pages_have_code():
    assert len(code_blocks("python")) >= 10


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """Return the names that short examples use without making them.

    They are a model, its tokenizer and inputs.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    return {
        "name": str(TINY_LLAMA),
        "tokenizer": tokenizer,
        "inputs": tokenizer("The ", return_tensors="pt"),
        "load": lambda: AutoModelForCausalLM.from_pretrained(TINY_LLAMA),
        "AutoModelForCausalLM": AutoModelForCausalLM,
    }


@pytest.mark.parametrize(
    "page", {str(b.page): b.page for b in code_blocks("python")}.values(), ids=lambda p: p.name
)
def test_python_of_a_page_runs_from_top_to_bottom(page, namespace, tmp_path, monkeypatch):
    if page.name in NEED:
        pytest.importorskip(NEED[page.name])
    monkeypatch.chdir(tmp_path)
    names = dict(namespace, model=namespace["load"]())
    names |= {
        "x_tensor": torch.randn(16, 1024).half(),
        "gamma_tensor": torch.randn(1, 1024).half(),
        "w_tensor": torch.randn(1024, 512).half(),
    }
    from mirage_hf.patterns import decoder_layer

    monkeypatch.setattr(decoder_layer, "LAYOUTS", decoder_layer.LAYOUTS)
    for block in (b for b in code_blocks("python") if b.page == page):
        text = block.text
        for old, new in STAND_INS.items():
            text = text.replace(old, new)
        exec(compile(text, str(block), "exec"), names)


@pytest.mark.parametrize("block", code_blocks("json"), ids=str)
def test_json_of_a_page_is_a_program(block, tmp_path):
    path = tmp_path / "program.json"
    path.write_text(block.text, encoding="utf-8")
    graph = mi.load_graph(path)
    assert [op.name for op in graph.ops] == [
        node["op"] for node in json.loads(block.text)["nodes"] if node["op"] != "input"
    ]


def commands() -> list[str]:
    """Return every mirage-hf command line of the pages."""
    lines = [line for b in code_blocks("bash") for line in b.text.splitlines()]
    return sorted({line.split("#")[0].strip() for line in lines if line.startswith("mirage-hf")})


@pytest.mark.parametrize("line", commands())
def test_commands_of_a_page_exist_with_their_options(line):
    words = shlex.split(line)[1:]
    names = [w for w in words if re.fullmatch("[a-z]+", w)]
    depth = 2 if names[0] == "zoo" else 1
    text = CliRunner().invoke(app, [*names[:depth], "--help"], env={"COLUMNS": "200"})
    assert text.exit_code == 0, line
    for option in (w for w in words if w.startswith("--")):
        assert option in text.output, f"{line}: {option} is no option of this command"


def test_tables_and_charts_are_up_to_date():
    assert report.stale(report.read_results()) == [], "run `make report`"


def test_a_changed_number_makes_tables_and_charts_stale():
    from dataclasses import replace

    results = [
        replace(r, value=2 * r.value) if (r.peer, r.batch, r.context) == ("ours", 1, "128") else r
        for r in report.read_results()
    ]
    stale = report.stale(results)
    assert "README.md" in stale and "docs/benchmarks/one-sequence.svg" in stale


def test_every_raw_file_has_rows_and_every_row_its_raw_file():
    cited = {r.source for r in report.read_results()}
    kept = {f.name for f in report.RAW.glob("*.json")} - {"2026-11-21-mutation.json"}
    failed = {"2026-11-23-generate-llama-3.1-8b-batch-16-static.json"}
    fitted = set(json.loads(correction.WEIGHTS.read_text())["fitted_to"]["files"])
    assert kept - failed - fitted <= cited and cited | fitted <= kept


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and myst make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_headings(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        of_page = page.parent / target if target else page
        assert anchor in anchors(of_page), f"{page.name} links to {target}#{anchor}"
