"""What a step takes of drafts, and prompt lookup, with torch.

Plain decoding chooses a token after each prefix of a text. A step that is fed the last token and
drafts after it gives logits after each of them. So all that plain decoding would choose is known,
as long as the drafts are what it would choose. The kernels do the same (kernels/drafting.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mirage_hf.decode.choosing import NOTHING
from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.drafts import Drafts


def accept(
    control: Control,
    drafts: Drafts,
    history: TokenHistory,
    picked: Tensor,
    ended: Tensor | None = None,
) -> None:
    """Take the drafts that plain decoding would choose, and the token that it chooses after them.

    A row takes no more after a stop token or at the end of its budget. Rows that are not alive take
    nothing.

    Args:
        control: State of the call.
        drafts: The drafts. Their state moves on.
        history: The text, which gets the tokens.
        picked: (batch, tokens): what plain decoding chooses after each token that was fed.
        ended: (batch, tokens) bool: tokens that end their row whatever they are.
    """
    number, width = drafts.number, drafts.tokens.shape[1]
    differs = torch.ones_like(picked, dtype=torch.bool)
    differs[:, :-1] = drafts.tokens[:, 1:] != picked[:, :-1]
    first_wrong = torch.where(differs | (number >= drafts.count), number, width)
    taken = first_wrong.amin(1, keepdim=True) + 1
    left = control.budget - drafts.ahead
    taken = torch.minimum(taken, left)
    stops = (picked[..., None] == control.eos).any(-1)
    if ended is not None:
        stops = stops | ended
    first_stop = torch.where(stops, number, width).amin(1, keepdim=True)
    has_stopped = first_stop < taken
    alive = control.alive[:, None].clone()  # it changes below
    taken = torch.minimum(taken, first_stop + 1).masked_fill(~alive, 0)
    goes_on = alive & ~has_stopped & (taken < left)
    fed = picked.masked_fill(picked == NOTHING, 0)
    # what lies after the text is written over later
    history.ids.scatter_(1, drafts.text_length(history) + number, fed)
    last = fed.gather(1, (taken - 1).clamp_min(0))
    drafts.tokens[:, :1].copy_(torch.where(alive, last, drafts.tokens[:, :1]))
    drafts.ahead.add_(taken)
    control.alive.copy_(goes_on[:, 0])
    verified = drafts.count.masked_fill(~alive, 0)
    drafts.report.copy_(torch.cat([picked, verified, taken, goes_on.long()], dim=1))


def look_up(
    control: Control, drafts: Drafts, history: TokenHistory, most: int, longest: int
) -> None:
    """Draft what followed the same last tokens earlier in the text.

    HF's `PromptLookupCandidateGenerator` drafts the same. Of all places where as many as possible
    of the last `longest` tokens occur, the first one counts.

    Args:
        control: State of the call.
        drafts: Where the drafts go.
        history: The text.
        most: The most drafts.
        longest: The most tokens that are compared.
    """
    ids, slots = history.ids, history.slots
    length = drafts.text_length(history)
    last = length - 1
    same = torch.zeros_like(ids)
    goes_on = slots < last
    for back in range(longest):
        place = last - back
        token = ids.gather(1, place.clamp_min(0))
        earlier = ids.gather(1, (slots - back).clamp_min(0).expand_as(ids))
        goes_on = goes_on & (earlier == token) & (slots - back >= control.lowest)
        same += goes_on
    # the longest match, the first one of equal ones
    best = (same * ids.shape[1] - slots).argmax(1, keepdim=True)
    found = same.gather(1, best) > 0
    count = torch.minimum(last - best, torch.full_like(best, most))
    drafts.count.copy_(count.masked_fill(~found, 0))
    places = best + 1 + drafts.number[:-1]
    drafts.tokens[:, 1:].copy_(ids.gather(1, places.clamp_max(ids.shape[1] - 1)))
