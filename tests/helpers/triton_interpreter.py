"""Run code in a process in which Triton's interpreter runs the kernels.

All tests of a pytest process share one such process: TRITON_INTERPRET must be set before triton is
imported, and importing torch, transformers and triton takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600


def run(code: str) -> Any:
    """Run `code` there and return the last line that it prints, read as JSON.

    The code may import what tests may.

    Raises:
        AssertionError: the code raised; the message holds its traceback.
    """
    process = _process()
    watch = threading.Timer(SECONDS, process.kill)
    watch.start()
    try:
        process.stdin.write(json.dumps(code) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        answer = process.stdout.readline()  # type: ignore[union-attr]
    finally:
        watch.cancel()
    assert answer, (
        f"the process that interprets kernels died, or took more than {SECONDS} s; standard error "
        "has more"
    )
    result = json.loads(answer)
    assert "raised" not in result, result["raised"]
    return result["value"]


@functools.cache
def _process() -> subprocess.Popen[str]:
    """Start the process. It ends when its input does, hence also when this process dies."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "MIRAGE_HF_CACHE": tempfile.mkdtemp(prefix="mirage_hf_tests_"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.triton_interpreter"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def quicken() -> None:
    """Make the interpreter of Triton 3.6 two to three times as fast, with the same results.

    Other versions stay as they are.
    """
    import triton
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6.") or hasattr(interpreter, "quickened"):
        return
    interpreter.quickened = True

    # Triton also computes every sum and product of int32 in int64, to detect overflow. The sizes
    # here are far too small to overflow.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)

    # tl is patched again in each call of a function; once for each kernel is enough
    patch, modules = (
        interpreter._patch_lang,
        type("Modules", (), {"__globals__": {"tl": tl, "core": core}}),
    )
    interpreter._patch_lang = lambda fn: (
        patch(modules) if core.is_builtin(tl.program_id) else interpreter._LangPatchScope()
    )

    # a table of all dtypes is made for each conversion
    np_dtype, dtypes = interpreter._get_np_dtype, {}

    def known_dtype(t):
        if t.scalar.name not in dtypes:
            dtypes[t.scalar.name] = np_dtype(t)
        return dtypes[t.scalar.name]

    interpreter._get_np_dtype = known_dtype

    # each type and each tensor checks its shape and writes it out
    block_type, blocks, scalar = core.block_type.__init__, {}, (core.tuple([]), core.constexpr(1))

    def known_block_type(self, element_ty, shape):
        key = (*(n.value if isinstance(n, core.constexpr) else n for n in shape), element_ty.name)
        if key not in blocks:
            block_type(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(n) for n in self.shape]), core.constexpr(self.numel)
            blocks[key] = {
                "shape": self.shape,
                "numel": self.numel,
                "name": self.name,
                "of_tensor": sizes,
            }
        self.element_ty = element_ty
        self.__dict__ |= blocks[key]

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else scalar

    core.block_type.__init__, core.tensor.__init__ = known_block_type, tensor

    # reductions by functions of ours join numbers one by one; such a function, without branches,
    # takes whole rows
    one_by_one = interpreter.ReduceOps.generic_reduce

    def row_by_row(self, inputs):
        if self.axis is None:
            return one_by_one(self, inputs)
        arrays = [x.handle.data for x in inputs]
        joined: Any = None
        for n in range(arrays[0].shape[self.axis]):
            row = [
                self.to_tensor(a.take(n, self.axis), x.dtype)
                for a, x in zip(arrays, inputs, strict=True)
            ]
            joined = row if joined is None else self.combine_fn.fn(*joined, *row)
            joined = joined if isinstance(joined, (list, tuple)) else [joined]
        shape = list(arrays[0].shape)
        shape[self.axis : self.axis + 1] = [1] if self.keep_dims else []
        return [
            self.to_tensor(y.handle.data.reshape(shape), x.dtype)
            for y, x in zip(joined, inputs, strict=True)
        ]

    interpreter.ReduceOps.generic_reduce = row_by_row


def mend() -> None:
    """Mend the interpreter of Triton 3.9.

    Its comparisons of scalars return numbers, which it then rejects as masks.
    """
    import numpy
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.9."):
        return
    binary_op = interpreter.InterpreterBuilder.binary_op

    def mended(self, lhs, rhs, op):
        found = binary_op(self, lhs, rhs, op)
        return (
            interpreter.TensorHandle(found.data, tl.int1)
            if found.data.dtype == numpy.bool_
            else found
        )

    interpreter.InterpreterBuilder.binary_op = mended


def mend_bfloat16() -> None:
    """Mend conversions from and to bfloat16, and its arithmetic, in Triton's interpreter.

    It holds bfloat16 as uint16. So it cut off the bits of float32 instead of rounding them,
    converted other types to the integer, and computed with the integers. It has no constants.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "mended_bfloat16"):
        return
    interpreter.mended_bfloat16 = True
    builder = interpreter.InterpreterBuilder
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        wide = (x.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def rounded(x):
        bits = x.data.view(numpy.uint32)
        nearest = bits + (0x7FFF + ((bits >> 16) & 1)).astype(numpy.uint32)
        halves = (numpy.where(numpy.isfinite(x.data), nearest, bits) >> 16).astype(numpy.uint16)
        return interpreter.TensorHandle(halves, tl.bfloat16)

    def converted(self, x, target):
        if x.dtype.scalar == target.scalar:
            return x
        if target.scalar != tl.bfloat16:
            return cast(self, widened(x), target)
        return rounded(x if x.dtype.scalar == tl.float32 else cast(self, x, tl.float32))

    def product(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    def combined(self, a, b, op):
        if a.dtype.scalar != tl.bfloat16:
            return binary(self, a, b, op)
        found = binary(self, widened(a), widened(b), op)
        return rounded(found) if found.data.dtype == numpy.float32 else found

    def constant(self, value):
        wide = numpy.array([value], numpy.float32)
        return rounded(interpreter.TensorHandle(wide, tl.float32))

    builder.cast_impl, builder.create_dot, builder.binary_op = converted, product, combined
    builder.get_bf16 = constant


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # fills memory that is allocated without a value with NaN: no kernel may read it
    quicken()
    mend()
    mend_bfloat16()
    answers = sys.stdout
    for line in sys.stdin:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(
                    compile(json.loads(line), "<interpreted>", "exec"), {"__name__": "interpreted"}
                )
            answer = {"value": json.loads(printed.getvalue().splitlines()[-1])}
        except Exception:
            answer = {"raised": traceback.format_exc()[-3000:]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
