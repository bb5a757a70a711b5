"""Experts of prompts in blocks of rows: they compute what each expert does for its tokens."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.trace.experts import row_layout as row_layout_module
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.experts.row_blocks import BlockSizes, RowBlocks, blocks_programs
from mirage_hf.trace.experts.row_layout import row_layout, row_sums
from tests.helpers import coded_experts, triton_interpreter
from tests.helpers.coded_experts import CODED
from tests.helpers.decode_states import assert_compiles_and_waits
from tests.trace.test_experts import CASES, built

EXPERTS, CHOSEN = 6, 2
#: Rows of a block: as in models, and others.
ROWS = (16, 64)
ROUTINGS = ("random", "one expert", "different experts", "outside")


def routed(tokens: int, routing: str, seed: int = 0) -> Tensor:
    """Return the experts (tokens, CHOSEN) of a routing. Those of a token are different ones."""
    draw = torch.Generator().manual_seed(seed)
    if routing == "one expert":
        return torch.tensor([[3, 5]]).repeat(tokens, 1)
    if routing == "different experts":
        return torch.arange(tokens * CHOSEN).view(tokens, CHOSEN) % EXPERTS
    index = torch.rand(tokens, EXPERTS, generator=draw).topk(CHOSEN)[1]
    if routing == "outside":
        none = torch.tensor([-1, EXPERTS, 2**31])
        is_none = torch.rand(index.shape, generator=draw) < 0.3
        index = torch.where(is_none, none[torch.randint(0, 3, index.shape, generator=draw)], index)
    return index


def blocks_of(
    form: ExpertsForm, dtype: torch.dtype, weights: torch.dtype, rows: int = 16
) -> RowBlocks:
    """Return blocks of rows whose programs torch runs."""
    sizes = BlockSizes(EXPERTS, CHOSEN, rows)
    programs = blocks_programs(form, sizes, dtype, weights)
    first, second = (partial(run_kernel_graph, program.graph) for program in programs)
    return RowBlocks(sizes, programs, (first, second), dtype, weights, skips_blocks=False)


def exact(plain: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what experts compute in float64. Those that do not exist add nothing."""
    is_expert = (index >= 0) & (index < EXPERTS)
    given = x.double(), index.where(is_expert, 0), weights.double().where(is_expert, 0.0)
    with torch.no_grad():
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](plain, *given)


