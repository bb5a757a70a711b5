"""The kernels that the search finds compute what experts of transformers compute."""

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from mirage_hf.search.engine import search
from tests.helpers import indexed_programs as programs
from tests.helpers.indexed_programs import SEARCH, Mixture

SIZES = {"tokens": 3, "chosen": 2, "experts": 5, "width": 32, "inner": 24, "index": "int64"}


def qwen() -> tuple[Mixture, torch.nn.Module, dict[str, torch.Tensor]]:
    """Return experts that hold gate and up as rows of one tensor, and views of their weights."""
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2
    )
    experts = modeling_qwen3_moe.Qwen3MoeExperts(config)
    gate, up = experts.gate_up_proj.data.chunk(2, 1)
    views = {"gate": gate, "up": up, "down": experts.down_proj.data}
    return Mixture(**SIZES, layout="packed"), experts, views


def gpt_oss() -> tuple[Mixture, torch.nn.Module, dict[str, torch.Tensor]]:
    """Return experts that hold gate and up in turns, with biases."""
    config = GptOssConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2
    )
    experts = modeling_gpt_oss.GptOssExperts(config)
    views = {"down": experts.down_proj.data, "down_bias": experts.down_proj_bias.data}
    for n, name in enumerate(("gate", "up")):
        views[name] = experts.gate_up_proj.data[..., n::2]
        views[f"{name}_bias"] = experts.gate_up_proj_bias.data[..., n::2]
    return Mixture(**SIZES, layout="interleaved", biases=True), experts, views


@pytest.mark.parametrize("make", [qwen, gpt_oss])
@pytest.mark.parametrize("routing", ["random", "one expert", "each another"])
def test_kernels_compute_what_the_experts_do(make, routing):
    torch.manual_seed(0)
    m, experts, views = make()
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x, residual = torch.randn(m.tokens, m.width), torch.randn(m.tokens, m.width)
    weights = torch.rand(m.tokens, m.chosen)
    index = torch.stack([torch.randperm(m.experts)[: m.chosen] for _ in range(m.tokens)])
    if routing == "one expert":
        index = torch.tensor([[3, 1]] * m.tokens)
    elif routing == "each another":
        index = (torch.arange(m.tokens * m.chosen) % m.experts).view(m.tokens, m.chosen)
    given = views | {
        "x": x.view(m.tokens, 1, 1, m.width),
        "residual": residual.view(m.tokens, 1, 1, m.width),
        "weights": weights.view(m.tokens, m.chosen, 1, 1),
        "e": index,
    }
    g = programs.whole(m)
    with torch.no_grad():
        want = residual + experts(x, index, weights)
    for ranked in search(g, SEARCH)[0][:4]:
        (y,) = ranked.ugraph([given[t.name] for t in g.inputs])
        assert torch.allclose(y.view_as(want), want, atol=1e-5), ranked.ugraph.kernels
