"""attn_implementation="mirage" on a GPU.

Generated kernels are compared with float64, run without synchronizing, in CUDA graphs and in
compiled models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from mirage_hf import attention_interface
from mirage_hf.attention_interface import Attention, attention_in_torch
from mirage_hf.pipeline import resolver

pytestmark = pytest.mark.gpu

SIZES = (
    (1, 8, 4, 64, 256),
    (2, 8, 4, 128, 300),
    (4, 2, 7, 64, 1100),
    (1, 8, 4, 128, 5000),
    (3, 4, 1, 80, 129),
    (2, 2, 2, 256, 77),
    (8, 8, 1, 96, 21),
)
"""Rows, kv heads, queries per key, head dim, slots."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "sinks": {"s_aux": True},
}
CASES = [
    (size, kind, dtype) for size in SIZES for kind in KINDS for dtype in ("float16", "bfloat16")
] + [(size, "plain", "float32") for size in SIZES[:2]]
ALLOWED = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cost model choose schedules, so that many sizes take little time."""
    monkeypatch.setattr(resolver, "resolve", partial(resolver.resolve, tune="never"))


def call(
    size: tuple[int, ...],
    dtype: torch.dtype,
    softcap: float | None = None,
    s_aux: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    rows, kv_heads, group, d, slots = size
    generator = torch.Generator("cuda").manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device="cuda")
    given = dict(
        module=SimpleNamespace(num_key_value_groups=group, is_causal=True, training=False),
        scaling=d**-0.5,
        softcap=softcap,
        query=3 * normal(rows, 1, kv_heads * group, d),
        key=normal(rows, kv_heads, slots, d),
        value=normal(rows, kv_heads, slots, d),
        s_aux=2 * normal(kv_heads * group) if s_aux else None,
    )
    given["query"] = given["query"].transpose(1, 2)  # with the strides of a projection's output
    return {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in given.items()}


def mask_of(
    attention: Attention,
    given: dict[str, Any],
    at: Tensor,
    padding: Tensor | None,
    window: int | None = None,
) -> Tensor:
    function = (
        causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    )
    return attention.mask(
        batch_size=given["key"].shape[0],
        q_length=1,
        kv_length=given["key"].shape[2],
        q_offset=at,
        kv_offset=0,
        mask_function=function,
        attention_mask=padding,
        allow_is_causal_skip=False,
        local_size=window,
        device=at.device,
    )


def masks(attention: Attention, given: dict[str, Any]) -> dict[str, Tensor]:
    """Return masks of a step.

    They allow as many tokens as there are slots, few tokens, padding on the left, holes, or a
    window.
    """
    rows, slots = given["key"].shape[0], given["key"].shape[2]
    last, few = torch.tensor(slots - 1, device="cuda"), torch.tensor(slots // 3, device="cuda")
    first = torch.arange(rows, device="cuda") * (slots // 16) + slots // 9
    left = (
        torch.arange(slots, device="cuda") >= first.clamp(max=slots // 3)[:, None]
    )  # each row sees a key
    holes = (
        torch.rand(rows, slots, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        < 0.2
    )
    holes[:, slots // 4 : slots // 2], holes[:, 1] = False, True
    of = partial(mask_of, attention, given)
    return {
        "full": of(last, None),
        "few": of(few, None),
        "left": of(few, left),
        "holes": of(last, holes),
        "window": of(last, left, slots // 5),
    }


def expected(given: dict[str, Any], mask: Tensor) -> Tensor:
    """Return the result in float64."""
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in given.items()}
    q, k, v = (
        wide["query"],
        *(
            wide[n].repeat_interleave(wide["query"].shape[1] // wide["key"].shape[1], 1)
            for n in ("key", "value")
        ),
    )
    scores = q @ k.transpose(2, 3) * wide["scaling"]
    if wide["softcap"]:
        scores = torch.tanh(scores / wide["softcap"]) * wide["softcap"]
    weights = torch.where(mask, scores, -torch.inf)
    if wide["s_aux"] is not None:
        weights = torch.cat(
            (weights, wide["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1
        )
    return (torch.softmax(weights, -1)[..., : k.shape[2]] @ v).transpose(1, 2)


def calls(attention: Attention) -> int:
    return sum(k.calls for k in attention.report().kernels)


@pytest.mark.parametrize("size, kind, dtype", CASES)
def test_steps_against_float64(untuned, size, kind, dtype):
    attention, given = Attention(), call(size, getattr(torch, dtype), **KINDS[kind])
    wrong = []
    with torch.no_grad():
        for name, mask in masks(attention, given).items():
            got, want = attention.attend(**given, attention_mask=mask)[0], expected(given, mask)
            by_torch = attention_in_torch(
                given["module"],
                given["query"],
                given["key"],
                given["value"],
                mask,
                0.0,
                given["scaling"],
                given["softcap"],
                given["s_aux"],
            )
            error, theirs = (float((x.double() - want).abs().max()) for x in (got, by_torch))
            if not error <= ALLOWED[dtype] * max(1.0, float(want.abs().max())):
                wrong.append(
                    f"mask {name}: error {error:.3g}, torch's {theirs:.3g}, largest value "
                    f"{float(want.abs().max()):.3g}"
                )
            if got.shape != by_torch.shape or not got.is_contiguous():
                wrong.append(f"mask {name}: shape {tuple(got.shape)}, strides {got.stride()}")
    assert not wrong, (size, kind, dtype, wrong, str(attention.report()))
    assert calls(attention) == 5, f"{size} {kind} {dtype}: {attention.report()}"


def test_keys_with_other_strides(untuned):
    """The cache stores the heads of a slot next to each other, in a buffer of two layers."""
    attention, given = Attention(), call((2, 4, 2, 64, 200), torch.float16)
    for n in ("key", "value"):
        buffer = torch.full((2, 200, 2, 4, 64), float("nan"), device="cuda", dtype=torch.float16)
        view = buffer[:, :, 1].transpose(1, 2)
        given[n] = view.copy_(given[n])
    with torch.no_grad():
        for name, mask in masks(attention, given).items():
            error = float(
                (attention.attend(**given, attention_mask=mask)[0].double() - expected(given, mask))
                .abs()
                .max()
            )
            assert error < 4e-3, (name, error, str(attention.report()))
    assert calls(attention) == 5, str(attention.report())


def test_a_step_does_not_synchronise(untuned):
    attention, given = Attention(), call((2, 8, 4, 64, 256), torch.bfloat16)
    at, padding = (
        torch.tensor(100, device="cuda"),
        torch.ones(2, 101, dtype=torch.bool, device="cuda"),
    )

    def step() -> Tensor:
        return attention.attend(**given, attention_mask=mask_of(attention, given, at, padding))[0]

    with torch.no_grad():
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert calls(attention) == 2, str(attention.report())


def captured(run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    return graph, y


def test_cuda_graphs(untuned):
    """A captured step follows the length on the device.

    If the mask was made before the capture, SDPA runs and follows the mask.
    """
    attention, given = Attention(), call((2, 8, 4, 64, 256), torch.float16)
    at, padding = (
        torch.tensor(100, device="cuda"),
        torch.ones(2, 256, dtype=torch.bool, device="cuda"),
    )
    padding[0, :7] = False
    made = mask_of(attention, given, at, padding)
    with torch.no_grad():
        sdpa_attention_forward(
            **given, attention_mask=made
        )  # cuDNN cannot be set up during a capture
        graph, y = captured(
            lambda: attention.attend(
                **given, attention_mask=mask_of(attention, given, at, padding)
            )[0]
        )
        before = calls(attention)
        other, z = captured(lambda: attention.attend(**given, attention_mask=made)[0])
    assert before == 2 and calls(attention) == 3, str(
        attention.report()
    )  # warms up outside of the second capture
    assert attention.report().by_torch == {
        "a mask that was changed, or made outside of the CUDA graph": 1
    }
    for length in (100, 30, 255):
        at.fill_(length)
        mask = mask_of(attention, given, at, padding)
        made.copy_(mask)
        graph.replay(), other.replay()
        want = expected(given, mask)
        errors = [float((x.double() - want).abs().max()) for x in (y, z)]
        assert max(errors) < 4e-3, (length, errors)


# -- models ---------------------------------------------------------------------------------------


def model_of(kind: str) -> Any:
    sizes: dict[str, Any] = dict(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        pad_token_id=0,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    model = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)),
        "gemma2": lambda: tf.Gemma2ForCausalLM(
            tf.Gemma2Config(**sizes, sliding_window=32, query_pre_attn_scalar=64)
        ),
        "gpt-oss": lambda: tf.GptOssForCausalLM(
            tf.GptOssConfig(**sizes, sliding_window=32, num_local_experts=2, num_experts_per_tok=1)
        ),
    }[kind]()
    model.generation_config.eos_token_id = None
    return model.eval().cuda()


def steps(model: Any, given: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of a padded prompt and of these tokens after it, over a static cache."""
    cache = StaticCache(
        config=model.config, max_cache_len=given["input_ids"].shape[1] + tokens.shape[1] + 3
    )
    mask, logits = given["attention_mask"], []
    with torch.no_grad():
        out = model(**given, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), past_key_values=cache)
        for n in range(tokens.shape[1]):
            logits.append(out.logits[:, -1].float())
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
            out = model(
                tokens[:, n : n + 1],
                attention_mask=mask,
                position_ids=mask.sum(-1, keepdim=True) - 1,
                past_key_values=cache,
            )
    return torch.stack([*logits, out.logits[:, -1].float()])


