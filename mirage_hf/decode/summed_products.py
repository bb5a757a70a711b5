"""Compute sums of broadcast products as matrix products, while stock's prefill runs.

transformers' state-space layers write matrix products as `(a[..., None] * b[:, None]).sum(dim)` if
their own kernels are not installed. The products of one layer take gigabytes. Here `*` gives a
tensor that knows only its factors. Its sum is a matrix product. Any other op computes it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mirage_hf import float32_products

#: A product is put off if it has at least so many elements, and so many times those of its factors.
LEAST_ELEMENTS = 1 << 20
LEAST_GROWTH = 8

_aten = torch.ops.aten


class SummedProducts(TorchDispatchMode):
    """Puts off float32 products that are much larger than their factors.

    Attributes:
        count: Sums that were computed as matrix products.
    """

    #: Our kernels read plain tensors and write new ones, so they may run under this mode.
    allows_kernels = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._pending: list[weakref.ref[_Product]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.mul.Tensor and _is_put_off(*args):
            product = _Product(*args, self)  # type: ignore[call-arg]
            self._pending.append(weakref.ref(product))
            return product
        if self._pending and func._schema.is_mutable:
            self._compute_all()
        return func(*args, **(kwargs or {}))

    def _compute_all(self) -> None:
        """Compute the products that are still wanted, before an op that may change a factor."""
        for reference in self._pending:
            product = reference()
            if product is not None:
                product.compute()
        self._pending.clear()


class _Product(Tensor):
    """The product of two tensors, computed only if anything but its sum is wanted."""

    factors: tuple[Tensor, Tensor] | None
    value: Tensor | None
    mode: SummedProducts

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor, mode: SummedProducts) -> _Product:
        shape = torch.broadcast_shapes(a.shape, b.shape)
        make: Callable[..., _Product] = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, shape, dtype=a.dtype, device=a.device)

    def __init__(self, a: Tensor, b: Tensor, mode: SummedProducts) -> None:
        self.factors = a, b
        self.value = None
        self.mode = mode

    def compute(self) -> Tensor:
        """Return the product, and forget its factors."""
        if self.factors is not None:
            self.value = torch.mul(*self.factors)
            self.factors = None
        assert self.value is not None
        return self.value

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        product: Any = args[0] if args else None
        is_sum = func is _aten.sum.dim_IntList and isinstance(product, _Product) and not kwargs
        if is_sum and product.factors is not None:
            product.mode.count += 1
            return _sum_of_product(*product.factors, *args[1:])
        args, kwargs = tree_map_only(_Product, _Product.compute, (args, kwargs))
        return func(*args, **kwargs)


def _is_put_off(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not tensors or isinstance(a, _Product) or isinstance(b, _Product):
        return False
    if not (a.dtype == b.dtype == torch.float32) or a.device != b.device:
        return False
    # a sum of float32 products is exact to float32, a product by TF32 is not
    if a.is_cuda and not float32_products.are_exact():
        return False
    elements = torch.broadcast_shapes(a.shape, b.shape).numel()
    return elements >= max(LEAST_ELEMENTS, LEAST_GROWTH * (a.numel() + b.numel()))


def _sum_of_product(
    a: Tensor, b: Tensor, dims: Sequence[int] | None, keepdim: bool = False
) -> Tensor:
    """Return `(a * b).sum(dims, keepdim)`."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    summed = {dim % len(shape) for dim in dims or range(len(shape))}
    kept = [dim for dim in range(len(shape)) if dim not in summed]
    operands: list[Any] = []
    for x in (a, b):
        axes = [dim + len(shape) - x.ndim for dim in range(x.ndim)]
        wide = [dim for dim in range(x.ndim) if x.shape[dim] != 1]
        operands += [x.squeeze([d for d in range(x.ndim) if d not in wide])]
        operands += [[axes[dim] for dim in wide]]
    result = torch.einsum(*operands, [dim for dim in kept if shape[dim] != 1])
    sizes = [1 if dim in summed else shape[dim] for dim in range(len(shape))]
    # stock's code may view a sum in another shape
    return result.reshape(sizes if keepdim else [shape[dim] for dim in kept]).contiguous()
