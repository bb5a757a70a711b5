"""Answer what a model asks on the host about the length of the text in the cache.

A model may compare the length with a constant, to choose a branch: whether a table of positions is
long enough, or whether there is a cache. The answer is the same for all lengths up to some number,
the reach of the recording. Longer texts must not run it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: The length before the first step: a prompt has at least one token.
_LEAST = 1

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_SAME = ("alias", "clone", "detach", "view", "expand", "_to_copy", "unsqueeze", "squeeze")


@dataclass(frozen=True)
class _Known:
    """The length plus `rest`, `rest` minus the length, or a comparison of these with a number.

    Attributes:
        rest: What is added to the length, or what it is subtracted from.
        sign: −1 if the length is subtracted, else 1.
        compare: The comparison, if it is one.
        number: The number.
    """

    rest: float
    sign: int = 1
    compare: Callable[[Any, Any], bool] | None = None
    number: float = 0

    def at(self, length: float) -> Any:
        """Return the value at a length."""
        value = self.sign * length + self.rest
        return value if self.compare is None else self.compare(value, self.number)


class LengthQuestions:
    """Follows what is computed of the length, and answers comparisons.

    Attributes:
        reach: The greatest length for which all answers hold.
    """

    def __init__(self, length: Tensor | None):
        self.reach: float = math.inf
        self._known: dict[int, tuple[Tensor, _Known]] = {}
        if length is not None:
            self._known[id(length)] = length, _Known(0)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Follow an op on the length."""
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._known.pop(id(given), None)
        if not args or not isinstance(result, Tensor) or result.numel() != 1:
            return
        known, name = self._of(args[0]), func._opname
        if known is None or known.compare is not None:
            return
        if name in _SAME and not result.is_floating_point() and result.dtype != torch.bool:
            self._known[id(result)] = result, known
        number = args[1] if len(args) > 1 else None
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            return
        if name in ("add", "sub", "rsub") and len(args) == 2 and kwargs.get("alpha", 1) == 1:
            sign, rest = known.sign, known.rest + (number if name == "add" else -number)
            if name == "rsub":  # number − x
                sign, rest = -sign, -rest
            self._known[id(result)] = result, _Known(rest, sign)
        elif name in _COMPARISONS:
            compared = replace(known, compare=_COMPARISONS[name], number=number)
            self._known[id(result)] = result, compared

    def answer(self, asked: Any) -> bool | None:
        """Return the value of a comparison that the host reads, None if it is unknown."""
        known = self._of(asked)
        if known is None or known.compare is None:
            return None
        answer = known.at(_LEAST)
        changes_at = math.floor(known.sign * (known.number - known.rest))
        later = (n for n in (changes_at - 1, changes_at, changes_at + 1) if n > _LEAST)
        first_other = next((n for n in later if known.at(n) != answer), math.inf)
        self.reach = min(self.reach, first_other - 1)
        return bool(answer)

    def _of(self, x: Any) -> _Known | None:
        return self._known[id(x)][1] if isinstance(x, Tensor) and id(x) in self._known else None
