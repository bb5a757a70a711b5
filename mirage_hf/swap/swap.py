"""Swap modules in place and back: only a module's class and one entry of its dictionary change; children and weights stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from mirage_hf.match.matcher import Match
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.guard import BINDING_KEY, Binding
from mirage_hf.swap.module import swapped_class


@dataclass
class Ledger:
    """Every module changed, with its stock class, in order. `undo` leaves no trace of them."""

    entries: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)

    def swap(self, match: Match, found: Mapping[int, Mapping[str, Resolved]]) -> Binding:
        """Make a matched module run the kernels `found` (by number of rows, then role)."""
        module, stock = match.module, type(match.module)
        binding = Binding(match, found)
        module.__dict__[BINDING_KEY] = binding
        self.entries.append((module, stock))
        module.__class__ = swapped_class(stock)  # type: ignore[arg-type]
        return binding

    def holds(self, binding: Binding) -> bool:
        """Whether a module still has this binding: another restore() or optimize() may have put it back."""
        return any(module.__dict__.get(BINDING_KEY) is binding for module, _ in self.entries)

    def undo(self, module: nn.Module | None = None) -> None:
        """Put back one module, or all, last first. A class that someone else has set since is left alone."""
        for entry in reversed(list(self.entries)):
            if module is None or entry[0] is module:
                put_back(*entry)
                self.entries.remove(entry)


def put_back(module: nn.Module, stock: type[nn.Module]) -> None:
    module.__dict__.pop(BINDING_KEY, None)
    if type(module) is swapped_class(stock):  # type: ignore[arg-type]
        module.__class__ = stock


def strays(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Swapped modules within a model, whoever swapped them, with their stock classes."""
    for module in model.modules():
        binding = module.__dict__.get(BINDING_KEY)
        if isinstance(binding, Binding):
            yield module, binding.stock
