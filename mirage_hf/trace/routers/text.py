"""Write a router as the text of one Triton kernel, one block for each row.

The kernel does what the steps do, in their order and with their rounding. A tensor of a row is a
tile over named axes. A view may split the experts into groups. Then their axis is split, so a tile
has a dim of groups, and a dim of places within a group.

Equal scores are chosen in the order of experts. NaN counts as the greatest score.
"""

from __future__ import annotations

from functools import cache

from mirage_hf.trace.record import Node
from mirage_hf.trace.routers import choices, elements
from mirage_hf.trace.routers.steps import Router, Step
from mirage_hf.trace.routers.tiles import RouterText, RouterWriter, SplitError, UnwrittenError
from mirage_hf.trace.routers.writers import StepWriter, names_of

_WRITERS = {**elements.WRITERS, **choices.WRITERS}


def can_be_step(node: Node) -> bool:
    """Return whether kernels of routers know an op."""
    return any(name in _WRITERS for name in names_of(node))


@cache
def router_text(router: Router) -> RouterText:
    """Return the kernel of a router. It takes the inputs, then the results.

    Raises:
        UnwrittenError: It cannot be written.
    """
    splits: dict[str, int] = {}
    while True:
        writer = RouterWriter(router, splits, _writer_of)
        try:
            return writer.write()
        except SplitError as error:
            if error.axis in splits:
                raise UnwrittenError("groups of several sizes") from None
            splits[error.axis] = error.inner


def _writer_of(step: Step) -> StepWriter:
    return next(_WRITERS[name] for name in names_of(step) if name in _WRITERS)
