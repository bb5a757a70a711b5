"""Integers that a model reads on the host, such as the number of tokens in its cache.

While a step is recorded, such an integer is a symbol of torch. An op that takes it is recorded as
ops that read it on the device. Branches are followed, and hold up to some value of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import sympy
import torch
from torch import SymInt, Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

#: The greatest value up to which branches are followed.
MOST = 1 << 20

_aten = torch.ops.aten


class HostValues:
    """The symbols of a recording.

    Attributes:
        shape_env: Makes them, and knows which branches were taken.
    """

    def __init__(self) -> None:
        self.shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self._tensors: dict[sympy.Symbol, Tensor] = {}

    @property
    def has_symbols(self) -> bool:
        """Whether some op may get a symbol."""
        return bool(self._tensors)

    def symbol(self, tensor: Tensor, value: int) -> SymInt:
        """Return a symbol for what a tensor of one element holds.

        Args:
            tensor: The tensor.
            value: What branches take it to be.
        """
        source = ConstantSource(f"host{len(self._tensors)}")
        symbol = self.shape_env.create_symbol(value, source, DimDynamic.DYNAMIC)
        self._tensors[symbol] = tensor
        made = self.shape_env.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(made, SymInt)
        return made

    def reach(self) -> float:
        """Return up to which value from 1 on all branches hold."""
        if not self.shape_env.guards:
            return math.inf
        values = np.arange(1, MOST)
        holds = np.ones(len(values), bool)
        for guard in self.shape_env.guards:
            (symbol,) = guard.expr.free_symbols
            holds &= sympy.lambdify(symbol, guard.expr, "numpy")(values)
        return math.inf if holds.all() else int(holds.argmin())

    def on_device(self, value: SymInt) -> Tensor:
        """Return what a symbol is a linear function of, on the device: a tensor of one element."""
        expression = value.node.expr
        (symbol,) = expression.free_symbols
        factor, rest = sympy.Poly(expression, symbol).all_coeffs()  # fails unless it is linear
        tensor = self._tensors[symbol]
        scaled = tensor if factor == 1 else tensor * int(factor)
        return scaled if rest == 0 else scaled + int(rest)

    def lowered(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that takes symbols as ops that read them on the device.

        Returns:
            What the op returns, NotImplemented if it is no op of the table.
        """
        if op in _OPS:
            return _OPS[op](self, *args, **kwargs)
        if op.overloadpacket not in _POINTWISE:
            return NotImplemented
        given = [self.on_device(x).reshape(()) if isinstance(x, SymInt) else x for x in args]
        return op.overloadpacket(*given, **kwargs)

    def _arange(self, *args: Any, **kwargs: Any) -> Any:
        start, end, step = (*args, 1)[:3] if len(args) > 1 else (0, *args, 1)
        count = _fixed((end - start) // step) if isinstance(step, int) else None
        if count is None or not isinstance(start, SymInt):
            return NotImplemented
        kwargs = {"dtype": torch.int64} | {k: x for k, x in kwargs.items() if x is not None}
        return (torch.arange(0, count * step, step, **kwargs) + self.on_device(start)).to(
            kwargs["dtype"]
        )

    def _slice(
        self, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
    ) -> Any:
        start = 0 if start is None else start
        count = None if end is None else _fixed(end - start)
        if count is None or step != 1 or not isinstance(start, SymInt):
            return NotImplemented
        places = self.on_device(start)
        if count > 1:
            places = torch.arange(count, device=x.device) + places
        return torch.index_select(x, dim, places)

    def _select(self, x: Tensor, dim: int, index: SymInt) -> Any:
        return torch.index_select(x, dim, self.on_device(index)).squeeze(dim)

    def _full(self, size: Any, value: Any, **kwargs: Any) -> Any:
        if not isinstance(value, SymInt) or any(isinstance(n, SymInt) for n in size):
            return NotImplemented
        kwargs["dtype"] = kwargs.get("dtype") or torch.int64
        return torch.zeros(size, **kwargs) + self.on_device(value).to(kwargs["dtype"])

    def _scalar_tensor(self, value: SymInt, **kwargs: Any) -> Any:
        return self._full((), value, **kwargs).reshape(())


def _fixed(count: Any) -> int | None:
    """Return an integer that depends on no symbol, else None."""
    if isinstance(count, int):
        return count
    expression = count.node.expr
    return None if expression.free_symbols else int(expression)


_OPS: dict[Any, Callable[..., Any]] = {
    _aten.arange.default: HostValues._arange,
    _aten.arange.start: HostValues._arange,
    _aten.arange.start_step: HostValues._arange,
    _aten.slice.Tensor: HostValues._slice,
    _aten.select.int: HostValues._select,
    _aten.full.default: HostValues._full,
    _aten.scalar_tensor.default: HostValues._scalar_tensor,
}

_POINTWISE = frozenset(
    getattr(_aten, name)
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "remainder")
)
