"""Leave our attributes out of copies and pickles of a model, which are plain stock models.

`copy.copy`, `copy.deepcopy`, `pickle` and `torch.save` all ask an object for its state by
`__getstate__`. They find that method on the instance before the class.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_GETSTATE = "__getstate__"


class _PlainState:
    """The `__getstate__` of one model: the state that its class gives, without our attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.names: set[str] = set()

    def __call__(self) -> Any:
        model: Any = self._model()
        of_class = getattr(type(model), _GETSTATE, None)  # Python 3.10 may have none
        state = dict(model.__dict__) if of_class is None else of_class(model)
        if not isinstance(state, dict):
            return state
        return {k: v for k, v in state.items() if k != _GETSTATE and k not in self.names}


def leave_out_of_copies(model: nn.Module, name: str) -> None:
    """Leave the attribute `name` out of copies and pickles of `model`.

    A model that already has another `__getstate__` on the instance stays as it is.
    """
    present = model.__dict__.setdefault(_GETSTATE, _PlainState(model))
    if isinstance(present, _PlainState):
        present.names.add(name)


def restore_in_copies(model: nn.Module, name: str) -> None:
    """Undo `leave_out_of_copies`."""
    present = model.__dict__.get(_GETSTATE)
    if isinstance(present, _PlainState):
        present.names.discard(name)
        if not present.names:
            del model.__dict__[_GETSTATE]
