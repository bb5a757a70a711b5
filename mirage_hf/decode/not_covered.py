"""How the plan of a call says that the call is stock's."""

from __future__ import annotations

from typing import TypeVar

_Found = TypeVar("_Found")


class NotCoveredError(Exception):
    """A call that stock must serve, for the reason given. Raised before the call has any effect."""


def covered(found: _Found | str) -> _Found:
    """Return what was found.

    Raises:
        NotCoveredError: It is a reason, a string.
    """
    if isinstance(found, str):
        raise NotCoveredError(found)
    return found
