"""Methods of graphs that later stages carry out, for users' convenience.

`graph.superoptimize()`, calling a µGraph, drawing it and generating programs need stages that
import this one. Imports must lead one way only. So each such method calls a `Convenience` that is
declared here. The stage that carries it out registers a function for it when it is imported.
`import mirage_hf` imports all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from mirage_hf import errors

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Convenience(Generic[P, R]):
    """A function that a later stage registers."""

    def __init__(self, method: str, module: str) -> None:
        """Declare a convenience.

        Args:
            method: What users call, for the error message.
            module: The module that registers the function, for the error message.
        """
        self.method, self.module = method, module
        self._function: Callable[P, R] | None = None

    def register(self, function: F) -> F:
        """Register the function that the method calls, and return it. Usable as a decorator."""
        self._function = function
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the registered function.

        Raises:
            MirageError: If none is registered, because its stage was not imported.
        """
        if self._function is None:
            raise errors.MirageError(
                f"{self.method} needs {self.module}, which is not imported; import mirage_hf"
            )
        return self._function(*args, **kwargs)


#: Search for faster kernels: program and options to a search result.
superoptimize: Convenience[..., Any] = Convenience(
    "KernelGraph.superoptimize()", "mirage_hf.pipeline.superoptimizer"
)

#: Run a µGraph: the µGraph and its inputs to its outputs.
run_ugraph: Convenience[[Any, Sequence[torch.Tensor]], list[torch.Tensor]] = Convenience(
    "calling a µGraph", "mirage_hf.pipeline.run_ugraph"
)

#: Write a µGraph as a Triton file: the µGraph and a path to the path.
write_triton_program: Convenience[[Any, str | Path], Path] = Convenience(
    "UGraph.generate_triton_program()", "mirage_hf.codegen.triton"
)

#: Write a µGraph as a CUDA C++ file: the µGraph and a path to the path.
write_cuda_program: Convenience[[Any, str | Path], Path] = Convenience(
    "UGraph.generate_cuda_program()", "mirage_hf.codegen.cuda"
)

#: Draw a µGraph as SVG: the µGraph and a path to the path.
write_svg: Convenience[[Any, str | Path], Path] = Convenience(
    "UGraph.visualize()", "mirage_hf.render.picture"
)
