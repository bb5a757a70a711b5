"""Changes are put back, last first, even if one of them fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mirage_hf.swap.undos import put_back_all


def test_all_are_called_last_first_and_a_failure_once_more() -> None:
    seen: list[str] = []

    def noting(name: str, failures: int = 0) -> Callable[[], None]:
        left = [failures]

        def undo() -> None:
            seen.append(name)
            left[0] -= 1
            if left[0] >= 0:
                raise ValueError(name)

        return undo

    undos = [noting("a"), noting("b", 3), noting("c", 1), noting("d")]
    with pytest.raises(ValueError, match="c"):  # the first failure
        put_back_all(undos)
    assert seen == ["d", "c", "b", "a", "c", "b"] and len(undos) == 1
    with pytest.raises(ValueError, match="b"):
        put_back_all(undos)
    assert not undos and seen[6:] == ["b", "b"]
    put_back_all(undos)