def padded() -> dict[str, Tensor]:
    ids = torch.randint(1, 500, (3, 24), generator=torch.Generator().manual_seed(3)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :9], mask[2, :2] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_beside_float32(untuned, kind, dtype):
    """Rows are left-padded and exceed windows of 32.

    Our logits are as near to those of float32 as eager's in the same dtype.
    """
    exact = model_of(kind)
    exact.set_attn_implementation("eager")
    tokens = torch.randint(1, 500, (3, 30), generator=torch.Generator().manual_seed(4)).cuda()
    want = steps(exact, padded(), tokens)
    eager = copy.deepcopy(exact).to(getattr(torch, dtype))
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("mirage")
    before = sum(k.calls for k in attention_interface.attention_report().kernels)
    theirs, mine = ((steps(m, padded(), tokens) - want).abs() for m in (eager, ours))
    report = attention_interface.attention_report()
    ran = sum(k.calls for k in report.kernels) - before
    assert ran >= 4 * 29, f"{kind} {dtype}: {ran} calls by kernels\n{report}"
    assert float(mine.mean()) <= 1.3 * float(theirs.mean()) and float(mine.max()) <= 2 * float(
        theirs.max()
    ), (
        kind,
        dtype,
        "mean, max: ours",
        float(mine.mean()),
        float(mine.max()),
        "eager's",
        float(theirs.mean()),
        float(theirs.max()),
    )


@pytest.mark.parametrize("tuned", [False, True])
def test_generate_with_a_static_cache_is_compiled_with_the_kernels(monkeypatch, tmp_path, tuned):
    """generate compiles the step by itself.

    Kernels are found while the prompt runs, and the compiled graph calls them.
    """
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    if not tuned:
        monkeypatch.setattr(resolver, "resolve", partial(resolver.resolve, tune="never"))
    torch._dynamo.reset()
    attention, model = Attention(), model_of("llama").half()
    attention.register("mirage_compiled")
    options = dict(
        cache_implementation="static", do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    model.set_attn_implementation("sdpa")
    want = model.generate(**padded(), **options, disable_compile=True)
    model.set_attn_implementation("mirage_compiled")
    got = model.generate(**padded(), **options)
    report = attention.report()
    assert len(report.kernels) == 1 and not report.without, str(report)
    assert report.kernels[0].calls_compiled, f"the compiled step holds no kernels: {report}"
    assert (report.kernels[0].time_us is not None) == tuned, str(report)
    assert (got == want).float().mean() > 0.9, (
        got.tolist(),
        want.tolist(),
    )  # near ties
    again = model.generate(**padded(), **options)
    assert torch.equal(got, again), (got.tolist(), again.tolist())
