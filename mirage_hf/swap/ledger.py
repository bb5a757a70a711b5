"""Swap modules in place and back.

Of a swapped module, only its class and one entry of its instance dictionary change. Children and
weights stay. Other changes, such as codes in another order, come with a function that undoes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from mirage_hf.match.matches import Match
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.guard import BINDING_KEY, Binding
from mirage_hf.swap.swapped_module import swapped_class
from mirage_hf.swap.undos import put_back_all


@dataclass
class Ledger:
    """Every module that was swapped. `undo` leaves no trace of a swap."""

    #: (module, its stock class), in the order of the swaps.
    entries: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    #: What puts back other changes, in the order in which they were made.
    undos: list[Callable[[], None]] = field(default_factory=list)

    def swap(self, match: Match, resolved: Mapping[int, Mapping[str, Resolved]]) -> Binding:
        """Make a matched module run kernels, by number of rows and role."""
        module, stock = match.module, type(match.module)
        binding = Binding(match, resolved)
        module.__dict__[BINDING_KEY] = binding
        self.entries.append((module, stock))
        module.__class__ = swapped_class(stock)  # type: ignore[arg-type]
        return binding

    def holds(self, binding: Binding) -> bool:
        """Return whether the module of this binding still carries it.

        Another restore() or optimize() may have put the module back.
        """
        return any(module.__dict__.get(BINDING_KEY) is binding for module, _ in self.entries)

    def undo(self, module: nn.Module | None = None) -> None:
        """Put back one module, or all of them, last first.

        A module whose class was changed again since keeps that class.
        """
        for entry in reversed(list(self.entries)):
            if module is None or entry[0] is module:
                put_back(*entry)
                self.entries.remove(entry)
        if module is None:
            put_back_all(self.undos)


def put_back(module: nn.Module, stock: type[nn.Module]) -> None:
    """Give a module its stock class, and remove its binding."""
    module.__dict__.pop(BINDING_KEY, None)
    if type(module) is swapped_class(stock):  # type: ignore[arg-type]
        module.__class__ = stock


def strays(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield all swapped modules of a model with their stock classes, whichever ledger has them."""
    for module in model.modules():
        binding = module.__dict__.get(BINDING_KEY)
        if isinstance(binding, Binding):
            yield module, binding.stock
