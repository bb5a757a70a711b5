"""Mutants of generated Triton text: kernels that decode weights in another way.

Each mutant is a text with one change of a shift, a mask, a constant or an address. Triton's
interpreter runs it, and the numeric check that the tuner uses judges it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.errors import CodegenError, Rejected
from mirage_hf.graph.coded import is_exponent
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune.space import schedules
from mirage_hf.verify.numeric import NumericCheck
from mirage_hf.verify.verdict import Verdict
from tests.helpers import coded_mutants, coded_programs
from tests.helpers.coded_mutants import CodedProgram

#: Changes of the functions that decode: the text, and what stands there instead.
DECODERS = {
    "words >> 20": ("words >> 16", "words >> 24", "words >> 12", "words >> 4"),
    "15 << (4 * number)": ("7 << (4 * number)", "14 << (4 * number)", "15 << (3 * number)"),
    "1 << (4 * number)": ("1 << (3 * number)", "1 << (5 * number)", "2 << (4 * number)"),
    "exponent = 0x4B000000": ("exponent = 0x4B800000", "exponent = 0x4A800000"),
    "(8388608.0 * unit": ("(8388609.0 * unit", "(8388600.0 * unit", "(8388608.0"),
    "tl.join(n0, n4)": ("tl.join(n4, n0)", "tl.join(n0, n2)"),
    "tl.join(n1, n5)": ("tl.join(n5, n1)", "tl.join(n1, n4)"),
    "tl.join(n2, n6)": ("tl.join(n6, n2)",),
    "tl.join(n3, n7)": ("tl.join(n7, n3)",),
    "tl.join(even, odd)": ("tl.join(odd, even)", "tl.join(even, even)"),
    "^ 0x4B000080": ("^ 0x4B000000", "^ 0x4B000081"),
    "- 8388736.0": ("- 8388608.0", "- 8388737.0"),
    "| 0x4B000000\n": ("| 0x4B000001\n", "| 0x4A800000\n"),
    "- 8388608.0\n": ("- 8388609.0\n", "- 8388736.0\n"),
    # tables, and powers of two
    "tl.where(x < i, found, values[i])": (
        "tl.where(x <= i, found, values[i])",
        "tl.where(x < i, values[i], found)",
    ),
    "tl.full(x.shape, values[0]": ("tl.full(x.shape, values[1]", "tl.full(x.shape, values[8]+1.0"),
    "* 2.0**-14": ("* 2.0**-13", "* 2.0**-15"),
    "* 16384.0": ("* 8192.0", "* 16385.0"),
    "x.to(tl.int32) << 23": ("x.to(tl.int32) << 22", "x.to(tl.int32) << 24"),
    # pairs of codes for tensor cores
    "halves >> (4 * number)": ("halves >> (3 * number)", "halves >> (4 * number + 1)"),
    "& 0x000F000F": ("& 0x00070007", "& 0x000F000E", "& 0x000E000F", "& 0x0000000F"),
    "first & 0xFFFF": ("first & 0xFFFE", "second & 0xFFFF", "first & 0xFFF"),
    "second << 16": ("second << 12", "first << 16"),
    "(first >> 16)": ("(first >> 12)", "(first >> 20)", "(second >> 16)"),
    "second & -0x10000": ("first & -0x10000", "second & -0x20000"),
    "else 0x64006400": ("else 0x64006401", "else 0x64016400", "else 0x68006400"),
    "(pair >> 16)": ("(pair >> 15)", "pair"),
    # words of four bytes
    "(words >> 8) & 255": ("(words >> 7) & 255", "(words >> 8) & 127", "words & 255"),
    "(words >> 24) & 255": ("(words >> 16) & 255", "(words >> 24) & 254"),
    "tl.join(b0, b2)": ("tl.join(b2, b0)", "tl.join(b0, b1)"),
    "^ -0x7F7F7F80": ("^ 0", "^ -0x7F7F7F7F", "^ 0x7F7F7F80"),
    "tl.join(a0, a4)": ("tl.join(a4, a0)", "tl.join(b0, a4)"),
    "tl.join(b3, b7)": ("tl.join(b7, b3)", "tl.join(a3, b7)"),
    "tl.join(firsts, tl.join(even, odd))": ("tl.join(tl.join(even, odd), firsts)",),
}

#: Other words of codes, other bytes, and other types of float8 codes.
WORDS = (">> 4", "<< 4", "^ 7", "^ -1")
BYTES = ("^ 1", "^ 64", ">> 1", "<< 1")
FLOAT8 = (".to(tl.uint8, bitcast=True)", ".to(tl.float8e5, bitcast=True)")

#: Other scales and zero points.
VALUES = {
    "scales": ("* 0 + 1.0", "* 2.0", "* -1.0", "+ 0.5"),
    "divisors": ("* 0 + 1.0", "* 2.0", "* -1.0"),
    "zeros": ("* 0", "* 2", "+ 1", "- 8"),
}


@dataclass(frozen=True)
class TextMutant:
    """A changed source, and the kind and place of its change."""

    kind: str
    where: str
    source: str


@dataclass(frozen=True)
class Kernel:
    """A generated kernel of a program.

    Attributes:
        name: What labels call it.
        program: The program.
        ugraph: Its µGraph, of one kernel.
        source: The generated source.
    """

    name: str
    program: CodedProgram
    ugraph: UGraph
    source: str

    @property
    def roles(self) -> dict[str, str]:
        """The role of each input of the block graph, by its name."""
        op = self.ugraph.block_ops[0]
        by_tensor = {
            t.index: role
            for t, role in zip(self.ugraph.kernels.inputs, self.program.roles, strict=True)
        }
        return {i.name: by_tensor.get(op.inputs[i.sources[0]].index, "x") for i in op.block.inputs}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of an input of the block graph."""
        op = self.ugraph.block_ops[0]
        sources = {i.name: i.sources[0] for i in op.block.inputs}
        return op.inputs[sources[name]].dtype

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its name."""
        return {a.name: a.size for a in self.ugraph.block_ops[0].block.axes}


def kernels() -> Iterator[Kernel]:
    """Yield the first kernels of each program: on tensor cores or not, with one stage or more."""
    for name, make in coded_mutants.PROGRAMS.items():
        program = make()
        kinds = set()
        for ugraph in coded_mutants.found_ugraphs(program, 4):
            ops = place_kernels(ugraph)
            if len(ops) != 1 or ugraph.num_kernels != 1:
                continue
            for schedule in coded_programs._few(schedules(ops[0])):
                kind = schedule.mma, schedule.num_stages > 1
                if kind in kinds:
                    continue
                try:
                    source = triton.generate(ugraph, [schedule]).source
                except CodegenError:
                    continue
                kinds.add(kind)
                label = f"{name}, mma={schedule.mma}, stages={schedule.num_stages}"
                yield Kernel(label, program, ugraph, source)


# -- changes --------------------------------------------------------------------------------------


def mutants_of(kernel: Kernel) -> list[TextMutant]:
    """Return every mutant of a kernel's text, each text once."""
    made = {m.source: m for m in (*_decoder_mutants(kernel), *_body_mutants(kernel))}
    made.pop(kernel.source, None)
    return list(made.values())


