"""Forwards of experts, for prompts and other calls that no kernel of a step takes.

While a model is optimized, its experts run such calls by kernels of blocks of rows, where these are
faster. Otherwise plain experts run stock's forward. Experts in codes decode the weights of a few
experts at a time, and multiply with torch's grouped product.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats.containers import stock_class
from mirage_hf.swap.own_forward import Binding, is_plain_call
from mirage_hf.trace.experts.decoded import Decoders, run_decoded
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.experts.op import as_node
from mirage_hf.trace.experts.row_blocks import RowBlocks


@dataclass(frozen=True, eq=False)
class BlocksOfModule:
    """The kernels of blocks of rows of one module.

    Attributes:
        blocks: The kernels. Modules with the same programs share them.
        tokens: The numbers of tokens for which they are faster than stock.
        made_for: What they were made for, as `facts_of`.
    """

    blocks: RowBlocks
    tokens: range
    made_for: tuple[Any, ...]


def facts_of(module: nn.Module, form: ExpertsForm) -> tuple[Any, ...]:
    """Return what kernels of experts depend on, besides the contents of parameters."""
    parameters = ((x.shape, x.stride(), x.dtype, x.device) for x in form.parameters)
    act, gate = getattr(module, "act_fn", None), getattr(module, "_apply_gate", None)
    functions = act, getattr(gate, "__func__", gate), form.first.coding, form.second.coding
    return (*parameters, *_plain_values(module), *_plain_values(act), *functions)


def _plain_values(x: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a module that are numbers, texts or None."""
    kinds = (int, float, str, type(None))
    return [
        (name, value)
        for name, value in getattr(x, "__dict__", {}).items()
        if isinstance(value, kinds)
    ]


@dataclass(eq=False, kw_only=True)
class ExpertsBinding(Binding):
    """How experts run while their model is optimized.

    Attributes:
        kernels: The kernels of blocks of rows, None without any.
        called_with: How many experts each token chose in the last call, and the dtype of the
            routing weights. None before a call.
    """

    kernels: BlocksOfModule | None = None
    called_with: tuple[int, torch.dtype] | None = None

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of the chosen experts of each token, times their weights."""
        is_known = len(args) == 3 and not kwargs and not torch.compiler.is_compiling()
        if is_known and args[0].dim() == args[1].dim() == 2:
            self.called_with = args[1].shape[1], args[2].dtype
            form = self._form_for_kernels(module, *args)
            if self.kernels is not None and form is not None:
                return self.kernels.blocks.run(form, *args)
        return self.run_otherwise(module, *args, **kwargs)

    @abstractmethod
    def run_otherwise(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the same without kernels of blocks of rows."""

    def _form_for_kernels(
        self, module: nn.Module, x: Tensor, index: Tensor, weights: Tensor
    ) -> ExpertsForm | None:
        """Return what the experts compute, if the kernels may run a call."""
        kernels = self.kernels
        if kernels is None or len(x) not in kernels.tokens or not is_plain_call(x):
            return None
        if not kernels.blocks.takes(x, index, weights):
            return None
        form = form_of(module, x.dtype)
        is_same = isinstance(form, ExpertsForm) and facts_of(module, form) == kernels.made_for
        return form if is_same else None  # type: ignore[return-value]


@dataclass(eq=False, kw_only=True)
class PlainExpertsBinding(ExpertsBinding):
    """How experts with plain weights run while their model is optimized."""

    def run_otherwise(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run stock's forward."""
        stock: Any = stock_class(module)
        return stock.forward(module, *args, **kwargs)


@dataclass(eq=False, kw_only=True)
class CodedExpertsBinding(ExpertsBinding):
    """How experts in codes run while their model is optimized.

    Attributes:
        decoders: Runs the decoding programs.
    """

    decoders: Decoders

    def run_otherwise(  # type: ignore[override]
        self, module: nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Return the sum of the chosen experts: as one node of a recorded step, or decoded."""
        node = as_node(module, x, top_k_index, top_k_weights)
        if node is not None:
            return node  # type: ignore[no-any-return]
        form = form_of(module, x.dtype)
        if isinstance(form, Rejected) or not form.is_coded:  # such as experts of another dtype
            self.put_back(module)
            return module.forward(x, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return run_decoded(form, x, top_k_index, top_k_weights, self.decoders)