def check(
    module: Any, plain: Any, dtype: torch.dtype, weights_dtype: torch.dtype, width: int
) -> None:
    """Compare blocks of rows with float64, for all routings and several numbers of tokens."""
    form = form_of(module, dtype)
    assert isinstance(form, ExpertsForm)
    cases = [(rows, *case) for rows in ROWS for case in zip((1, 48, 17, 47), ROUTINGS, strict=True)]
    cases.append((64, 192, "one expert"))
    for rows, tokens, routing in cases:
        blocks = blocks_of(form, dtype, weights_dtype, rows)
        assert blocks.sizes.tokens == 3 * rows >= tokens
        draw = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, width, generator=draw).to(dtype)
        weights = torch.rand(tokens, CHOSEN, generator=draw).to(weights_dtype)
        index = routed(tokens, routing)
        ours, wanted = blocks.run(form, x, index, weights), exact(plain, x, index, weights)
        assert ours.dtype is dtype
        allowed = 2e-2 if dtype is torch.bfloat16 else 1e-5
        assert (ours.double() - wanted).norm() <= allowed * wanted.norm(), (tokens, routing)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_blocks_compute_what_experts_do(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    module = built(name, dtypes[0])
    plain = built(name).double()
    plain.load_state_dict(module.state_dict())
    check(module, plain, *dtypes, width=16)


@pytest.mark.parametrize("name", CODED)
def test_blocks_of_codes_compute_what_decoded_experts_do(name: str) -> None:
    module, plain = CODED[name]()
    check(module, plain, torch.bfloat16, torch.bfloat16, coded_experts.width_of(name))


def wrong_layouts(seeds: range, device: str, by_kernel: bool) -> list[str]:
    """Return what is wrong with the layouts of random rows."""
    wrong = []
    for seed in seeds:
        for routing, tokens, size in itertools.product(ROUTINGS, (1, 5, 40, 48), ROWS):
            index = routed(tokens, routing, seed=seed).to(device)
            weights = torch.rand(index.shape, device=device)
            make = row_layout_module.by_kernel if by_kernel else row_layout
            rows = make(index, weights, EXPERTS, size)
            is_kept = (index >= 0) & (index < EXPERTS)
            kept = rows.places[is_kept]
            used = (kept // size).unique()
            numbers = torch.arange(tokens, device=device)[:, None].expand(index.shape)
            facts = {
                "shape": rows.tokens.shape == rows.weights.shape == (2 * EXPERTS, size),
                "places are shared": kept.unique().numel() == kept.numel(),
                "experts": torch.equal(rows.experts[kept // size], index[is_kept]),
                "tokens": torch.equal(rows.tokens.view(-1)[kept], numbers[is_kept]),
                "other places": (rows.tokens == -1).sum() == rows.tokens.numel() - kept.numel(),
                "weights": torch.equal(rows.weights.view(-1)[kept], weights[is_kept]),
                "kept": torch.equal(rows.is_kept, is_kept),
                "first blocks": torch.equal(used, torch.arange(len(used), device=device)),
                "others": (rows.experts[len(used) :] == EXPERTS).all(),
                "places exist": torch.equal(
                    rows.places[~is_kept].unique().cpu(), torch.zeros(1).long()[: (~is_kept).any()]
                ),
            }
            wrong += [
                f"{name}: {tokens} tokens, {routing}" for name, is_so in facts.items() if not is_so
            ]
    return wrong


def test_each_row_lies_in_a_block_of_its_expert() -> None:
    assert not wrong_layouts(range(5), "cpu", by_kernel=False)


def test_the_kernel_lays_rows_out_too() -> None:
    assert not triton_interpreter.run(
        "import json\nfrom tests.trace.test_row_blocks import wrong_layouts\n"
        "print(json.dumps(wrong_layouts(range(3), 'cpu', by_kernel=True)))"
    )


@pytest.mark.parametrize("sizes", [(1024, 8, 128, 16), (8192, 8, 128, 64), (37, 3, 5, 16)])
def test_the_kernel_compiles_and_waits_before_it_reads(sizes: tuple[int, int, int, int]) -> None:
    pytest.importorskip("triton")
    what, float_, long = row_layout_module.layout_launch(*sizes), torch.bfloat16, torch.int64
    for index in (torch.int32, long):
        dtypes = [index, float_, torch.int32, long, long, float_, long, torch.bool]
        assert_compiles_and_waits(what, dtypes)


@pytest.mark.gpu
def test_the_kernel_lays_rows_out_on_a_gpu() -> None:
    assert not wrong_layouts(range(200), "cuda", by_kernel=True)


def wrong_sums(seeds: range, device: str) -> list[str]:
    """Return where the kernel's sums of random rows are not torch's."""
    wrong = []
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        for routing, tokens, width in itertools.product(ROUTINGS, (1, 40), (16, 48, 1040)):
            index = routed(tokens, routing, seed=seed)
            rows = row_layout(index, torch.rand(index.shape), EXPERTS, 16)
            y = torch.randn(rows.tokens.numel(), width, generator=draw)
            y[rows.tokens.view(-1) == -1] = torch.nan  # nothing lies there
            for kept, dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
                given = y.to(kept)
                wanted = row_sums(given, rows, tokens, dtype)
                x, places, is_kept = (t.to(device) for t in (given, rows.places, rows.is_kept))
                found = row_layout_module.sums_by_kernel(x, places, is_kept, dtype).cpu()
                close = max(torch.finfo(kept).eps, torch.finfo(dtype).eps)
                if not torch.allclose(found.float(), wanted.float(), rtol=close, atol=4 * close):
                    wrong.append(f"{routing}: {tokens} × {width}, {kept} → {dtype}")
    return wrong


def test_the_kernel_adds_rows_up() -> None:
    assert not triton_interpreter.run(
        "import json\nfrom tests.trace.test_row_blocks import wrong_sums\n"
        "print(json.dumps(wrong_sums(range(1), 'cpu')))"
    )


def test_the_kernel_of_sums_compiles_and_waits_before_it_reads() -> None:
    pytest.importorskip("triton")
    for kept in (torch.float32, torch.bfloat16):
        dtypes = [kept, torch.int64, torch.bool, torch.bfloat16]
        assert_compiles_and_waits(row_layout_module.sum_launch(128, 8, 2048), dtypes)


@pytest.mark.gpu
def test_the_kernel_adds_rows_up_on_a_gpu() -> None:
    assert not wrong_sums(range(20), "cuda")


def test_tokens_of_any_number_and_order_of_memory() -> None:
    form = form_of(built("gate and up"), torch.float32)
    assert isinstance(form, ExpertsForm)
    blocks = blocks_of(form, torch.float32, torch.float32)
    x, index, weights = torch.randn(48, 16), routed(48, "random"), torch.rand(48, CHOSEN)
    wanted = blocks.run(form, x, index, weights)
    turned = (x.T.contiguous().T, index.T.contiguous().T, weights.T.contiguous().T)
    torch.testing.assert_close(blocks.run(form, *turned), wanted)
    for tokens in (1, 7, 47):
        some = (t[:tokens] for t in (x, index, weights))
        torch.testing.assert_close(blocks.run(form, *some), wanted[:tokens])


def test_kernels_of_blocks_skip_those_without_an_expert() -> None:
    wrong = triton_interpreter.run(
        "from tests.trace.test_row_blocks import wrong_kernels\n"
        "import json\nprint(json.dumps(wrong_kernels()))"
    )
    assert not wrong


def test_kernels_of_blocks_sum_several_groups_of_small_floats() -> None:
    errors = triton_interpreter.run(
        "from tests.trace.test_row_blocks import errors_of_small_floats\n"
        "import json\nprint(json.dumps(errors_of_small_floats()))"
    )
    assert len(errors) == 3 * 2 and max(errors.values()) <= 1e-2, errors


def errors_of_small_floats() -> dict[str, float]:
    """Return the relative errors of kernels of MXFP4 experts, by linears and routing.

    Biases and the clamped function of gate and up are parts of the first kernel.
    """
    from mirage_hf.codegen import compile as compiler
    from mirage_hf.codegen import triton
    from tests.helpers.scaled_programs import scaled_form, scaled_schedules

    module, _ = CODED["Mxfp4GptOssExperts"]()
    dtype, width = torch.bfloat16, coded_experts.width_of("Mxfp4GptOssExperts")
    form = form_of(module, dtype)
    assert isinstance(form, ExpertsForm)
    by_torch = blocks_of(form, dtype, dtype)
    sizes, programs = by_torch.sizes, by_torch.programs
    runs, skips = [], []
    for program in programs:
        ugraph = scaled_form(program.graph)
        staged = (s for s in scaled_schedules(ugraph) if s.num_stages > 1)
        schedule = next(s for s in staged if s.tiles["k"] == 2)
        made = triton.generate(ugraph, [schedule])
        assert "e2m1_pairs(tl" in made.source
        skips.append("tl.range(0, tl.where(" in made.source)
        runs.append(compiler.load(made.source, made.digest).run)
    assert skips == [False, True]  # the first linear holds both of its groups at once
    found = {}
    for number, routing in itertools.product((0, 1, 2), ("random", "outside")):
        chosen = [*by_torch.runs] if number < 2 else runs
        chosen[number % 2] = runs[number % 2]
        runs_of_both = chosen[0], chosen[1]
        blocks = RowBlocks(sizes, programs, runs_of_both, dtype, dtype, skips_blocks=chosen is runs)
        x, weights = torch.randn(21, width).to(dtype), torch.rand(21, CHOSEN).to(dtype)
        given = form, x, routed(21, routing), weights
        ours, wanted = blocks.run(*given).float(), by_torch.run(*given).float()
        what = "both linears" if number == 2 else f"linear {number}"
        found[f"{what}, {routing}"] = float((ours - wanted).norm() / wanted.norm())
    return found


def wrong_kernels() -> list[str]:
    """Return which kernels, run by Triton's interpreter, are wrong."""
    from mirage_hf.codegen import compile as compiler
    from mirage_hf.codegen import triton
    from mirage_hf.codegen.placement import place_kernels
    from mirage_hf.search.engine import search
    from mirage_hf.tune.space import schedules
    from tests.helpers.indexed_programs import SEARCH

    found, dtype = [], torch.float16
    for name in ("gate and up", "transposed, interleaved, biases"):
        module = built(name, dtype)
        form = form_of(module, dtype)
        assert isinstance(form, ExpertsForm)
        sizes = BlockSizes(EXPERTS, CHOSEN, 16)
        programs = blocks_programs(form, sizes, dtype, dtype)
        index = routed(21, "random")
        x, weights = torch.randn(21, 16).to(dtype), torch.rand(21, CHOSEN).to(dtype)
        wanted = blocks_of(form, dtype, dtype).run(form, x, index, weights)
        runs = []
        for program in programs:
            ugraph = search(program.graph, SEARCH)[0][0].ugraph
            kernels = [schedules(op)[0] for op in place_kernels(ugraph)]
            made = triton.generate(ugraph, kernels)
            runs.append(compiler.load(made.source, made.digest).run)
        blocks = RowBlocks(sizes, programs, (runs[0], runs[1]), dtype, dtype, skips_blocks=True)
        ours = blocks.run(form, x, index, weights)
        if not (ours.float() - wanted.float()).norm() <= 1e-2 * wanted.float().norm():
            found.append(name)
    return found
