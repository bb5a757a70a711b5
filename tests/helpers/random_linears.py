"""Random linears whose weights are codes, through search, proof and generated kernels.

A container is made by its library if that is installed. Otherwise, and for orders that no library
has, random codes are stored as a coding says. Tests run the kernels on a GPU or through Triton's
interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.generated_program import GeneratedProgram
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError
from mirage_hf.formats import gptq
from mirage_hf.formats.coding import Coding, write_joined
from mirage_hf.formats.stored import Stored
from mirage_hf.graph import coded
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.space import obstacle, schedules
from mirage_hf.verify.accept import Candidate, accept
from tests.helpers import coded_modules, coded_mutants, gguf_reference
from tests.helpers.random_searched_kernels import _steps

# -- configurations -------------------------------------------------------------------------------

#: Sizes of groups of bytes. Kernels for words of codes exist only for powers of two.
GROUPS = (8, 16, 24, 32, 40, 48, 64, 96, 128)
GROUPS_IN_BLOCKS = (8, 16, 24, 32)
GROUPS_IN_WORDS = (8, 16, 32, 64, 128)

#: What divides scales that are floats of 8 bits, without a library.
_DIVISOR = 90.0

#: The group of each kind of 4-bit floats.
GROUPS_OF_FP4 = {"nvfp4": 16, "mxfp4": 32}

#: The numbers of GGUF's types of blocks, and the codes of a block.
GGUF_TYPES = {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
GGUF_CODES = 256

#: Kinds of containers: the library, the granularity of scales, whether there may be zero points,
#: and the kind of `coded_mutants.coding` that takes its place without the library.
KINDS = {
    "compressed-tensors int4": ("compressed_tensors", ("group", "rows"), True, "int4"),
    "compressed-tensors int8": ("compressed_tensors", ("group", "rows"), True, "int8"),
    "compressed-tensors fp8": ("compressed_tensors", ("rows", "block"), False, "fp8"),
    "compressed-tensors nvfp4": ("compressed_tensors", ("group",), False, "nvfp4"),
    "compressed-tensors mxfp4": ("compressed_tensors", ("group",), False, "mxfp4"),
    "torchao int8": ("torchao", ("group", "rows"), True, "int8"),
    "torchao int4 in bytes": ("torchao", ("group",), False, "int8"),
    "torchao fp8": ("torchao", ("rows",), False, "fp8"),
    "HQQ uint8": ("hqq", ("group",), True, "int8"),
    "FP8Linear": ("transformers", ("block",), False, "fp8"),
    "int4 in any order": ("", ("group", "rows"), True, "int4"),
    "int8 in any order": ("", ("group", "rows"), True, "int8"),
    "fp8 in any order": ("", ("rows", "block"), False, "fp8"),
}

#: Kinds of the seeds from `LATER_SEEDS` on. So the seeds before keep their configurations.
LATER_KINDS = {
    "GPTQ act-order int4": ("", ("group",), True, "act-order"),
    "GPTQ act-order int8": ("", ("group",), True, "act-order"),
    "Q4_K": ("", ("group",), False, "Q4_K"),
    "Q5_K": ("", ("group",), False, "Q5_K"),
    "Q6_K": ("", ("group",), False, "Q6_K"),
}
LATER_SEEDS = 1000


@dataclass(frozen=True)
class Config:
    """One random linear.

    Attributes:
        seed: The seed of all its numbers and of the choice of schedules.
        kind: A key of `KINDS`.
        rows: The rows of x.
        widths: The outputs of each weight. Several weights are joined.
        columns: The inputs.
        scales: "group", "rows" or "block".
        group: The columns that share a scale. In blocks, the rows too.
        zeros: Whether codes have zero points.
        norm: Whether RMSNorm comes before.
        bias: Whether a bias is added.
        dtype: The dtype of x.
    """

    seed: int
    kind: str
    rows: int
    widths: tuple[int, ...]
    columns: int
    scales: str
    group: int
    zeros: bool
    norm: bool
    bias: bool
    dtype: torch.dtype

    @property
    def has_library(self) -> bool:
        """Whether the library that makes such containers is installed."""
        library = (KINDS | LATER_KINDS)[self.kind][0]
        return bool(library) and importlib.util.find_spec(library) is not None


def config(seed: int) -> Config:
    """Return the configuration of a seed."""
    r = random.Random(seed)
    kind = r.choice(list(KINDS if seed < LATER_SEEDS else LATER_KINDS))
    _, scales, may_have_zeros, code = (KINDS | LATER_KINDS)[kind]
    granularity = r.choice(scales)
    in_blocks, in_words = granularity == "block", "int4" in kind and "bytes" not in kind
    group = r.choice(GROUPS_IN_BLOCKS if in_blocks else GROUPS_IN_WORDS if in_words else GROUPS)
    group = GGUF_CODES if code in GGUF_TYPES else GROUPS_OF_FP4.get(code, group)
    joined = r.choice((1, 1, 2) if in_blocks else (1, 1, 2, 3))
    unit = group if in_blocks else 8
    # Weights of one block do not join. compressed-tensors cannot decode one row of words.
    least = 2 if (in_blocks and joined > 1) or kind == "compressed-tensors int4" else 1
    widths = tuple(unit * r.randint(least, max(least, 48 // unit // joined)) for _ in range(joined))
    return Config(
        seed=seed,
        kind=kind,
        rows=r.choice((*range(1, 17), 1, 1, 16)),
        widths=widths,
        columns=group * r.randint(1, min(6, 512 // group)),
        scales=granularity,
        group=group,
        zeros=may_have_zeros and r.random() < 0.5,
        norm=r.random() < 0.4,
        bias=r.random() < 0.3,
        dtype=r.choice((torch.float16, torch.bfloat16)),
    )


# -- containers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Container:
    """A weight: its coding, the tensors that programs read, and the weight that it decodes to."""

    coding: Coding
    tensors: tuple[Tensor, ...]
    weight: Tensor


def containers(c: Config) -> list[Container]:
    """Return the weights of a configuration."""
    torch.manual_seed(c.seed)
    return [(_from_library if c.has_library else _stored)(c, n) for n in c.widths]


def _from_library(c: Config, width: int) -> Container:
    module, weight = _LIBRARIES[KINDS[c.kind][0]](c, width)
    found = coded_modules.coded_weight(module, c.dtype)
    assert isinstance(found, coded_modules.CodedWeight), found
    return Container(found.coding, found.tensors, weight.detach())


def _compressed(c: Config, width: int) -> tuple[nn.Module, Tensor]:
    from tests.formats import test_compressed_tensors as made
    from tests.formats import test_compressed_tensors_fp4 as made_fp4

    linear = nn.Linear(c.columns, width, bias=False, dtype=c.dtype)
    if KINDS[c.kind][3] in GROUPS_OF_FP4:
        name = KINDS[c.kind][3].upper() + "A16"
        module = made_fp4.compressed(linear, name)
        return module, made_fp4.exact_weight_of(module)
    strategy = {"group": "group", "rows": "channel", "block": "block"}[c.scales]
    args: dict[str, Any] = {"num_bits": 4 if "int4" in c.kind else 8, "strategy": strategy}
    if c.scales == "group":
        args |= {"group_size": c.group, "symmetric": not c.zeros}
    elif "int" in c.kind:
        args |= {"symmetric": not c.zeros}
    else:
        args |= {"type": "float"}
    if c.scales == "block":
        args |= {"block_structure": [c.group, c.group]}
    module = made.compressed(linear, args)
    return module, made.weight_of(module)


def _torchao(c: Config, width: int) -> tuple[nn.Module, Tensor]:
    from torchao import quantization as q

    group = q.PerGroup(c.group)
    config = {
        "torchao int8": lambda: q.Int8WeightOnlyConfig(
            **({"granularity": group} if c.scales == "group" else {})
        ),
        "torchao int4 in bytes": lambda: q.IntxWeightOnlyConfig(torch.int4, granularity=group),
        "torchao fp8": lambda: q.Float8WeightOnlyConfig(),
    }[c.kind]()
    model = nn.Sequential(nn.Linear(c.columns, width, bias=False, dtype=c.dtype))
    q.quantize_(model, config)
    weight = model[0].weight
    if c.zeros and weight.zero_point is not None:
        weight.zero_point.random_(-9, 9)
    return model[0], weight.dequantize()


def _hqq(c: Config, width: int) -> tuple[nn.Module, Tensor]:
    from hqq.core import quantize as q

    settings = q.BaseQuantizeConfig(nbits=8, group_size=c.group, axis=1)
    linear = nn.Linear(c.columns, width, bias=False)
    module = q.HQQLinear(linear, settings, compute_dtype=c.dtype, device="cpu")
    return module, module.dequantize()


def _transformers(c: Config, width: int) -> tuple[nn.Module, Tensor]:
    from tests.formats import test_fp8 as made

    module = made.module_of((c.group, c.group), width, c.columns)
    return module, made.weight_of(module, c.dtype)


_LIBRARIES: dict[str, Callable[[Config, int], tuple[nn.Module, Tensor]]] = {
    "compressed_tensors": _compressed,
    "torchao": _torchao,
    "hqq": _hqq,
    "transformers": _transformers,
}


def _stored(c: Config, width: int) -> Container:
    """Return random codes, scales and zero points, each stored with its dims in a random order."""
    if c.kind in GGUF_TYPES:
        return _blocks_of_gguf(c, width)
    if c.kind in LATER_KINDS:
        return _in_act_order(c, width)
    r = random.Random(c.seed)
    kind = KINDS[c.kind][3]
    forms = ("words", "bytes") if kind == "int4" else ("bytes", "floats")
    name = f"{kind} {r.choice(forms)}" if c.zeros else kind
    group = 0 if c.scales == "rows" else c.group
    coding = coded_mutants.coding(name, width, c.columns, group, c.dtype)
    if "any order" in c.kind:
        stored = [_reordered(s, r) for s in coding.stored]
        zeros = stored[2] if len(stored) > 2 else None
        coding = replace(coding, codes=stored[0], scales=stored[1], zeros=zeros)
    inputs, _ = coding.write(new_kernel_graph())
    numbers = [_numbers(s) for s in coding.stored]
    scales = torch.empty(coding.scales.dims).uniform_(0.005, 0.02)
    if coding.divisors is not None:  # scales in float8 are near its middle
        scales *= _DIVISOR
        numbers[2] = torch.full(coding.divisors.dims, _DIVISOR)
    numbers[1] = scales.to(coding.scales.dtype)
    tensors = tuple(coded.packed(t, x) for t, x in zip(inputs, numbers, strict=True))
    return Container(coding, tensors, _decoded(coding, numbers).reshape(width, c.columns))


def _blocks_of_gguf(c: Config, width: int) -> Container:
    """Return random blocks of 256 codes."""
    kind = GGUF_TYPES[c.kind]
    blocks = gguf_reference.random_blocks(kind, width, c.columns, c.seed + width)
    weight = gguf_reference.coded(kind, blocks, c.dtype)
    return Container(weight.coding, weight.tensors, gguf_reference.decoded(kind, blocks))


def _in_act_order(c: Config, width: int) -> Container:
    """Return random codes, scales and zero points of GPTQ, with columns in a random order."""
    per_word, code = (8, torch.uint4) if "int4" in c.kind else (4, torch.uint8)
    zero = None if c.zeros else 1 << (32 // per_word - 1)
    index = random.Random(c.seed).choice((torch.int32, torch.int64))
    coding = gptq.coding_of(width, c.columns, c.group, code, c.dtype, c.dtype, zero, index)
    groups = c.columns // c.group
    order = torch.arange(c.columns) // c.group
    if random.Random(c.seed).random() < 0.3:  # groups of different sizes
        order = torch.randint(0, groups, (c.columns,))
    order = order[torch.randperm(c.columns)].to(index)
    inputs, _ = coding.write(new_kernel_graph())
    numbers = {role: _numbers(s) for role, s in coding.roles.items() if role != "order"}
    numbers["scales"] = torch.empty(coding.scales.dims).uniform_(0.005, 0.02).to(c.dtype)
    numbers["order"] = order.view(coding.order.dims)
    tensors = tuple(coded.packed(t, numbers[r]) for t, r in zip(inputs, coding.roles, strict=True))

    def of_columns(x: Tensor) -> Tensor:
        """Return a value for each row and column from one for each row and group."""
        return x.double().reshape(width, groups)[:, order.long()]

    codes = numbers["codes"].double().reshape(width, c.columns)
    zeros = of_columns(numbers["zeros"]) if c.zeros else zero
    return Container(coding, tensors, (codes - zeros) * of_columns(numbers["scales"]))


def _decoded(coding: Coding, numbers: list[Tensor]) -> Tensor:
    """Return the weight in float64, with the dims of its codes."""
    read = {role: x.double() for role, x in zip(coding.roles, numbers, strict=True)}
    codes = read["codes"]
    if coding.table is not None:
        codes = torch.tensor(coding.table, dtype=torch.float64)[codes.long()]
    scales = read["scales"] / read.get("divisors", 1.0)
    return (codes - read.get("zeros", coding.zero)) * scales


def _numbers(s: Stored) -> Tensor:
    """Return random codes in their range, and floats that are whole numbers."""
    if s.dtype is torch.float8_e4m3fn:
        return torch.randn(s.dims).to(s.dtype)
    low, high = (-128, 128) if s.dtype is torch.int8 else (0, 16)
    return torch.randint(low, high, s.dims).to(torch.uint8 if s.dtype is torch.uint4 else s.dtype)


def _reordered(s: Stored, r: random.Random) -> Stored:
    """Return the same dims, stored in a random order. Words of uint4 are filled by one dim."""
    if s.dtype is torch.uint4 and s.strides[0] < s.dims[-1]:
        return s  # packed along rows
    order = list(range(len(s.dims)))
    r.shuffle(order)
    if s.dtype is torch.uint4:
        wide = [d for d in order if s.dims[d] % 8 == 0]
        last = wide[-1]
        order = [d for d in order if d != last] + [last]
    strides, step = [0] * len(order), 1
    for d in reversed(order):
        strides[d] = step
        step *= s.dims[d]
    return replace(s, strides=tuple(strides))


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program with its inputs.

    Attributes:
        program: The program.
        inputs: Its inputs, on the CPU.
        exact: The float64 product with the decoded weights.
        eager: What torch computes with the decoded weights in the dtype of x.
    """

    program: KernelGraph
    inputs: list[Tensor]
    exact: Tensor
    eager: Tensor


