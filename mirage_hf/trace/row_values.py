"""Give each row its own value of a number that a model takes for all rows.

Models ask their cache how many tokens it holds, and compute positions and masks from one number.
In a step that verifies drafts each row has another one. While such a step is recorded, the model
sees one number. An op on it is recorded as an op on the numbers of all rows. When such a result
meets a tensor with rows, each row of the tensor meets the result of its own number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_aten = torch.ops.aten

#: Ops by which a tensor without rows gets them. The first number of the second argument is theirs.
_MAKE_ROWS = (_aten.expand.default, _aten.repeat.default)

_KEYS_OF_VMAP = (
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchVmapMode,
)


class UnknownRowsError(Exception):
    """An op for which it is not known where its operands have their rows."""


@contextmanager
def _vmap_inside_of_a_mode() -> Iterator[None]:
    """Let `torch.vmap` work inside of `__torch_dispatch__`, where torch excludes its keys."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _KEYS_OF_VMAP:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


class RowValues:
    """Follows what is computed of a number that is the same for all rows, and what has rows.

    Args:
        number: The number as the model sees it.
        numbers: The number of each row (rows, …), with the number's dims after the first.
        with_rows: The tensors that have rows.
    """

    def __init__(self, number: Tensor, numbers: Tensor, with_rows: Iterable[Tensor]):
        self.rows = len(numbers)
        #: By the id of what the model sees: the same of each row, in a first dim. Ids stay unique
        #: while the tensors live.
        self._by_row: dict[int, tuple[Tensor, Tensor]] = {id(number): (number, numbers)}
        self._with_rows: dict[int, Tensor] = {id(x): x for x in with_rows}

    def reads(self, args: Any) -> bool:
        """Return whether an operand was computed from the number, and has no rows."""
        return any(id(x) in self._by_row for x in tree_flatten(args)[0])

    def note(self, args: Any, outputs: Iterable[Any]) -> None:
        """Note that what is computed from tensors with rows has rows."""
        if any(id(x) in self._with_rows for x in tree_flatten(args)[0]):
            self._with_rows |= {id(x): x for x in outputs if isinstance(x, Tensor)}

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Any) -> Any:
        """Run an op that reads the number as ops on the numbers of all rows.

        Args:
            op: The op.
            args: Its arguments, as the model gives them.
            kwargs: Likewise.
            seen: What the op gives the model for them.

        Returns:
            What the model gets: tensors with rows, or `seen`.

        Raises:
            UnknownRowsError: It is not known where its operands have their rows.
        """
        if any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments):
            raise UnknownRowsError("it writes a tensor in place")
        makes_rows = op in _MAKE_ROWS and args[1][0] == self.rows
        if makes_rows:
            args = (args[0], [1, *args[1][1:]], *args[2:])
        leaves, form = tree_flatten((args, kwargs))
        meets_rows = makes_rows or any(self._has_rows(x) for x in leaves)
        tensors = [n for n, x in enumerate(leaves) if isinstance(x, Tensor)]
        given = [self._given(leaves[n]) for n in tensors]

        def of_row(*operands: Tensor) -> Any:
            own = list(leaves)
            for n, x in zip(tensors, operands, strict=True):
                own[n] = x
            args, kwargs = tree_unflatten(own, form)
            return op(*args, **kwargs)

        in_dims = tuple(dim for _, dim in given)
        with _vmap_inside_of_a_mode():
            made = torch.vmap(of_row, in_dims=in_dims)(*(x for x, _ in given))
        return tree_map(self._joined if meets_rows else self._kept, made, seen)

    def _given(self, x: Tensor) -> tuple[Tensor, int | None]:
        """Return an operand of all rows, and the dim of rows, None if it is the same for all."""
        if id(x) in self._by_row:
            return self._by_row[id(x)][1], 0
        if not self._has_rows(x):
            return x, None
        if x.dim() == 0 or x.shape[0] % self.rows:
            raise UnknownRowsError(f"a tensor of shape {tuple(x.shape)} has rows somewhere")
        return x.unflatten(0, (self.rows, -1)), 0

    def _has_rows(self, x: Any) -> bool:
        return id(x) in self._with_rows

    def _joined(self, made: Any, seen: Any) -> Any:
        """Return a result of each row as one with rows in its first dim."""
        if not isinstance(made, Tensor):
            return seen
        joined = made.flatten(0, 1) if made.dim() > 1 else made
        if joined.shape != seen.shape:
            raise UnknownRowsError(f"a tensor of shape {tuple(seen.shape)} has rows somewhere")
        self._with_rows[id(joined)] = joined
        return joined

    def _kept(self, made: Any, seen: Any) -> Any:
        """Keep a result of each row, and return what the model sees."""
        if isinstance(made, Tensor):
            self._by_row[id(seen)] = seen, made
        return seen
