"""Let transformers leave out causal masks in a capture, as it does in a call.

While a stream is captured, transformers 5.17 takes the model for traced. Then it makes a mask
although each token sees all tokens before it. With a mask, attention takes twice as long, and keys
and values are copied for each query head. transformers 5.23 leaves it out by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from transformers import masking_utils


@contextlib.contextmanager
def masks_as_in_calls() -> Iterator[None]:
    """Let this thread's forwards without padding have the masks that they have without a capture.

    A mask of padding would be read on the host, which a capture cannot do. So such masks are made.
    Only one thread may be in here at a time, the one that captures. Other threads' forwards are as
    they were.
    """
    stock = getattr(masking_utils, "is_tracing", None)
    if stock is None:
        yield
        return
    own_thread = threading.get_ident()

    def is_tracing(tensor: Any = None) -> bool:
        is_ours = tensor is None and threading.get_ident() == own_thread
        return not is_ours and stock(tensor)

    masking_utils.is_tracing = is_tracing
    try:
        yield
    finally:
        masking_utils.is_tracing = stock
