"""Let transformers leave out causal masks in a capture, as it does in a call.

While a stream is captured, transformers takes the model for traced. Then it makes a mask although
each token sees all tokens before it. With a mask, attention takes twice as long, and keys and
values are copied for each query head.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from transformers import masking_utils


@contextlib.contextmanager
def masks_as_in_calls() -> Iterator[None]:
    """Let this thread's forwards have the masks that they have without a capture.

    Only one thread may be in here at a time. Other threads' forwards are as they were.
    """
    stock = getattr(masking_utils, "is_tracing", None)
    if stock is None:
        yield
        return
    own_thread = threading.get_ident()

    def is_tracing(*args: Any, **kwargs: Any) -> bool:
        return threading.get_ident() != own_thread and stock(*args, **kwargs)

    masking_utils.is_tracing = is_tracing
    try:
        yield
    finally:
        masking_utils.is_tracing = stock