def case(c: Config) -> Case:
    """Return the program of a configuration, and what it should compute."""
    held = containers(c)
    g = new_kernel_graph()
    x = torch.randn(c.rows, c.columns).to(c.dtype)
    scale = (1 + 0.1 * torch.randn(1, c.columns)).to(c.dtype)
    added = (0.1 * torch.randn(1, sum(c.widths))).to(c.dtype)
    inputs, y = [x], g.new_input(x.shape, c.dtype)
    if c.norm:
        y = g.rms_norm(y, g.new_input(scale.shape, c.dtype, constant=True))
        inputs.append(scale)
    joined = all(held[0].coding.joins(h.coding) for h in held[1:])
    held = held if joined else held[:1]
    _, weight = write_joined([h.coding for h in held], g)
    y = g.matmul(y, weight)
    inputs += [t for h in held for t in h.tensors]
    added = added[:, : y.dims[1]].contiguous()
    if c.bias:
        y = g.add(y, g.new_input(added.shape, c.dtype, constant=True))
        inputs.append(added)
    g.mark_output(y)

    def computed(dtype: torch.dtype) -> Tensor:
        w = torch.cat([h.weight.to(dtype) for h in held])
        normed = F.rms_norm(x.to(dtype), (c.columns,), scale[0].to(dtype), 1e-6)
        bias = added[0].to(dtype) if c.bias else None
        return F.linear(normed if c.norm else x.to(dtype), w, bias)

    return Case(g, inputs, computed(torch.float64), computed(c.dtype))


