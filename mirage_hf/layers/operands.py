"""The weights that a module's parts read, and how the programs of the parts view them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.layers.part import Part, num_norm_weights
from mirage_hf.patterns.lora import BlockAdapters


def submodule(module: nn.Module, path: str) -> nn.Module:
    """Return a descendant by its dotted path, without the attribute look-up of nn.Module."""
    for name in path.split(".") if path else ():
        module = module.__dict__["_modules"][name]
    return module


class LiveOperands:
    """The weights of a module's parts, looked up each time they are asked for.

    Traced graphs use this class, because torch.export puts other weights in the module while it
    traces. Everything else shares one `OperandTable`, which looks the weights up once.
    """

    def __init__(self, children: Mapping[str, Any], parts: Mapping[str, Part]):
        """Look in `children`, a module's own dictionary of children, for the parts by role."""
        self.children = children
        self.parts = parts

    def parameters(self, role: str) -> list[Any]:
        """Return the weights of a part, in the order of `Part.weights`."""
        return [self._owner(path)._parameters[name] for path, name in self.parts[role].weights]

    def views(self, role: str) -> list[Tensor]:
        """Return the weights of a part as its program reads them, without a copy.

        A matrix (n, k) is viewed as (k, n), and a vector as one row.
        """
        operands = _program_operands(self.parts[role], self.parameters(role))
        return [x.t() if x.dim() == 2 else x[None] for x in operands]

    def _owner(self, path: str) -> nn.Module:
        first, _, rest = path.partition(".")
        return submodule(self.children[first], rest)


@dataclass(frozen=True)
class Operand:
    """One weight of an `OperandTable` and where its module keeps it."""

    #: The child that owns the weight, by path.
    path: str
    #: The name of the parameter there.
    name: str
    #: The dictionary of parameters of that child.
    owner: Mapping[str, Any]
    #: The parameter that was found there.
    tensor: Tensor

    @property
    def label(self) -> str:
        """The weight's name in the module, such as "mlp.up_proj.weight"."""
        return f"{self.path}.{self.name}"


class OperandTable(LiveOperands):
    """The weights of a module's parts, looked up once.

    The guard, the traced graphs, the step and the prefill of a layer share one table. It holds the
    module's dictionary of children and not the module, because the module may hold the table.
    """

    def __init__(self, module: nn.Module, parts: Sequence[Part]):
        """Look up the weights of `parts` in `module`."""
        super().__init__(module.__dict__["_modules"], {part.role: part for part in parts})
        #: Each distinct weight, by (path, name), in the order of the parts.
        self.operands: dict[tuple[str, str], Operand] = {}
        for path, name in (weight for part in parts for weight in part.weights):
            if (path, name) not in self.operands:
                owner = submodule(module, path)._parameters
                tensor = owner[name]
                assert tensor is not None, f"{path}.{name}"
                self.operands[path, name] = Operand(path, name, owner, tensor)
        self._parameters = {
            part.role: [self.operands[weight].tensor for weight in part.weights] for part in parts
        }
        # A shared constant that is made while a graph is captured holds nothing before the first
        # replay. So make all of them here.
        for part in parts:
            _program_operands(part, self._parameters[part.role])

    def parameters(self, role: str) -> list[Any]:
        """Return the weights of a part, in the order of `Part.weights`."""
        return self._parameters[role]

    def __iter__(self) -> Iterator[Operand]:
        """Yield each distinct weight, in the order of the parts."""
        return iter(self.operands.values())


def _program_operands(part: Part, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights in the order of the program's operands: (n, k) or (n,), without a copy."""
    sizes = dict(part.block.sizes)
    if part.scalings:
        return [*parameters, adapter_scales(part, parameters)]
    adapters: BlockAdapters | None = sizes.get("lora")
    if adapters is not None and adapters.packed:
        return _with_missing_adapters(adapters, sizes["n"], parameters)
    if part.packed_gate_up:
        first = num_norm_weights(sizes)
        halves = [p.chunk(2) for p in parameters[first:]]
        return [*parameters[:first], *(gate for gate, _ in halves), *(up for _, up in halves)]
    return list(parameters)


def _with_missing_adapters(
    adapters: BlockAdapters, widths: Sequence[int], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Return the weights of packed linears, with zeros for each linear without an adapter."""
    first = len(parameters) - sum(rank > 0 for rank in adapters.ranks)
    ups = iter(parameters[first:])
    like = parameters[-1]
    operands = list(parameters[:first])
    for width, rank in zip(widths, adapters.ranks, strict=True):
        operands.append(
            next(ups)
            if rank
            else shared_constant(_zeros, width, adapters.rank, like.dtype, like.device)
        )
    return operands


def adapter_scales(part: Part, parameters: Sequence[Tensor]) -> Tensor:
    """Return the scaling of each adapter of a part, once for each of its columns."""
    ranks = dict(part.block.sizes)["r"]
    each = ranks if isinstance(ranks, tuple) else (ranks,)
    return shared_constant(_scales, each, part.scalings, parameters[-1].device)


# -- operands that are no parameters ---------------------------------------------------------------

_shared_constants: dict[tuple[Any, ...], Tensor] = {}


def shared_constant(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `make(*args)`, made once for all layers and kept, because captured graphs read it.

    It is a constant of traced graphs, too. A kernel in a CUDA graph may read a constant before
    earlier kernels have written anything.
    """
    if torch.compiler.is_compiling():
        return _traced_constant(make, *args)
    return _kept_constant(make, *args)


@torch.compiler.assume_constant_result
def _traced_constant(make: Callable[..., Tensor], *args: Any) -> Tensor:
    return _kept_constant(make, *args)


def _kept_constant(make: Callable[..., Tensor], *args: Any) -> Tensor:
    known = _shared_constants.get((make, *args))
    if known is not None:
        return known
    with torch.inference_mode(False):
        made = make(*args)
    # Another thread may have made it meanwhile, and a graph may already read that one.
    return _shared_constants.setdefault((make, *args), made)


def _zeros(n: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(n, rank, dtype=dtype, device=device)


def _scales(ranks: Sequence[int], scalings: Sequence[float], device: torch.device) -> Tensor:
    scales = torch.empty(sum(ranks), dtype=torch.float32, device=device)
    for columns, scaling in zip(scales.split(list(ranks)), scalings, strict=True):
        columns.fill_(scaling)
    return scales