def _parts(source: str) -> tuple[str, str, str]:
    """Return the text before the kernel, the kernel and the text after it."""
    start, end = source.index("\n# Schedule("), source.index("\n_compiled, ")
    return source[:start], source[start:end], source[end:]


def _decoder_mutants(kernel: Kernel) -> Iterator[TextMutant]:
    before, body, after = _parts(kernel.source)
    inputs = kernel.program.graph.inputs
    types = {r: t.dtype for r, t in zip(kernel.program.roles, inputs, strict=True)}
    for old, others in DECODERS.items():
        if old.startswith("- ") and types["codes"] is types.get("zeros"):
            continue  # both change by the same number, so their difference does not change
        for new in others if old in before else ():
            yield TextMutant("decoding", new.strip(), before.replace(old, new) + body + after)
    for call in re.finditer(r"(?:uint4_nibble|two_codes)\((words|high|low), (\d)", before):
        number, most = int(call[2]), 3 if "two_codes" in call[0] else 4
        for other in {number - 1, number + 1} & {*range(most + 1)}:
            changed = f"{before[: call.start(2)]}{other}{before[call.end(2) :]}"
            yield TextMutant("another nibble", f"{call[0]} {other}", changed + body + after)


def _body_mutants(kernel: Kernel) -> Iterator[TextMutant]:
    before, body, after = _parts(kernel.source)
    for line in dict.fromkeys(body.splitlines()):
        if "prefetch(" in line:
            continue  # it reads nothing that is computed with
        changes = (*_zero_changes(line), *_table_changes(line), *_load_changes(kernel, line))
        for kind, new in changes:
            where = new.strip()
            yield TextMutant(kind, where, before + body.replace(line, new) + after)


def _zero_changes(line: str) -> Iterator[tuple[str, str]]:
    """Yield lines with another constant zero point."""
    for call in re.finditer(r"uint4_(as_float32|pairs)\(.*?, (\d+\.0)(?=\)|, tl\.)", line):
        zero, none = float(call[2]), 1024.0 if call[1] == "pairs" else 0.0
        for other in (zero + 1, zero - 1, zero + 8, none):
            if other != zero:
                changed = f"{line[: call.start(2)]}{other}{line[call.end(2) :]}"
                yield "another constant zero point", changed


def _table_changes(line: str) -> Iterator[tuple[str, str]]:
    """Yield lines with another table of codes."""
    found = re.search(r"\((?:-?\d+\.\d+, ){15}-?\d+\.\d+\)", line)
    if not found:
        return
    values = ast.literal_eval(found[0])
    tables = [values[1:] + values[:1], values[8:] + values[:8]]
    for n, x in enumerate(values):
        tables += [(*values[:n], other, *values[n + 1 :]) for other in (-x, x + 0.5) if other != x]
    for table in tables:
        yield "another table", f"{line[: found.start()]}{table}{line[found.end() :]}"