@dataclass(frozen=True)
class Run:
    """What one generated program computed.

    Attributes:
        name: The configuration and the schedules.
        mma: Whether a kernel uses tensor cores.
        error: The largest error, relative to the largest result.
        allowed: The largest error that is allowed: 1.25 times torch's, and one rounding.
    """

    name: str
    mma: bool
    error: float
    allowed: float


#: Most steps (blocks times loop steps) of one kernel in the interpreter, about 1 ms each.
STEPS = 3000

#: Random schedules that are tried until one can be generated.
ATTEMPTS = 30


def runs(c: Config, device: str = "cpu") -> list[Run]:
    """Return what generated kernels of proven µGraphs compute, or [] if there is none."""
    found = case(c)
    chosen = kernels(c, found.program, STEPS if device == "cpu" else math.inf)
    return [_run(c, found, program, schedules, device) for program, schedules in chosen]


def kernels(
    c: Config, program: KernelGraph, steps: float = math.inf
) -> Iterator[tuple[GeneratedProgram, list[Schedule]]]:
    """Yield kernels of proven µGraphs with random schedules of at most so many steps."""
    ranked, _ = search(program, SearchOptions(threads=1))
    r = random.Random(c.seed)
    for candidate in accept(ranked, keep=2).candidates[:3]:
        for mma in (False, True):
            chosen = _generated(candidate, mma, r, steps)
            if chosen is not None:
                yield chosen


