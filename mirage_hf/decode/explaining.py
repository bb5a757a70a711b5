"""Explain what a decoding step of a model would run, without weights and without a search."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import rings_variants
from mirage_hf.decode.sources import decoder_config
from mirage_hf.decode.step_inputs import axes_of_positions, gives_positions
from mirage_hf.decode.step_recording import record_step
from mirage_hf.errors import MirageError
from mirage_hf.formats.config_bytes import CheckpointLayout, WeightLayout, checkpoint_layout
from mirage_hf.gpus import current_gpu
from mirage_hf.trace.groups import Group
from mirage_hf.trace.record import VIEWS
from mirage_hf.trace.regions import Region
from mirage_hf.trace.step_ops import RegionRun
from mirage_hf.trace.step_plan import StepPlan, weight_bytes
from mirage_hf.trace.term import Term
from mirage_hf.trace.weight_names import common_module, weight_path

#: Returns how a checkpoint stores the weight of a linear, by its path. None: as it is.
_Stored = Callable[[str], "WeightLayout | None"]


@dataclass(frozen=True)
class Explained:
    """One kernel of a step, or one torch op, with how many of it there are.

    Attributes:
        module: The module whose weights it reads, with * for the number of a layer.
        what: The weights that it reads, or the name of the torch op.
        ops: What it computes, as ops of the op table.
        count: How many of it a step has.
        bytes: Bytes of weights that one of it reads.
        why: Why it has no kernel, or "".
    """

    module: str
    what: str
    ops: str
    count: int
    bytes: int = 0
    why: str = ""

    @property
    def microseconds(self) -> float:
        """The time to read its weights or state once, at the rate of the present GPU or an H200."""
        return self.bytes / current_gpu().bandwidth * 1e6


def explain_step(model: Any, rows: int = 1) -> tuple[list[Explained], list[Explained]]:
    """Return the kernels of a model's step and its torch ops.

    Args:
        model: A model, on any device. Weights are not read, so they may be on the meta device.
        rows: The number of sequences.

    Raises:
        TraceError: The step cannot be traced. Then generate runs stock's steps, or the model's own
            forward in a CUDA graph.
    """
    plan = planned_step(model, rows)
    kernels = _kernels(plan, model)
    _schedule(plan, dict.fromkeys(plan.regions_to_run(), RegionRun(_never_run)))
    return kernels, _torch_ops(plan)


def planned_step(model: Any, rows: int = 1) -> StepPlan:
    """Return the plan of a step whose kernels were not searched, as if each was found.

    The arguments and errors are those of `explain_step`.
    """
    config = decoder_config(model)
    masks = MaskPlan.of(config)
    if isinstance(masks, str):
        raise MirageError(f"its steps cannot be traced: {masks}")
    ((_, windows, sizes), *_) = rings_variants((None,) * config.num_hidden_layers)
    axes = axes_of_positions(model)
    recording = record_step(
        model, masks, rows, windows, sizes, axes, gives_positions=gives_positions(model)
    )
    plan = StepPlan(recording, rows)
    _schedule(plan)
    return plan


def _schedule(plan: StepPlan, regions: Mapping[Region, RegionRun] | None = None) -> None:
    """Schedule a plan as if each of its products and attentions had a kernel."""
    groups = dict.fromkeys(plan.programs, _never_run)
    attention = dict.fromkeys(plan.attentions, lambda slots: _never_run)
    plan.schedule(groups, attention, regions or {})


def _never_run(operands: Any) -> Any:
    raise AssertionError("a plan that explains is not run")


def layout_of(model: Any) -> CheckpointLayout | None:
    """Return how the checkpoint of a model stores its weights, None if it is not quantized."""
    head = model.get_output_embeddings()
    path = next((name for name, m in model.named_modules() if m is head), "lm_head")
    return checkpoint_layout(model.config, path)


def _kernels(plan: StepPlan, model: Any) -> list[Explained]:
    paths = {id(p): name for name, p in model.named_parameters()}
    layout = layout_of(model)
    tables = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}

    def stored(path: str) -> WeightLayout | None:
        # a head that shares the table of tokens is not quantized
        return None if layout is None or path in tables else layout.of(path)

    counts: Counter[Explained] = Counter()
    for group in plan.groups:
        counts[_group(plan, group, paths, stored)] += 1
    for one in plan.attentions:
        ops = "append, softmax, products"
        ops = f"rope, {ops}" if one.q.cos is not None else ops
        ops = f"rms_norm, {ops}" if one.q.norm is not None else ops
        what = f"{one.q.heads} and {one.k.heads} heads of {one.head_dim}"
        counts[Explained("attention", what, ops, 1)] += 1
    for region in plan.regions_to_run():
        ops = ", ".join(dict.fromkeys(op.name for op in region.graph.ops))
        if region.state is None:
            where = plan.recording.nodes[region.nodes[0]].where
            counts[Explained(region.kind, where, ops, 1, region.reads)] += 1
            continue
        state = region.graph.outputs[0]
        size = 2 * math.prod(state.dims) * state.dtype.itemsize  # it is read and written
        counts[Explained("state", region.state.name.rpartition(".")[0], ops, 1, size)] += 1
    return _counted(counts)


def _group(plan: StepPlan, group: Group, paths: dict[int, str], stored: _Stored) -> Explained:
    names = [weight_path(plan, product.operands[1], paths) for product in group.products]
    module, parts = common_module(names)
    program = plan.programs.get(group)
    ops = [] if program is None else [op.name for op in program.graph.ops if op.name != "concat"]
    pairs = zip(group.products, names, strict=True)
    size = sum(_checkpoint_bytes(product, stored(name)) for product, name in pairs)
    why = "" if program is not None else plan.reasons[group]
    module = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)
    return Explained(module, parts, ", ".join(dict.fromkeys(ops)), 1, size, why)


def _checkpoint_bytes(product: Term, stored: WeightLayout | None) -> int:
    """Return the bytes that the checkpoint has for the weight of a product."""
    weight = product.operands[1]
    if stored is None or weight.weight.codes:
        return weight_bytes(product)
    columns, rows = weight.dims
    return stored.bytes_of(rows, columns)


def _torch_ops(plan: StepPlan) -> list[Explained]:
    counts: Counter[Explained] = Counter()
    for step_op in plan.step_ops:
        node = step_op.node
        if node is not None and node.name not in VIEWS:
            counts[Explained(node.where, node.name.partition(".")[2], "", 1)] += 1
    return _counted(counts)


def _counted(counts: Counter[Explained]) -> list[Explained]:
    return [
        Explained(e.module, e.what, e.ops, count, e.bytes, e.why) for e, count in counts.items()
    ]


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """Return the model of a config on the meta device."""
    heads: list[Any] = [
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForSpeechSeq2Seq,
        transformers.AutoModelForCausalLM,
    ]
    if not config.is_encoder_decoder:
        heads.reverse()
    known = (head for head in heads if type(config) in head._model_mapping)
    kind = next(known, transformers.AutoModelForImageTextToText)
    with torch.device("meta"):
        return kind.from_config(config, dtype=dtype).eval()
