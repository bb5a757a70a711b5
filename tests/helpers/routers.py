"""Routers as models write them, on random scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.traced_functions import normal

Routed = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a router: of its experts, groups, kept groups and chosen experts."""

    experts: int = 24
    groups: int = 3
    kept: int = 2
    chosen: int = 4
    bias: Tensor = field(default_factory=lambda: normal(24, seed=5).round())


def qwen3(scores: Tensor, sizes: Sizes) -> Routed:
    chances = F.softmax(scores, dtype=torch.float, dim=-1)
    weights, index = torch.topk(chances, sizes.chosen, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(scores.dtype), index


def mixtral(scores: Tensor, sizes: Sizes) -> Routed:
    weights, index = torch.topk(F.softmax(scores.float(), dim=-1), sizes.chosen, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), index


def olmoe(scores: Tensor, sizes: Sizes) -> Routed:
    chances = F.softmax(scores, dim=-1, dtype=torch.float)
    weights, index = torch.topk(chances, sizes.chosen, dim=-1)
    return weights.to(scores.dtype), index


def gpt_oss(scores: Tensor, sizes: Sizes) -> Routed:
    weights, index = torch.topk(scores, sizes.chosen, dim=-1)
    return F.softmax(weights, dim=1, dtype=weights.dtype), index


def granite(scores: Tensor, sizes: Sizes) -> Routed:
    weights, index = scores.float().topk(sizes.chosen, dim=-1)
    return torch.softmax(weights, dim=-1).type_as(scores), index


def cohere(scores: Tensor, sizes: Sizes) -> Routed:
    weights, index = torch.topk(scores, sizes.chosen, dim=-1)
    weights = F.sigmoid(weights)
    return weights / torch.sum(weights, dim=-1, keepdims=True), index


def minimax(scores: Tensor, sizes: Sizes) -> Routed:
    chances = F.sigmoid(scores.float())
    _, index = torch.topk(chances + sizes.bias, sizes.chosen, dim=-1, sorted=False)
    weights = chances.gather(1, index)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, index


def ernie(scores: Tensor, sizes: Sizes) -> Routed:
    chances = F.softmax(scores, dim=1, dtype=torch.float)
    _, index = torch.topk(chances + sizes.bias.squeeze(), sizes.chosen, dim=-1)
    weights = torch.gather(chances, dim=-1, index=index)
    weights = weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=1e-12)
    return weights.to(scores.dtype), index


def phimoe(scores: Tensor, sizes: Sizes) -> Routed:
    masked, weights, indices = scores, [], []
    for _ in range(2):
        most, index = masked.max(dim=-1, keepdim=True)
        factor = scores.abs().clamp(min=most)
        hidden = ((most - scores) / factor) > 0.02
        chances = torch.softmax(masked.masked_fill(hidden, float("-inf")), dim=-1)
        weights.append(chances.gather(dim=-1, index=index))
        indices.append(index)
        masked = torch.scatter(scores, -1, index, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(indices, dim=-1)


def greatest(scores: Tensor, sizes: Sizes) -> Routed:
    weights, index = scores.float().sigmoid().max(-1)
    return weights, index


def _mask_of_groups(best: Tensor, sizes: Sizes) -> Tensor:
    places = sizes.experts // sizes.groups
    index = torch.topk(best, k=sizes.kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best)
    mask.scatter_(1, index, 1)
    mask = mask.unsqueeze(-1).expand(-1, sizes.groups, places)
    return mask.reshape(-1, sizes.experts).bool()


def deepseek_v3(scores: Tensor, sizes: Sizes) -> Routed:
    chances = scores.float().sigmoid()
    choice = chances + sizes.bias
    grouped = choice.view(-1, sizes.groups, sizes.experts // sizes.groups)
    best = grouped.topk(2, dim=-1)[0].sum(dim=-1)
    choice = choice.masked_fill(~_mask_of_groups(best, sizes), float("-inf"))
    index = torch.topk(choice, k=sizes.chosen, dim=-1, sorted=False)[1]
    weights = chances.gather(1, index)
    denominator = weights.sum(dim=-1, keepdim=True) + 1e-20
    weights /= denominator
    return weights * 2.5, index


def deepseek_v2(scores: Tensor, sizes: Sizes) -> Routed:
    chances = scores.softmax(dim=-1, dtype=torch.float32)
    grouped = chances.view(-1, sizes.groups, sizes.experts // sizes.groups)
    mask = _mask_of_groups(grouped.max(dim=-1).values, sizes)
    chances = chances.masked_fill(~mask, 0.0)
    weights, index = torch.topk(chances, k=sizes.chosen, dim=-1, sorted=False)
    return weights * 16.0, index


def deepseek_v4(scores: Tensor, sizes: Sizes) -> Routed:
    chances = F.softplus(scores.float()).sqrt()
    index = torch.topk(chances + sizes.bias, sizes.chosen, dim=-1, sorted=False).indices
    weights = chances.gather(1, index)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 1.5, index


def gemma4(scores: Tensor, sizes: Sizes) -> Routed:
    chances = F.softmax(scores, dim=-1, dtype=torch.float32)
    weights, index = torch.topk(chances, k=sizes.chosen, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights * sizes.bias[index], index


def llama4(scores: Tensor, sizes: Sizes) -> Routed:
    values, index = torch.topk(scores, 1, dim=1)
    whole = torch.full_like(scores, float("-inf")).scatter_(1, index, values)
    return torch.sigmoid(whole.float()).to(whole.dtype), index


ROUTERS: dict[str, Callable[[Tensor, Sizes], Routed]] = {
    function.__name__: function
    for function in (
        qwen3,
        mixtral,
        olmoe,
        gpt_oss,
        granite,
        cohere,
        minimax,
        ernie,
        phimoe,
        greatest,
        deepseek_v3,
        deepseek_v2,
        deepseek_v4,
        gemma4,
        llama4,
    )
}
