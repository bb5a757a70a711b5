"""The result of `superoptimize()`: µGraphs equivalent to a program, best first."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch

from mirage_hf.errors import SearchError
from mirage_hf.graph import symbolic
from mirage_hf.graph.inputs import check_tensors
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline import html_report, instances, run_ugraph, torch_op
from mirage_hf.pipeline.instances import Family
from mirage_hf.pipeline.outcome import Outcome
from mirage_hf.search.search_report import SearchReport
from mirage_hf.tune.candidates import TuneResult


class SearchResult(Sequence[UGraph]):
    """µGraphs that are proven equivalent to a program, best first.

    The result is a sequence, and calling it runs the best µGraph. The library path, every op as a
    torch call, is the last µGraph, or comes earlier if it was measured to be faster.

    Example:
        >>> import torch
        >>> import mirage_hf as mi
        >>> graph = mi.new_kernel_graph()
        >>> x = graph.new_input((1, 64), mi.float32)
        >>> w = graph.new_input((64, 32), mi.float32)
        >>> graph.mark_output(graph.matmul(graph.rms_norm(x), w))
        >>> result = mi.superoptimize(graph)
        >>> len(graph.ops), result[0].num_kernels
        (2, 1)
        >>> [y] = result([torch.randn(1, 64), torch.randn(64, 32)])
        >>> print(result.report)  # doctest: +SKIP

    Attributes:
        program: The program that was searched for.
        report: Why the search stopped, what it counted, and which candidates were rejected.
        tuned: The measured times. None without a GPU.
    """

    def __init__(
        self,
        program: KernelGraph,
        ugraphs: Sequence[UGraph],
        report: SearchReport,
        tuned: TuneResult | None = None,
        families: Sequence[Family] = (),
    ) -> None:
        self.program, self.report, self.tuned = program, report, tuned
        self._ugraphs, self._families = tuple(ugraphs), tuple(families)
        self._dims = symbolic.dims_of(program)
        self._instances: dict[tuple[int, ...], SearchResult] = {}

    def __len__(self) -> int:
        return len(self._ugraphs)

    @overload
    def __getitem__(self, i: int) -> UGraph: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[UGraph]: ...

    def __getitem__(self, i: Any) -> Any:
        return self._ugraphs[i]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the best µGraph.

        Args:
            inputs: Tensors in the order of `program.inputs`. Their shapes give the sizes of
                symbolic dims.

        Returns:
            Tensors in the order of `program.outputs`.

        Raises:
            InputError: The tensors differ from what the program was built for.
        """
        if not self._dims:
            return self[0](inputs)
        check_tensors(self.program, inputs)
        if torch.compiler.is_compiling():
            # A compiled graph is for one size. index() makes it a constant.
            shapes = tuple([tuple([operator.index(d) for d in x.shape]) for x in inputs])
            return torch_op.run(inputs, _registered_at(self, shapes))  # type: ignore[no-any-return]
        sizes = symbolic.sizes_of(self.program, [x.shape for x in inputs])
        return self.at(**sizes)[0](inputs)

    def at(self, **sizes: int) -> SearchResult:
        """Return the results for one size of each symbolic dim, ranked anew.

        Nothing is searched or proven again, because the proofs hold for every size. A dim that is
        left out has its maximum.

        Raises:
            GraphError: A dim is unknown, or a size is out of range.
        """
        sizes = symbolic.check_sizes(self.program, sizes)
        key = tuple(sizes.values())
        if key not in self._instances:
            program = symbolic.at(self.program, sizes)
            ugraphs = (*instances.at(self._families, sizes), library_ugraph(program))
            self._instances[key] = SearchResult(program, ugraphs, self.report)
        return self._instances[key]

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page: program, report, and results with pictures and code.

        Returns:
            The path.
        """
        return html_report.write(path, self.program, self, self.report, self.tuned)

    def of(self, program: KernelGraph) -> SearchResult:
        """Return a copy for an equal program, which shares nothing with this result's program.

        So the caller may add ops to either program.
        """
        return SearchResult(
            program,
            [replace(u, program=program) if u.is_fused else library_ugraph(program) for u in self],
            self.report,
            self.tuned,
            [replace(f, ugraph=replace(f.ugraph, program=program)) for f in self._families],
        )

    def __repr__(self) -> str:
        best = self[0].num_kernels
        kernels = f"{best} kernel{'s' * (best > 1)}"
        return f"<SearchResult: {len(self)} µGraphs, best with {kernels}, {self.report.stop}>"


@torch.compiler.assume_constant_result
def _registered_at(result: SearchResult, shapes: tuple[tuple[int, ...], ...]) -> str:
    sizes = symbolic.sizes_of(result.program, shapes)
    return run_ugraph.registered(result.at(**sizes)[0].uid)


def result_of(outcome: Outcome, max_kernels: int | None = None) -> SearchResult:
    """Return an outcome as a `SearchResult`.

    Args:
        outcome: The outcome of the search.
        max_kernels: Leave out µGraphs of more kernels, the library path too.

    Raises:
        SearchError: No µGraph is left.
    """
    program, report, ugraphs = outcome.request.program, outcome.report, outcome.ugraphs
    if max_kernels is not None:
        ugraphs = tuple(u for u in ugraphs if u.num_kernels <= max_kernels)
        if not ugraphs:
            rejections = "; ".join(r.reason for r in report.rejected)
            raise SearchError(
                f"superoptimize: no µGraph of at most {max_kernels} kernels was found "
                f"({report.reason or rejections or report.stop}); allow more with max_kernels"
            )
    is_symbolic = bool(symbolic.dims_of(program))
    families = [instances.family(c) for c in outcome.verified.candidates] if is_symbolic else []
    return SearchResult(program, ugraphs, report, outcome.tuned, families)
