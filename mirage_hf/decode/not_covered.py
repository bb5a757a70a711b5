"""How the plan of a call says that stock must serve it."""

from __future__ import annotations

from typing import TypeVar

_Found = TypeVar("_Found")


class NotCoveredError(Exception):
    """A call that stock must serve, for the reason given. Raised before the call has any effect."""


def covered(found: _Found | str) -> _Found:
    """Return `found`, unless it is the reason why stock must serve the call.

    Raises:
        NotCoveredError: `found` is a string, the reason.
    """
    if isinstance(found, str):
        raise NotCoveredError(found)
    return found