def _load_changes(kernel: Kernel, line: str) -> Iterator[tuple[str, str]]:
    """Yield lines that load codes, scales or zero points from elsewhere, or change them."""
    found = re.search(r"tl\.load\((\w+)_ptr(?:\.to\(tl\.pointer_type\(tl\.int32\)\))? \+ ", line)
    role = kernel.roles.get(found[1], "x") if found else "x"
    if not found or role in ("x", "norm"):
        return
    address = line[found.end() : _end_of(line, found.end(), ",)")]
    for term in _split(address, " + "):
        for new in _other_terms(kernel, term):
            changed = address.replace(term, new, 1)
            head, tail = line[: found.end()], line[found.end() + len(address) :]
            yield f"{role} of another address", head + changed + tail
    load = line[found.start() : _end_of(line, found.end(), ")") + 1]
    is_decoded = r"(uint4_\w+|small_e2m1|_words_as_float32)\((tl\.reshape\()?tl\.load"
    packed = re.search(rf"_words(_next\d*)? = |{is_decoded}", line)
    dtype = kernel.dtype(found[1])
    is_float8 = dtype is torch.float8_e4m3fn and not packed
    in_bytes = role == "codes" or is_exponent(dtype)
    for change in WORDS if packed else () if is_float8 else BYTES if in_bytes else VALUES[role]:
        yield f"{role} changed", line.replace(load, f"({load} {change})")
    for change in FLOAT8 if is_float8 else ():
        yield f"{role} of another type", line.replace(load, load + change)


def _other_terms(kernel: Kernel, term: str) -> Iterator[str]:
    """Yield other indices for one term of an address, all within the tensor."""
    if term.startswith("("):  # the words of a tile
        end = _end_of(term, 1, ")") + 1
        yield f"({term[:end]} ^ 1){term[end:]}"
        yield f"({term[:end]} * 0){term[end:]}"
        return
    atom = re.match(r"tl\.arange\(0, (\d+)\)|\w+", term)
    assert atom, term
    index, rest = atom[0], term[atom.end() :]
    if rest == " * 0":
        return  # one number for all rows
    axis = index.split("_")[0]
    size = int(atom[1]) if atom[1] else kernel.sizes.get(axis, 0)
    if size == 1:
        return
    yield f"({index} ^ 1){rest}"
    yield f"({index} * 0){rest}"
    if size > 2:
        yield f"(({index} + 1) % {size}){rest}"


def _end_of(text: str, start: int, ends: str) -> int:
    """Return where one of some characters first stands outside of brackets."""
    depth = 0
    for at in range(start, len(text)):
        if depth == 0 and text[at] in ends:
            return at
        depth += (text[at] in "([") - (text[at] in ")]")
    raise ValueError(text)


def _split(text: str, by: str) -> list[str]:
    """Split a text where `by` stands outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if depth == 0 and text.startswith(by, at):
            parts.append(text[start:at])
            start = at + len(by)
    return [*parts, text[start:]]


# -- the numeric verdict --------------------------------------------------------------------------


def verdict(check: NumericCheck, source: str) -> Verdict:
    """Return what the numeric check says of a source that the interpreter runs."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    return check.judge(compiler.load(source, digest).run)


def tally(count: int, seed: int = 0) -> dict:
    """Return what the numeric check says of a random choice of mutants, one of each kind first."""
    every, checks, faults = [], {}, []
    for kernel in kernels():
        key = str(kernel.program.graph)
        checks.setdefault(key, NumericCheck(kernel.program.graph))
        every += [(kernel, checks[key], m) for m in mutants_of(kernel)]
    random.Random(seed).shuffle(every)
    of_each_kind = {m.kind: n for n, (_, _, m) in enumerate(every)}
    first = [every[n] for n in of_each_kind.values()]
    chosen = first + [m for n, m in enumerate(every) if n not in of_each_kind.values()]
    chosen = chosen[:count]
    for kernel in {k.source: k for k, _, _ in chosen}.values():
        said = verdict(checks[str(kernel.program.graph)], kernel.source)
        if isinstance(said, Rejected):
            faults.append(f"original {kernel.name}: {said.reason}")
    refused, passed, broken = Counter(), [], []
    for kernel, check, mutant in chosen:
        label = f"{kernel.name}: {mutant.kind}: {mutant.where}"
        try:
            said = verdict(check, mutant.source)
        except Exception as error:
            broken.append(f"{label}: {type(error).__name__}: {error}"[:400])
            continue
        if isinstance(said, Rejected):
            refused[mutant.kind] += 1
        else:
            passed.append(label)
    return {
        "originals": len({k.source for k, _, _ in chosen}),
        "faults": faults,
        "refused": refused,
        "passed": passed,
        "broken": broken,
    }


def main(count: int) -> None:
    """Print the tally as JSON."""
    print(json.dumps(tally(count)))