def _generated(
    candidate: Candidate, mma: bool, r: random.Random, steps: float
) -> tuple[GeneratedProgram, list[Schedule]] | None:
    """Return kernels with random schedules, None if there are none of this kind."""
    ops = place_kernels(candidate.ugraph)
    if not candidate.allows(mma) or obstacle(ops):
        return None
    listed = [_of_kind(schedules(op), mma) for op in ops]
    if not all(listed):
        return None
    for _ in range(ATTEMPTS):
        chosen = [r.choice(each) for each in listed]
        if any(_steps(op, s) > steps for op, s in zip(ops, chosen, strict=True)):
            continue
        try:
            return triton.generate(candidate.ugraph, chosen), chosen
        except CodegenError:
            continue
    return None


def _of_kind(listed: list[Schedule], mma: bool) -> list[Schedule]:
    """Return the schedules with or without tensor cores. Kernels without products use none."""
    found = [s for s in listed if s.mma == mma]
    return found or [s for s in listed if mma and not s.mma]


def _run(
    c: Config, found: Case, program: GeneratedProgram, chosen: list[Schedule], device: str
) -> Run:
    run = compiler.load(program.source, program.digest).run
    (y,) = run([_moved(x, device) for x in found.inputs])
    size = float(found.exact.abs().max())
    error = float((y.cpu().double() - found.exact).abs().max()) / size
    eager = float((found.eager.double() - found.exact).abs().max()) / size
    name = f"{c}: {[*map(str, chosen)]}"
    return Run(name, any(s.mma for s in chosen), error, 1.25 * eager + torch.finfo(c.dtype).eps)


def _moved(x: Tensor, device: str) -> Tensor:
    """Return a tensor on a device, with its strides."""
    if x.device.type == device:
        return x
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype).set_(storage)
    return flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


@dataclass
class Summary:
    """What was tried for a range of seeds."""

    tried: int = 0
    with_library: int = 0
    kernels: int = 0
    with_mma: int = 0
    worst: float = 0.0
    wrong: tuple[str, ...] = ()
    without_kernel: tuple[str, ...] = ()


def summary(seeds: range, device: str = "cpu") -> Summary:
    """Run all configurations of a range of seeds."""
    total = Summary()
    for seed in seeds:
        c = config(seed)
        total.tried += 1
        total.with_library += c.has_library
        made = runs(c, device)
        if not made:
            total.without_kernel += (str(c),)
        for run in made:
            total.kernels += 1
            total.with_mma += run.mma
            total.worst = max(total.worst, run.error / run.allowed)
            if not run.error <= run.allowed:
                total.wrong += (f"{run.name}: {run.error:.3g}, {run.allowed:.3g} is allowed",)
    return total


def main(start: int, stop: int) -> None:
    """Print the summary of a range of seeds as JSON."""
    print(json.dumps(summary(range(start, stop)).__dict__))
