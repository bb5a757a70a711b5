"""Generated CUDA on a GPU: every file is compiled with its own check and run."""

import shutil
import subprocess

import pytest
import torch

from mirage_hf.codegen import cuda
from tests.helpers import cluster_ugraphs, multi_kernel_ugraphs
from tests.helpers import ugraphs as u

NVCC = shutil.which("nvcc")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NVCC is None, reason="needs nvcc, which is not on PATH"),
]

CASES = {
    **u.ALL,
    "every_op": u.every_op,
    "rms_norm_linear 16 x 4096 x 4096": lambda: u.rms_norm_linear(16, 4096, 4096),
    "rms_norm_linear 1 x 4096 x 4096": lambda: u.rms_norm_linear(1, 4096, 4096),
    "rms_norm_linear transposed": lambda: u.rms_norm_linear(1, 4096, 4096, transposed=True),
    "rms_norm_linear odd": lambda: u.rms_norm_linear(5, 67, 131),
    "rms_norm_linear odd bfloat16 transposed": lambda: u.rms_norm_linear(
        19, 129, 77, "bfloat16", transposed=True
    ),
    "rms_norm_linear float32": lambda: u.rms_norm_linear(2, 97, 80, "float32"),
    "gated_mlp 8 x 4096 x 4096": lambda: u.gated_mlp(8, 4096, 4096),
    "gated_mlp odd bfloat16": lambda: u.gated_mlp(7, 33, 45, "bfloat16"),
    "lora 16 x 256 x 4096": lambda: u.lora(16, 256, 4096, 16),
    "lora odd": lambda: u.lora(3, 37, 51, 5),
    "attention decode": lambda: u.attention(64, 1, 4096, 128),
    "attention prefill": lambda: u.attention(4, 200, 300, 64),
    "attention odd bfloat16": lambda: u.attention(3, 7, 45, 24, "bfloat16"),
    "qkv 1 x 2048": lambda: u.qkv(1, 2048, (2048, 512, 512)),
    "qkv odd": lambda: u.qkv(5, 50, (20, 6, 10), "bfloat16"),
    "softmax_rows 8 x 100000": lambda: u.softmax_rows(8, 100_000),
    "ntrans 8 x 4096": lambda: u.ntrans(8, 4096),
    "split_k_linear 4096": lambda: u.split_k_linear(1, 4096, 4096, 8),
    "split_k 4096": lambda: multi_kernel_ugraphs.split_k(8, 4096, 512, 8),
    **{f"cluster {name}": make for name, make in cluster_ugraphs.ALL.items()},
    "cluster split_linear 4096": lambda: cluster_ugraphs.split_linear(1, 4096, 512, 8),
    "cluster rms_norm_linear 4096": lambda: cluster_ugraphs.rms_norm_linear(8, 4096, 512, 8),
    "cluster rms_norm_linear odd": lambda: cluster_ugraphs.rms_norm_linear(5, 131, 67, 8),
    "cluster rms_norm 4 x 8192": lambda: cluster_ugraphs.rms_norm(4, 8192, 8),
    "cluster softmax_rows 4 x 100000": lambda: cluster_ugraphs.softmax_rows(4, 100_000, 8),
    "flash": lambda: multi_kernel_ugraphs.flash(8, 16, 1000, 64),
    "cluster attention 4096 keys": lambda: cluster_ugraphs.attention(8, 1, 4096, 64, 8),
    "cluster small_mlp bfloat16": lambda: cluster_ugraphs.small_mlp(3, 33, 45, 21, 8, "bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_file_passes_its_own_check(name, tmp_path):
    if name.startswith("cluster") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90")
    path = cuda.write_program(CASES[name](), tmp_path / "kernel.cu")
    subprocess.run(
        [
            NVCC,
            "-std=c++17",
            "-O3",
            "-arch=native",
            "-DMIRAGE_CHECK",
            str(path),
            "-o",
            str(tmp_path / "check"),
        ],
        check=True,
    )
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ok" in done.stdout and "WRONG" not in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_wrong_kernel_fails_its_check(tmp_path):
    text = cuda.program_source(u.rms_norm_linear()).replace(
        "const float o = y * inv;", "const float o = y * inv * 1.05f;"
    )
    (tmp_path / "kernel.cu").write_text(text, encoding="utf-8")
    built = tmp_path / "check"
    subprocess.run(
        [
            NVCC,
            "-std=c++17",
            "-arch=native",
            "-DMIRAGE_CHECK",
            str(tmp_path / "kernel.cu"),
            "-o",
            str(built),
        ],
        check=True,
    )
    done = subprocess.run([built], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "WRONG" in done.stdout
