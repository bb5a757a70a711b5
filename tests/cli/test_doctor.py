"""`mirage-hf doctor`: each branch of its checks, with the rest of the machine as it is.

GPUs are stand-ins: torch is asked through its own functions, which are replaced here.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import mirage_hf_command as command
from mirage_hf.cli import doctor
from mirage_hf.cli.main import app
from mirage_hf.codegen import cubin_launch
from mirage_hf.errors import CodegenError, Rejected
from mirage_hf.verify.verdict import Accepted
from mirage_hf.zoo.store import Store
from mirage_hf_command import LIMIT, OK, PROBLEM, Finding

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_the_command_ends_with_0_without_problems_and_with_1_with_one(monkeypatch):
    limit = Finding(LIMIT, "GPU", "none", "use another machine")
    for found, code, says in (
        ([Finding(OK, "torch", "2.9")], 0, "optimize() works here\n"),
        ([limit], 0, "-> use another machine\n\noptimize() works here, with the limits above"),
        ([limit, Finding(PROBLEM, "torch", "is missing")], 1, "1 problem: follow the arrows"),
        ([Finding(PROBLEM, "a", "b")] * 2, 1, "2 problems: "),
    ):
        monkeypatch.setattr(doctor, "findings", lambda found=found: iter(found))
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == code and says in result.output, result.output


def test_this_machine_can_run_the_package():
    found = list(doctor.findings())
    assert not [str(f) for f in found if f.status == PROBLEM]
    names = {f.name for f in found}
    assert {"torch", "transformers", "search and proof", "packaged zoo", "cache"} <= names


def test_a_check_that_fails_is_a_problem_and_hides_no_other(monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA driver error\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    found = {f.name: f for f in doctor.findings()}
    assert found["gpus"].text == "could not be checked: RuntimeError: CUDA driver error"
    assert found["packaged zoo"].status == OK


# -- requirements ----------------------------------------------------------------------------------


def installed(monkeypatch, versions, requires=("torch>=2.8", "hqq>=0.2; extra == 'formats'")):
    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(command.metadata, "requires", lambda name: list(requires))
    monkeypatch.setattr(command.metadata, "version", version)


@pytest.mark.parametrize(
    "versions, status, says",
    [
        ({"torch": "2.9.0+cu128"}, OK, "2.9.0+cu128"),
        ({"torch": "2.10.0.dev20260101"}, OK, "2.10.0.dev20260101"),
        ({"torch": "2.7.1"}, PROBLEM, "2.7.1, wanted >=2.8"),
        ({}, PROBLEM, "is not installed, wanted >=2.8"),
    ],
)
def test_a_requirement_is_there_in_a_version_that_fits(monkeypatch, versions, status, says):
    installed(monkeypatch, versions)
    finding = only(command.requirements())
    assert (finding.name, finding.status, finding.text) == ("torch", status, says)
    assert finding.way_out == ("" if status == OK else "pip install 'torch>=2.8'")


def test_an_extra_that_is_missing_is_a_limit_with_its_purpose(monkeypatch):
    installed(monkeypatch, {})
    finding = only([f for f in doctor._extras() if f.name == "hqq"])
    assert finding.status == LIMIT and "quantized checkpoints" in finding.text
    assert finding.way_out == "pip install 'mirage_hf[formats]'"


def test_requirements_that_are_not_for_this_system_do_not_count(monkeypatch):
    installed(monkeypatch, {}, ["winpty; platform_system == 'Nowhere'"])
    assert command.requirements() == [] == command.requirements("formats")


def test_a_package_that_is_not_installed_says_so(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(command.metadata, "requires", requires)
    assert only(command.requirements()).status == PROBLEM


@pytest.mark.parametrize(
    "block, reason",
    [
        ("torch", "No module named 'torch'"),
        pytest.param("mirage_hf._core", "g++", marks=pytest.mark.thorough),
    ],
)
def test_doctor_runs_if_the_package_cannot_be_imported(block, reason):
    code = (
        "import sys\n"
        f"sys.modules[{block!r}] = None\n"
        "import mirage_hf_command\n"
        "sys.argv = ['mirage-hf', *sys.argv[1:]]\n"
        "mirage_hf_command.main()\n"
    )
    if block == "torch":
        code = code.replace(
            "sys.modules['torch'] = None",
            "class Blocked:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name == 'torch': raise ModuleNotFoundError(\"No module named 'torch'\")\n"
            "sys.meta_path.insert(0, Blocked())",
        )

    def run(argument: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", code, argument]
        return subprocess.run(line, cwd=ROOT, text=True, capture_output=True, check=False)

    done = run("doctor")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "cannot be imported" in done.stdout and reason in done.stdout, done.stdout
    assert "transformers" in done.stdout
    done = run("env")
    assert done.returncode == 1 and not done.stdout
    assert "`mirage-hf doctor` says what is missing" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_setting_that_does_not_parse_is_a_problem_and_the_interpreter_a_limit(monkeypatch):
    assert doctor._settings() == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert only(doctor._settings()).status == LIMIT
    monkeypatch.setenv("MIRAGE_HF_THREADS", "many")
    assert "must be an integer" in only(doctor._settings()).text


# -- the GPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "driver, cuda, visible, status, says",
    [
        (False, None, None, LIMIT, "none, so kernels run as torch code"),
        (True, None, None, PROBLEM, "is a build without CUDA"),
        (True, "12.8", "", PROBLEM, "CUDA_VISIBLE_DEVICES is ''"),
        (True, "12.8", None, PROBLEM, "built for CUDA 12.8, sees none"),
    ],
)
def test_without_a_gpu_the_reason_is_said(
    monkeypatch, tmp_path, driver, cuda, visible, status, says
):
    monkeypatch.setenv("PATH", str(tmp_path))
    if driver:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    elif Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = only(doctor._gpus())
    assert finding.status == status and says in finding.text and finding.way_out


@pytest.mark.parametrize(
    "name, capability, free, status, says",
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), 70, OK, "sm_90"),
        ("Tesla T4", (7, 5), 70, PROBLEM, "kernels need sm_80"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 1, LIMIT, "run out of memory"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 70, LIMIT, "no packaged kernels for sm_80"),
        ("NVIDIA Something", (8, 6), 20, LIMIT, "its rates are unknown"),
    ],
)
def test_a_gpu_is_named_with_what_limits_it(monkeypatch, name, capability, free, status, says):
    major, minor = capability
    properties = SimpleNamespace(name=name, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(doctor, "this_machine", lambda: {"driver": "580.1"})
    monkeypatch.setattr(cubin_launch, "obstacle", lambda sm: "")
    finding = only(doctor._gpus())
    assert (finding.status, finding.name) == (status, "GPU 0")
    monkeypatch.setattr(cubin_launch, "obstacle", lambda sm: "there are no bindings")
    again = only(doctor._gpus())
    assert again.status != OK and (status != OK or "there are no bindings" in again.text)
    assert says in finding.text and name in finding.text and "580.1" in finding.text


@pytest.mark.parametrize("has_gpu, status", [(True, PROBLEM), (False, LIMIT)])
def test_triton_needs_a_c_compiler_and_headers_on_a_gpu(monkeypatch, tmp_path, has_gpu, status):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    compiler, headers = doctor._compilers()
    assert (compiler.status, headers.status) == (status, status)
    assert "no gcc or clang" in compiler.text and "Python.h" in headers.text
    (tmp_path / "Python.h").touch()
    (tmp_path / "clang").write_text("#!/bin/sh\n")
    (tmp_path / "clang").chmod(0o755)
    assert [f.status for f in doctor._compilers()] == [OK, OK]
    monkeypatch.setenv("CC", "no-such-compiler")
    compiler, _ = doctor._compilers()
    assert compiler.status == status and "CC is 'no-such-compiler'" in compiler.text


# -- a kernel --------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_compile_is_a_limit_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refused(*_):
        raise CodegenError("kernel: no code for sm_90: ptxas is missing\nmore")

    monkeypatch.setattr(doctor.compiler, "ahead_of_time", refused)
    searched, kernels = doctor._kernel()
    assert searched.status == OK and kernels.status == LIMIT
    assert kernels.text.endswith("ptxas is missing")


@pytest.mark.parametrize(
    "verdict, status, says",
    [
        (Rejected("its numbers are wrong"), PROBLEM, "its numbers are wrong"),
        (Accepted(0.0, "right"), OK, "its numbers are right"),
    ],
)
def test_on_a_gpu_the_kernel_runs_and_is_checked(monkeypatch, verdict, status, says):
    """The check itself needs a GPU, so its verdict is given here."""
    found = doctor.superoptimize(doctor._small_program(), cache=False, backend="cpu")
    monkeypatch.setattr(doctor, "superoptimize", lambda *_, **__: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.tuner, "check_compiled", lambda *_: verdict)
    _, kernels = doctor._kernel()
    assert kernels.status == status and says in kernels.text


# -- folders and zoos ------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_or_is_full_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    blocked = doctor._of_folder("cache", tmp_path / "file" / "cache", "set it")
    assert blocked.status == PROBLEM and "cannot be written" in blocked.text
    for free, status in ((10 << 20, PROBLEM), (1 << 30, LIMIT), (8 << 30, OK)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder, usage=usage: usage)
        found = doctor._of_folder("cache", tmp_path / "cache", "set it")
        assert found.status == status and bool(found.way_out) == (status != OK)


def test_a_damaged_entry_is_a_problem_of_the_package_and_a_limit_of_the_cache(
    tmp_path, monkeypatch
):
    entry = tmp_path / "pattern" / "1x64-float32-01234567" / "sm_90"
    entry.mkdir(parents=True)
    (entry / "entry.json").write_text("{")
    monkeypatch.setattr(doctor, "packaged_store", lambda: Store(tmp_path, is_trusted=True))
    monkeypatch.setattr(doctor, "user_store", lambda: Store(tmp_path, writable=True))
    packaged, own = doctor._zoos()
    assert (packaged.status, own.status) == (PROBLEM, LIMIT)
    assert packaged.text.startswith("1 of 1 entries are damaged") and packaged.way_out
    missing = Store(tmp_path / "none", is_trusted=True)
    monkeypatch.setattr(doctor, "packaged_store", lambda: missing)
    assert doctor._zoos()[0].text.endswith("is missing")
