"""Leave our attributes out of copies and pickles of a model, which are plain stock models.

`copy.copy`, `copy.deepcopy`, `pickle` and `torch.save` all ask an object for its state by
`__getstate__`. They find that method on the instance before the class.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_GETSTATE = "__getstate__"


class _PlainState:
    """The `__getstate__` of one model: the state that its class gives, as it was before optimize().

    Attributes:
        names: Our attributes, which are left out.
        hooks: Forward pre-hooks that were taken away, by the attribute that holds their handle.
        taken: Attributes that were taken away.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.names: set[str] = set()
        self.hooks: dict[str, tuple[int, Callable[..., Any]]] = {}
        self.taken: dict[str, Any] = {}

    def __call__(self) -> Any:
        model: Any = self._model()
        of_class = getattr(type(model), _GETSTATE, None)  # Python 3.10 may have none
        state = dict(model.__dict__) if of_class is None else of_class(model)
        if not isinstance(state, dict):
            return state
        state = {k: v for k, v in state.items() if k != _GETSTATE and k not in self.names}
        state = {**self.taken, **state}
        if self.hooks:
            self._put_back_hooks(state)
        return state

    def _put_back_hooks(self, state: dict[str, Any]) -> None:
        """Add the hooks to a state, with handles that remove them from there."""
        hooks = state["_forward_pre_hooks"] = OrderedDict(state["_forward_pre_hooks"])
        for name, (number, hook) in self.hooks.items():
            if _has_handle(state, name, number):
                hooks[number] = hook
                state[name] = RemovableHandle(hooks)
                state[name].id = number


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
        _remove_if_unused(model, present)


def take_hook(model: nn.Module, name: str) -> Callable[[], None]:
    """Take a forward pre-hook away from a model, but not from its copies.

    Args:
        model: The model.
        name: The attribute that holds the handle of the hook.

    Returns:
        What puts it back, unless it was removed.
    """
    number = model.__dict__[name].id
    hook = model._forward_pre_hooks.pop(number)
    present = model.__dict__.setdefault(_GETSTATE, _PlainState(model))
    if isinstance(present, _PlainState):
        present.hooks[name] = number, hook

    def undo() -> None:
        if _has_handle(model.__dict__, name, number):
            model._forward_pre_hooks[number] = hook
        if isinstance(present, _PlainState):
            present.hooks.pop(name, None)
            _remove_if_unused(model, present)

    return undo


def take_attribute(model: nn.Module, name: str) -> Callable[[], None]:
    """Take an attribute of the instance away from a model, but not from its copies.

    Returns:
        What puts it back, unless there is another one by then.
    """
    value = model.__dict__.pop(name)
    present = model.__dict__.setdefault(_GETSTATE, _PlainState(model))
    if isinstance(present, _PlainState):
        present.taken[name] = value

    def undo() -> None:
        model.__dict__.setdefault(name, value)
        if isinstance(present, _PlainState):
            present.taken.pop(name, None)
            _remove_if_unused(model, present)

    return undo


def _has_handle(state: dict[str, Any], name: str, number: int) -> bool:
    """Return whether a model still has the handle of a hook."""
    return name in state and state[name].id == number


def _remove_if_unused(model: nn.Module, state: _PlainState) -> None:
    is_used = state.names or state.hooks or state.taken
    if not is_used and model.__dict__.get(_GETSTATE) is state:
        del model.__dict__[_GETSTATE]
