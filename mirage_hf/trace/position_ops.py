"""Find the ops of a step that read nothing but the positions of its tokens, such as those of RoPE.

Their results at every position of a cache are computed once. Then a step takes rows of tables.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mirage_hf.errors import described
from mirage_hf.trace.binding import Binding, Tensors
from mirage_hf.trace.record import Held, Input, Recording, Value, leaves
from mirage_hf.trace.sizes import Size, fixed_shape
from mirage_hf.trace.step_ops import StepOp, reads
from mirage_hf.trace.terms import Terms

_log = logging.getLogger("mirage_hf")

#: The input that holds the positions: (batch, 1).
POSITION = Input("position")

#: Elements of one result that are computed at once.
_AT_ONCE = 1 << 20

#: Ops that look up rows. A table of the model may have fewer rows than the cache has slots.
_LOOK_UPS = frozenset(f"aten.{x}" for x in ("embedding", "gather", "index", "index_select", "take"))

#: Seed of the positions at which tables are compared with the ops.
_SEED = 0


@dataclass(frozen=True, eq=False)
class PositionOps:
    """Ops that read positions and constants.

    Attributes:
        recording: The recording.
        terms: Its terms.
        step_ops: The ops in order, after those that give their constants.
        results: Their results that other ops read: floats (batch, …), a row for each sequence.
        nodes: The numbers of the ops that nothing but these results needs.
    """

    recording: Recording
    terms: Terms
    step_ops: tuple[StepOp, ...]
    results: tuple[Value, ...]
    nodes: frozenset[int]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the tensors that the ops read. A change in place gives another one."""
        read = (x for step_op in self.step_ops if step_op.node for x in step_op.node.operands)
        return tuple(x.tensor._version for x in read if isinstance(x, Held))

    def at(self, positions: Tensor) -> list[Tensor]:
        """Return the results at positions (batch, 1), a row (batch, width) for each sequence."""
        inputs = {POSITION.name: positions}
        binding = Binding(self.recording, self.terms, {}, {}, inputs, ())
        tensors: Tensors = {}
        for step_op in self.step_ops:
            binding.run_op(step_op, tensors)
        return [tensors[value].flatten(1) for value in self.results]

    @property
    def have_one_form(self) -> bool:
        """Whether all results have rows of one width and one dtype."""
        metas = [self.recording.meta(value) for value in self.results]
        return len({(math.prod(meta.shape), meta.dtype) for meta in metas}) == 1

    @property
    def width(self) -> int:
        """The elements of a row of the first result."""
        return math.prod(self.recording.meta(self.results[0]).shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first result."""
        return self.recording.meta(self.results[0]).dtype

    def fill(self, tables: Tensor, batch: int) -> bool:
        """Fill the first tables (tables, count, width) with the results at 0, 1, … count − 1.

        Further tables are left as they are.

        Returns:
            Whether rows of the tables are what the ops give, bit by bit.
        """
        _, count, width = tables.shape
        positions = torch.arange(count, device=tables.device)
        try:
            for chunk in positions.split(max(1, _AT_ONCE // (batch * width))):
                results = torch.vmap(self.at)(chunk[:, None, None].expand(-1, batch, 1))
                for table, x in zip(tables, results, strict=False):
                    if not torch.equal(x, x[:, :1].expand_as(x)):
                        return False  # a row depends on the others
                    table[chunk] = x[:, 0]
            return self._gives(tables, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an op that cannot be run for many positions at once
            _log.info("no tables of positions: %s", described(error))
            return False

    def _gives(self, tables: Tensor, batch: int) -> bool:
        """Return whether the ops give rows of tables, at positions that differ between rows."""
        _, count, _ = tables.shape
        draw = torch.Generator().manual_seed(_SEED)
        last = torch.full((batch, 1), count - 1)
        tried = [last, *(torch.randint(count, (batch, 1), generator=draw) for _ in range(2))]
        return all(
            torch.equal(x, table[positions[:, 0]])
            for positions in (each.to(tables.device) for each in tried)
            for x, table in zip(self.at(positions), tables, strict=False)
        )


def find_position_ops(
    recording: Recording, terms: Terms, step_ops: Sequence[StepOp]
) -> PositionOps | None:
    """Return the ops among step ops that read positions and constants alone, if there are any.

    Parameters are no constants: a step reads them as they are.
    """
    known: dict[Value, bool] = {}  # True if the tensor depends on positions
    chosen: list[StepOp] = []
    for step_op in step_ops:
        if not _may_be_computed_once(step_op):
            continue
        assert step_op.node is not None
        operands = step_op.node.operands
        if not all(x == POSITION or x in known or _is_constant(recording, x) for x in operands):
            continue
        reads_position = any(x == POSITION or known.get(x, False) for x in operands)  # type: ignore[arg-type]
        known |= {Value(step_op.nodes[0], n): reads_position for n in range(_outputs(step_op))}
        chosen.append(step_op)
    others = [x for x in step_ops if x not in chosen]
    read = dict.fromkeys(x for x in _read_by(others, terms) if known.get(x, False))
    results = [x for x in read if _has_rows(recording, x)]
    if not results:
        return None
    run = _with_makers(chosen, {x.node for x in results}, terms)
    kept = _with_makers(chosen, {x.node for x in read.keys() - set(results)}, terms)
    nodes = {x.nodes[0] for x in run if x not in kept and known[Value(x.nodes[0])]}
    return PositionOps(recording, terms, tuple(run), tuple(results), frozenset(nodes))


def _with_makers(step_ops: Sequence[StepOp], nodes: Collection[int], terms: Terms) -> list[StepOp]:
    """Return the ops of some nodes, and those that make what they read, in order."""
    needed, found = set(nodes), []
    for step_op in reversed(step_ops):
        if step_op.nodes[0] in needed:
            needed |= {x.node for x in _read_by([step_op], terms)}
            found.append(step_op)
    return found[::-1]


def _outputs(step_op: StepOp) -> int:
    assert step_op.node is not None
    return len(step_op.node.outputs)


def _is_constant(recording: Recording, x: object) -> bool:
    """Return whether an operand is a tensor that no step writes, and whose changes are noticed."""
    if not isinstance(x, Held) or isinstance(x.tensor, nn.Parameter) or x.tensor.is_inference():
        return False
    return recording.meta(x).storage not in recording.changing


def _may_be_computed_once(step_op: StepOp) -> bool:
    """Return whether a step op is a torch op that gives the same for equal operands of any step."""
    node = step_op.node
    if node is None or node.written or not node.operands:
        return False
    if not node.name.startswith("aten.") or node.name in _LOOK_UPS:
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.op.tags
    return not is_random and not any(isinstance(x, Size) for x in leaves((node.args, node.kwargs)))


def _read_by(step_ops: Collection[StepOp], terms: Terms) -> Iterator[Value]:
    """Yield the recorded tensors that step ops read."""
    for step_op in step_ops:
        yield from (x for x in reads(step_op, terms) if isinstance(x, Value))


def _has_rows(recording: Recording, value: Value) -> bool:
    """Return whether a tensor has a row of floats for each sequence."""
    meta, batch = recording.meta(value), recording.meta(POSITION).shape[0]
    shape = fixed_shape(meta)
    is_float = meta.dtype.is_floating_point
    return is_float and shape is not None and len(shape) > 1 and shape[0] == batch
