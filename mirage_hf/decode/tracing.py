"""Trace the steps of a model that has no step program, find their kernels, and check them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import read_cache, windows_of
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import GRAIN
from mirage_hf.decode.traced_step import (
    Rings,
    TracedStep,
    TracedSteps,
    record_step,
    rings_variants,
)
from mirage_hf.errors import CodegenError, SearchError, VerificationError, described
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.trace.groups import Group
from mirage_hf.trace.plan import StepPlan
from mirage_hf.trace.record import Held, TraceError, Value
from mirage_hf.trace.terms import Term

#: Lengths of the texts whose next step is compared with stock's.
LENGTHS = (3, 6, 17)
#: How far logits may be from stock's, in units of the largest, by the dtype of the model.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class TracedBlock:
    """A program of a step, for the report.

    Attributes:
        name: The paths of its weights, with * for the number of a layer.
        count: How many groups of the step have it.
        rows: The number of rows.
        outcome: Its kernel, or why there is none.
    """

    name: str
    count: int
    rows: int
    outcome: Resolved | str


def trace_steps(
    model: Any, rows: Sequence[int], resolve: Callable[[KernelGraph], Resolved]
) -> tuple[TracedSteps | str, list[TracedBlock]]:
    """Trace a model's steps, and find and check their kernels.

    Args:
        model: The model, whose modules are stock's.
        rows: The numbers of rows.
        resolve: Finds the kernel of a program.

    Returns:
        The steps, or why there are none, and their programs.
    """
    blocks: list[TracedBlock] = []
    try:
        return _trace(model, rows, resolve, blocks), blocks
    except TraceError as error:
        return str(error), blocks


def _trace(
    model: Any,
    rows: Sequence[int],
    resolve: Callable[[KernelGraph], Resolved],
    blocks: list[TracedBlock],
) -> TracedSteps:
    config = model.config.get_text_config(decoder=True)
    masks = _or_raise(MaskPlan.of(config))
    windows = _or_raise(windows_of(DynamicCache(config=config), config.num_hidden_layers))
    _or_raise(masks.mismatch(windows))
    paths = {id(p): name for name, p in model.named_parameters()}
    found: dict[Any, Resolved | str] = {}
    plans: dict[tuple[int, Rings], StepPlan] = {}
    for batch in rows:
        for rings, sizes in rings_variants(windows):
            plan = StepPlan(record_step(model, masks, batch, windows, sizes), batch)
            kernels = _find_kernels(plan, resolve, found)
            if not kernels:
                raise TraceError("no product of its step has a kernel")
            plan.schedule(kernels)
            _check(model, plan, masks, batch, windows, sizes[0])
            plans[batch, rings] = plan
        blocks += _described(plan, found, paths, batch)
    used = {id(k) for k in found.values() if isinstance(k, Resolved) and k.runs_kernel}
    return TracedSteps(plans, len(used), _bytes_read(plan, model))


def _or_raise(x: Any) -> Any:
    if isinstance(x, str):
        raise TraceError(x)
    return x


def _find_kernels(
    plan: StepPlan,
    resolve: Callable[[KernelGraph], Resolved],
    found: dict[Any, Resolved | str],
) -> dict[Group, Any]:
    """Resolve each different program once. Return what runs each group that has a kernel."""
    kernels: dict[Group, Any] = {}
    for group, program in plan.programs.items():
        key = str(program.graph)
        if key not in found:
            try:
                found[key] = resolve(program.graph)
            except (SearchError, VerificationError, CodegenError) as error:
                found[key] = f"no kernel: {error}"
        kernel = found[key]
        if isinstance(kernel, Resolved) and kernel.runs_kernel:
            kernels[group] = kernel.run
    return kernels


# -- the check -------------------------------------------------------------------------------------


def _check(
    model: Any,
    plan: StepPlan,
    masks: MaskPlan,
    batch: int,
    windows: Sequence[int | None],
    capacity: int,
) -> None:
    """Compare steps after texts of several lengths with stock's steps.

    Raises:
        TraceError: They differ.
    """
    device, config = model.device, model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(batch)
    for length in LENGTHS:
        ids = torch.randint(0, config.vocab_size, (batch, length + 1), generator=generator)
        ids = ids.to(device)
        padding = torch.arange(batch, device=device) % min(length, 3)
        try:
            wanted, ours = _steps(model, plan, ids, padding, windows, capacity)
        except Exception as error:  # stock's forward may raise anything
            raise TraceError(f"the check of a step raised {described(error)}") from None
        tolerance = TOLERANCE.get(wanted.dtype, 0.0)
        error = (wanted - ours).abs().max().item()
        if not error <= tolerance * max(wanted.abs().max().item(), 1e-6):
            raise TraceError(
                f"the traced step of {batch} rows after {length} tokens is {error:.1e} from stock's "
                f"logits, whose largest is {wanted.abs().max().item():.1e}"
            )


def _steps(
    model: Any,
    plan: StepPlan,
    ids: Tensor,
    padding: Tensor,
    windows: Sequence[int | None],
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """Return the logits of stock's step and of ours after all but the last token."""
    batch, length = ids.shape[0], ids.shape[1] - 1
    slots = torch.arange(length + 1, device=ids.device)[None]
    mask = (slots >= padding[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    is_padded = bool(padding.any())
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))

    def stock(first: int, last: int) -> Any:
        kwargs = {"attention_mask": mask[:, :last]} if is_padded else {}
        return model(
            input_ids=ids[:, first:last],
            position_ids=positions[:, first:last],
            past_key_values=cache,
            use_cache=True,
            **kwargs,
        ).logits[:, -1]

    with torch.no_grad(), model._optimize_model_for_decode():
        logits = stock(0, length)
        block = CacheBlock(batch, capacity, tuple(windows), ids.device)
        lowest = padding[:, None] if is_padded else None
        block.begin(lowest)
        read_cache(block, cache)
        block.set_logits(logits)
        block.control.start(
            length=length,
            position=positions[:, length - 1 : length],
            lowest=lowest,
            budget=2,
            eos=None,
            pad=None,
        )
        block.control.ids.copy_(ids[:, length:])
        block.control.length.add_(1)
        block.control.position.add_(1)
        wanted = stock(length, length + 1)
        TracedStep(plan, block, graphs=False, graph_key=None)._forward()
    return wanted.float() if wanted.dtype == torch.float64 else wanted, block.logits


