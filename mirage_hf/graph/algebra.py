"""Algebras that interpret graphs: torch numbers here, finite fields in `verify/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from mirage_hf.ops import table


class Algebra(Protocol):
    """The operations on arrays that run a graph.

    In a block graph an array has one dim per axis of the graph, of size 1 if it does not carry the
    axis.
    """

    def arrange(self, x: Any, order: Sequence[int], shape: Sequence[int]) -> Any:
        """Permute the dims of an operand or array, then reshape it."""

    def join(self, xs: Sequence[Any], dim: int) -> Any:
        """Concatenate arrays along a dim."""

    def cut(self, x: Any, slices: tuple[slice, ...]) -> Any:
        """Return the part of an array at `slices`."""

    def empty(self, shape: Sequence[int]) -> Any:
        """Return an array without values, to be filled by `put`."""

    def full(self, shape: Sequence[int], value: float) -> Any:
        """Return an array whose elements are all `value`."""

    def put(self, out: Any, slices: tuple[slice, ...], x: Any) -> None:
        """Write `x` into the part of `out` at `slices`."""

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> Any:
        """Compute an elementwise op of the table on arrays and numbers."""

    def reduce(self, kind: str, x: Any, dim: int) -> Any:
        """Reduce a dim to size 1 by "sum" or "max"."""

    def accumulate(self, kind: str, total: Any, x: Any) -> Any:
        """Add an array to a running "sum" or "max". `total` is None at the start."""

    def rescale(self, total: Any, old: Any, new: Any) -> Any:
        """Return total · e^(old − new), where `new` ≥ `old` is a running maximum."""

    def shift(self, maximum: Any) -> Any:
        """Return the number that a tile subtracts: the running maximum, or 0 while it is −inf."""

    def bounds(
        self, lo: Any, hi: Any, order: Sequence[int], shape: Sequence[int], dim: int, size: int
    ) -> Any:
        """Return 1 where lo ≤ index along `dim` < hi, else 0.

        Args:
            lo: The lower bounds, whole numbers. They are arranged first, as by `arrange`.
            hi: The upper bounds, like `lo`.
            order: The order of dims that they are permuted to.
            shape: The shape that they are reshaped to.
            dim: The bounded dim.
            size: Its size.
        """

    def take(self, x: Any, index: Any, dim: int) -> Any:
        """Return the elements of an operand that an index chooses along a dim.

        The index's dims replace `dim`. An index out of range gives 0.
        """

    def contract(self, a: Any, b: Any, dim: int) -> Any:
        """Return the sum of a·b over `dim`, or None if the algebra has no fast way for it."""


class TorchAlgebra:
    """The algebra of torch tensors of one compute dtype."""

    def __init__(
        self,
        compute: torch.dtype = torch.float32,
        mma: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        """Make an algebra.

        Args:
            compute: The dtype of all arrays.
            mma: The input dtype of the tensor cores whose rounding of factors is imitated. None:
                factors are not rounded.
            device: The device of all arrays.
        """
        self.compute, self.mma, self.device = compute, mma, device
        #: By address: arrays that rounding to `mma` leaves as they are. They live as long as this.
        self._exact: dict[int, torch.Tensor] = {}

    def note_exact(self, x: torch.Tensor) -> None:
        """Note that an array and its views hold nothing that rounding to `mma` would change."""
        self._exact[x.untyped_storage().data_ptr()] = x

    def arrange(self, x: torch.Tensor, order: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Convert to the compute dtype, permute and reshape."""
        y = x.to(self.compute).permute(tuple(order)).reshape(tuple(shape))
        if x.dtype == self.mma or self._is_exact(x):
            self.note_exact(y)
        return y

    def join(self, xs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Concatenate along a dim."""
        return torch.cat(list(xs), dim)

    def cut(self, x: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a view of a part."""
        return x[slices]

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Return NaNs, so that elements that are never put are noticed."""
        return torch.full(tuple(shape), float("nan"), dtype=self.compute, device=self.device)

    def full(self, shape: Sequence[int], value: float) -> torch.Tensor:
        """Return a tensor of one number."""
        return torch.full(tuple(shape), value, dtype=self.compute, device=self.device)

    def put(self, out: torch.Tensor, slices: tuple[slice, ...], x: torch.Tensor) -> None:
        """Write into a part."""
        out[slices] = x

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> torch.Tensor:
        """Compute an op by its oracle. Numbers are tensors without dims."""
        tensors = [
            a.to(self.compute)
            if isinstance(a, torch.Tensor)
            else torch.tensor(a, dtype=self.compute, device="cpu")
            for a in args
        ]
        return table.lookup(fn).oracle(*tensors, **attrs)

    def reduce(self, kind: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Reduce a dim to size 1."""
        return table.lookup("reduction").oracle(x, dim=dim, kind=kind)

    def accumulate(self, kind: str, total: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """Add to a running sum or maximum."""
        if total is None:
            return x
        return total + x if kind == "sum" else torch.maximum(total, x)

    def rescale(self, total: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return total · e^(old − new). From −inf to −inf the factor is 1: nothing was summed."""
        factor = torch.where(old == new, 1.0, torch.exp(old - new))
        return total * factor.to(total.dtype)

    def shift(self, maximum: torch.Tensor) -> torch.Tensor:
        """Return a running maximum with 0 in the place of −inf."""
        return maximum.masked_fill(maximum == float("-inf"), 0.0)

    def bounds(
        self,
        lo: torch.Tensor,
        hi: torch.Tensor,
        order: Sequence[int],
        shape: Sequence[int],
        dim: int,
        size: int,
    ) -> torch.Tensor:
        """Return 1 where lo ≤ index along `dim` < hi, else 0."""
        lo, hi = (x.permute(tuple(order)).reshape(tuple(shape)) for x in (lo, hi))
        index = torch.arange(size, device=lo.device).view(-1, *[1] * (len(shape) - 1 - dim))
        return ((index >= lo) & (index < hi)).to(self.compute)

    def take(self, x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the elements that an index chooses along a dim."""
        return table.lookup("take").oracle(x, index, dim=dim)

    def contract(self, a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the sum of a·b over `dim`."""
        a, b = self._rounded(a), self._rounded(b)
        if _spans(a, b) or _spans(b, a):
            # A kernel runs it as multiply-adds and adds them up in pairs, as `sum` does.
            return (a * b).sum(dim, keepdim=True)
        letters = "abcdefghijklmnopqrstuvwxyz"[: a.dim()]
        out = torch.einsum(f"{letters},{letters}->{letters.replace(letters[dim], '')}", a, b)
        return out.unsqueeze(dim)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return a factor as tensor cores read it."""
        if self.mma is None or self._is_exact(x):
            return x
        return x.to(self.mma).to(self.compute)

    def _is_exact(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._exact


def _spans(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether an array has all elements of another one that is broadcast with it."""
    return all(n in (1, most) for n, most in zip(other.shape, x.shape, strict=True))
