"""How a model's forward is given what a step knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """How a model's forward is given what a step knows.

    Attributes:
        host_length: Whether it reads the number of tokens in the cache as an integer.
        plain_mask: Whether it takes a mask (batch, slots) of 0 and 1, and makes its own of it.
        bool_masks: Whether its masks are true for slots that a row sees, in place of 0 and −inf.
        hides_unused: Whether each softmax over the slots of the cache hides those without a token,
            because the model makes no mask in a step.
        hides_source: Likewise for the slots of the encoder's output. The model gets no mask for
            them, because it would map it to other slots.
        newest_last: Whether it gets keys in such an order that the newest comes last, because it
            takes their number for the length of the text.
    """

    host_length: bool = False
    plain_mask: bool = False
    bool_masks: bool = False
    hides_unused: bool = False
    hides_source: bool = False
    newest_last: bool = False


#: The forms in which a step is recorded, until one of them can be recorded and gives the logits of
#: stock.
FORMS = (
    Form(),
    Form(host_length=True),
    Form(plain_mask=True),
    Form(bool_masks=True),
    Form(hides_unused=True),
    Form(hides_unused=True, host_length=True),
    Form(hides_source=True),
    Form(newest_last=True),
)