# -- for the report --------------------------------------------------------------------------------


def _described(
    plan: StepPlan, found: dict[Any, Resolved | str], paths: dict[int, str], rows: int
) -> Iterable[TracedBlock]:
    """Return the programs of a plan, those of several layers once."""
    counts: dict[tuple[str, Any], int] = {}
    for group in plan.groups:
        name = " + ".join(_weight_name(plan, p.operands[1], paths) for p in group.products)
        program = plan.programs.get(group)
        outcome = plan.reasons[group] if program is None else found[str(program.graph)]
        key = name, outcome if isinstance(outcome, str) else id(outcome)
        counts[key] = counts.get(key, 0) + 1
    by_id = {id(x): x for x in found.values()}
    return [
        TracedBlock(name, count, rows, by_id[what] if isinstance(what, int) else what)
        for (name, what), count in counts.items()
    ]


def _weight_name(plan: StepPlan, weight: Term, paths: dict[int, str]) -> str:
    tensor = _held(plan, weight)
    path = paths.get(id(tensor), "a constant")
    return re.sub(r"\.\d+\.", ".*.", path.removesuffix(".weight"))


def _held(plan: StepPlan, term: Term) -> Tensor:
    """Return the parameter that a weight is, or is a view of."""
    assert term.weight is not None
    source = term.weight.source
    while isinstance(source, Value):
        (source,) = plan.recording.nodes[source.node].operands()
    assert isinstance(source, Held)
    return source.tensor


def _bytes_read(plan: StepPlan, model: nn.Module) -> tuple[int, int]:
    """Return the bytes of products' weights that kernels read in a step, and of all products."""
    by_kernels = {g for g in plan.groups if any(u.program is plan.programs.get(g) for u in plan.units)}
    read = sum(_bytes(p) for g in by_kernels for p in g.products)
    total = sum(_bytes(p) for g in plan.groups for p in g.products)
    return read, total


def _bytes(product: Term) -> int:
    rows, columns = product.operands[1].dims
    return rows * columns * product.dtype.itemsize


