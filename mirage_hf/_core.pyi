"""The C++ core; csrc/bindings.cpp is its whole surface."""

from typing import Any

def __getattr__(name: str) -> Any: ...
