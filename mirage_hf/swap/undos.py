"""Put back what was changed, even if something fails on the way."""

from __future__ import annotations

from collections.abc import Callable


def put_back_all(undos: list[Callable[[], None]]) -> None:
    """Call what puts back changes, last first, and remove each that was called.

    One that fails, or is interrupted, is called once more after the others. If it fails again, it
    stays in the list for another time.

    Raises:
        BaseException: The first failure, once all have been called.
    """
    error: BaseException | None = None
    for _ in range(2):
        failed: list[Callable[[], None]] = []
        while undos:
            undo = undos.pop()
            try:
                undo()
            except BaseException as e:
                error = error or e
                failed.append(undo)
        undos.extend(reversed(failed))
    if error is not None:
        raise error
