"""Symbolic dims: sizes that are known only when a kernel runs."""

from __future__ import annotations

from typing import Any

from mirage_hf import errors


class Dim(int):
    """A dim whose size is known only when a kernel runs.

    Used as a number, it is its maximum, because graphs are built and searched at the maximum. Dims
    of the same name have the same size.

    Example:
        ```python
        g = mirage_hf.new_graph()
        x = g.new_input((Dim("tokens", max=16), 4096))
        ```

    Raises:
        GraphError: If the name is not an identifier or the maximum is below 2.
    """

    name: str

    def __new__(cls, name: str, max: int) -> Dim:
        """Return the dim called `name`, of 1 to `max` elements."""
        if not isinstance(name, str) or not name.isidentifier():
            raise errors.GraphError(f"Dim: the name {name!r} must be an identifier")
        if isinstance(max, bool) or not isinstance(max, int) or max < 2:
            raise errors.GraphError(
                f"Dim {name}: max is {max!r}; it must be an integer of at least 2"
            )
        self = super().__new__(cls, max)
        self.name = name
        return self

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return (self.name, int(self))

    def __deepcopy__(self, memo: Any) -> Dim:
        return self
