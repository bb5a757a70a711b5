"""The numeric criterion of the package as an assertion."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_close_as(
    got: Sequence[torch.Tensor],
    stock: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    what: str,
) -> None:
    """Assert that results are as close to float64 as those of torch, within one rounding.

    They must be finite where the float64 results are.
    """
    for n, (y, s, x) in enumerate(zip(got, stock, exact, strict=True)):
        error, theirs = ((z.double() - x).abs().max().item() for z in (y, s))
        allowed = 1.25 * theirs + torch.finfo(y.dtype).eps * x.abs().max().item()
        assert error <= allowed, (
            f"{what}: output {n} is off by {error:.3g}, torch by {theirs:.3g}; {allowed:.3g} is "
            "allowed"
        )
