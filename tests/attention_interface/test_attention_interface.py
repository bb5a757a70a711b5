"""attn_implementation="mirage" gives the same as eager attention.

Kernels run decoding steps over static caches, torch runs everything else, and both are counted.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

import mirage_hf as mi
from mirage_hf import attention_interface
from mirage_hf.attention_interface import (
    GROWING,
    MANY,
    MOST_TRACED,
    Attention,
    AttentionReport,
    attention_in_torch,
    bounds_of,
    masks,
)
from mirage_hf.attention_interface.sizes import kernel_inputs
from mirage_hf.errors import InputError, SearchError
from mirage_hf.pipeline import resolver, torch_op
from tests.helpers import triton_interpreter
from tests.helpers.generate_comparison import left_padded
from tests.helpers.tiny_models import SIZES, Resolved, prompt, tiny, twin_of

pytestmark = pytest.mark.models

CPU = "mirage_on_the_cpu"
"""The name of the same functions with kernels run as torch code."""


@pytest.fixture(scope="module")
def ours() -> Attention:
    """Return the attention that all tests share, so that kernels are found once for a size."""
    found = Attention("cpu")
    found.register(CPU)
    return found


class Counted:
    """The calls counted inside of a `with` block."""

    def __init__(self, attention: Attention):
        self.attention, self.before = attention, attention.report()

    @property
    def kernels(self) -> int:
        return sum(k.calls for k in self.attention.report().kernels) - sum(
            k.calls for k in self.before.kernels
        )

    @property
    def torch(self) -> dict[str, int]:
        now, before = self.attention.report().by_torch, self.before.by_torch
        return {why: n - before.get(why, 0) for why, n in now.items() if n > before.get(why, 0)}


def pair(family: str | Any, name: str = CPU) -> tuple[Any, Any]:
    eager = tiny(family) if isinstance(family, str) else family
    eager.set_attn_implementation("eager")
    model = twin_of(eager)
    model.set_attn_implementation(name)
    return eager, model


def generated(model: Any, cache: str | None) -> tuple[Tensor, Tensor]:
    out = model.generate(
        **left_padded((5, 8)),
        cache_implementation=cache,
        disable_compile=True,
        do_sample=False,
        max_new_tokens=13,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits)


# -- whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("cache", ["static", None])
def test_left_padded_batches(ours, family, cache):
    """21 tokens exceed windows of 9 (one layer of qwen3, two layers of gemma2).

    Gemma2 has softcap.
    """
    eager, model = pair(family)
    want, counted = generated(eager, cache), Counted(ours)
    got = generated(model, cache)
    assert torch.equal(want[0], got[0]) and float((want[1] - got[1]).abs().max()) < 1e-5
    layers, steps, sliding = 3, 12, {"llama": 0, "gemma2": 2, "qwen3": 1}[family]
    growing = counted.torch.get(GROWING, 0)
    assert (
        counted.torch == {MANY: layers} | ({GROWING: growing} if growing else {})
        and counted.kernels == layers * steps - growing
    )
    if cache == "static":  # the step that fills a layer may count as one over a cache that grows
        assert growing <= layers
    else:  # full windows are of a fixed length in every cache
        assert growing == layers * steps - sliding * (steps - 1)


@pytest.mark.slow
def test_sinks(ours):
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2}
    model = tf.GptOssForCausalLM(
        tf.GptOssConfig(
            **sizes, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=9
        )
    ).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(1.0)
    eager, model = pair(model)
    want, counted = generated(eager, "static"), Counted(ours)
    got = generated(model, "static")
    assert (
        torch.equal(want[0], got[0])
        and float((want[1] - got[1]).abs().max()) < 1e-5
        and counted.kernels >= 2 * 11
    )
    without = twin_of(model)
    for layer in without.model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)
    assert float((generated(without, "static")[1] - want[1]).abs().max()) > 1e-3


def test_holes_in_the_mask(ours):
    """Prompts are padded on the right, then steps follow.

    So the keys that a row sees are not one range.
    """
    eager, model = pair("llama")
    ids, mask = prompt(2, 6), torch.ones(2, 9, dtype=torch.long)
    mask[0, 3:6] = 0

    def run(model: Any) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=21)
        logits = [model(ids, attention_mask=mask[:, :6], past_key_values=cache).logits[1]]
        for n in range(6, 9):
            at = mask[:, : n + 1].cumsum(-1)[:, -1:] - 1
            logits.append(
                model(
                    prompt(2, 1, seed=n),
                    attention_mask=mask[:, : n + 1],
                    position_ids=at,
                    past_key_values=cache,
                ).logits[:, 0]
            )
        return torch.cat(logits)

    with torch.no_grad():
        want, counted = run(eager), Counted(ours)
        assert float((run(model) - want).abs().max()) < 1e-5 and counted.kernels == 3 * 3
        mask[0, 3:6] = 1
        assert float((run(eager) - want).abs().max()) > 1e-2


def test_registered_by_the_import():
    """A model may name the attention when it is made.

    Without a GPU it runs sdpa, equal to the last bit, and is counted as such.
    """
    config = tf.LlamaConfig(**SIZES)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="mirage").eval()
    sdpa, counted = twin_of(model), Counted(attention_interface._attention)
    sdpa.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(model(prompt(2, 7)).logits, sdpa(prompt(2, 7)).logits)
    assert counted.torch == {"tensors on cpu": 3} and counted.kernels == 0
    assert "by torch: tensors on cpu: " in str(mi.attention_report())


def test_gradients_of_training(ours):
    eager, model = pair("llama")
    ids, counted = prompt(2, 7), Counted(ours)
    for m in (eager, model):
        m.train()(ids, labels=ids).loss.backward()
    assert counted.torch == {"gradients": 3}
    assert all(
        torch.allclose(p.grad, q.grad, atol=1e-6)
        for p, q in zip(eager.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.slow
def test_compiled_steps_keep_the_kernels(ours):
    model = pair("llama")[1]
    given, graphs = left_padded((5, 8)), []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    def run(step: Any) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=21)
        model(**given, past_key_values=cache)
        mask = torch.cat((given["attention_mask"], torch.ones(2, 1, dtype=torch.long)), 1)
        return step(prompt(2, 1, seed=3), attention_mask=mask, past_key_values=cache).logits

    torch._dynamo.reset()
    compiled = sum(k.calls_compiled for k in ours.report().kernels)
    with torch.no_grad():
        assert torch.equal(run(torch.compile(model, backend=backend, fullgraph=True)), run(model))
    assert sum(k.calls_compiled for k in ours.report().kernels) == compiled + 3
    assert " and 3 by compiled graphs, not counting replays (" in str(ours.report())
    assert [str(n.target) for g in graphs for n in g.graph.nodes].count(
        "mirage_hf.run.default"
    ) == 3


# -- single calls ---------------------------------------------------------------------------------

HEADS, KV_HEADS, D, SLOTS = 4, 2, 8, 21


def call(slots: int = SLOTS, rows: int = 2) -> dict[str, Any]:
    """Run a decoding step over a static cache, as a layer would.

    Row 0 sees keys 4 to 12, row 1 all up to 12.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, h, n, D, generator=generator)
        for h, n in ((HEADS, 1), (KV_HEADS, slots), (KV_HEADS, slots))
    )
    return dict(
        module=SimpleNamespace(
            num_key_value_groups=HEADS // KV_HEADS, is_causal=True, training=False
        ),
        query=q,
        key=k,
        value=v,
        scaling=D**-0.5,
    )


def step_mask(attention: Attention, slots: int = SLOTS, rows: int = 2, at: int = 12) -> Tensor:
    seen = torch.ones(rows, at + 1, dtype=torch.bool)
    seen[0, :4] = False
    return attention.mask(
        batch_size=rows,
        q_length=1,
        kv_length=slots,
        q_offset=torch.tensor(at),
        kv_offset=0,
        attention_mask=seen,
        mask_function=causal_mask_function,
        allow_is_causal_skip=False,
        device=torch.device("cpu"),
    )


OBSTACLES: dict[str, tuple[str, Any]] = {
    "dropout": ("dropout", lambda c, m: c.update(dropout=1e-9)),
    "gradients": ("gradients", lambda c, m: c["query"].requires_grad_()),
    "dtypes": (
        "dtypes or devices that differ, or torch.float64",
        lambda c, m: c.update({n: c[n].double() for n in ("query", "key", "value")}),
    ),
    "an argument that sdpa takes": (
        "the argument position_bias",
        lambda c, m: c.update(position_bias=torch.randn(1, HEADS, 1, SLOTS)),
    ),
    "an unknown argument": ("the argument hint", lambda c, m: c.update(hint=3)),
    "a float mask": (GROWING, lambda c, m: c.update(attention_mask=torch.where(m, 0.0, -1e9))),
    "no mask": (GROWING, lambda c, m: c.update(attention_mask=None)),
    "a mask of the user's own": (GROWING, lambda c, m: c.update(attention_mask=m.clone())),
    "a mask that was changed": (
        "a mask that was changed, or made outside of the CUDA graph",
        lambda c, m: c["attention_mask"].copy_(torch.arange(SLOTS) < 3),
    ),
    "a prompt": (
        MANY,
        lambda c, m: c.update(query=torch.randn(2, HEADS, 5, D), attention_mask=None),
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_calls_without_kernels_are_sdpa(ours, name):
    reason, change = OBSTACLES[name]
    given = call() | {"attention_mask": step_mask(ours)}
    change(given, given["attention_mask"])
    counted = Counted(ours)
    got, weights = ours.attend(**given)
    assert torch.equal(got, sdpa_attention_forward(**given)[0]) and weights is None
    assert counted.torch == {reason: 1} and counted.kernels == 0


def test_autocast_is_sdpa(ours):
    counted = Counted(ours)
    with torch.autocast("cpu", torch.bfloat16):
        ours.attend(**call(), attention_mask=step_mask(ours))
    assert counted.torch == {"autocast": 1}


def test_many_slots_and_rows_without_keys(monkeypatch):
    """Kernels are searched for few slots, tuned for many, and refitted to the cache."""
    asked: list[tuple[int, ...]] = []

    def resolve(program: Any, like: Any = None, **_: Any) -> Resolved:
        asked.append(tuple(p.inputs[1].dims[2] for p in (program, like) if p is not None))
        return Resolved(program)

    monkeypatch.setattr(resolver, "resolve", resolve)
    attention, slots = Attention("cpu"), 1200
    given, mask = call(slots=slots), step_mask(attention, slots, at=1100)
    got = attention.attend(**given, attention_mask=mask)[0]
    assert float((got - sdpa_attention_forward(**given, attention_mask=mask)[0]).abs().max()) < 1e-6
    got = attention.attend(**given, attention_mask=step_mask(attention, slots, at=2))[
        0
    ]  # row 0 begins at key 4
    assert not got[0].any() and got[1].any()
    attention.attend(**call(), attention_mask=step_mask(attention))
    assert asked == [(4096, 256), (256,)] and attention.report().by_torch == {}
    assert [k.timed_at for k in attention.report().kernels] == [4096, 256]
    timed = replace(attention.report().kernels[0], time_us=6.2, library_us=36.1)
    assert "1200 keys, float32: 2 (cache, 6.2 µs (36.1) over 4096 keys)" in str(
        AttentionReport((timed,), {}, {})
    )


def test_a_call_of_a_compiled_graph_is_counted_once(resolved):
    """Models that pass the usual scale and models that leave it out share a kernel."""
    attention, given = Attention("cpu"), call()
    mask = step_mask(attention)
    attention.attend(**given, attention_mask=mask)
    attention.attend(**given | {"scaling": None}, attention_mask=mask)
    (kernel,) = attention.kernels.by_sizes.values()
    lo, hi, bias = bounds_of(mask, torch.float32)
    torch_op.run(
        kernel_inputs(given["query"], given["key"], given["value"], lo, hi, bias, None),
        kernel.digest,
    )
    assert [(k.calls, k.calls_compiled) for k in attention.report().kernels] == [(2, 1)]


def test_keys_selected_by_index_are_refused(ours):
    """DeepSeek-V3.2 passes an index, except to sdpa and eager attention.

    SDPA would attend to all keys.
    """
    with pytest.raises(
        InputError, match=r"SimpleNamespace selects keys by index.*use attn_implementation="
    ):
        ours.attend(
            **call(), attention_mask=step_mask(ours), indices=torch.zeros(2, 1, 4, dtype=torch.long)
        )
    assert ours.attend(**call(), attention_mask=step_mask(ours), indices=None)[0].isfinite().all()


def test_models_that_know_no_attention_by_name_stay_eager(caplog):
    """Bloom adds its mask to the scores whatever the name is.

    `from_config` accepts the name.
    """
    config = tf.BloomConfig(vocab_size=SIZES["vocab_size"], hidden_size=32, n_layer=1, n_head=4)
    torch.manual_seed(0)
    eager = tf.BloomForCausalLM._from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()
    model = tf.BloomForCausalLM._from_config(config, attn_implementation="mirage").eval()
    model.load_state_dict(eager.state_dict())
    masks._takes_names_once.cache_clear()
    given = left_padded((5, 8))
    with torch.no_grad():
        assert all(torch.equal(model(**given).logits, eager(**given).logits) for _ in range(2))
    assert [
        m for m in caplog.messages if "BloomModel may run attention of its own" in m
    ] == caplog.messages


@pytest.mark.slow
def test_compiled_graphs_are_for_a_few_lengths_only(resolved):
    attention = Attention("cpu")
    for slots in range(20, 30):
        attention.attend(**call(slots=slots), attention_mask=step_mask(attention, slots))
    assert len(attention.report().kernels) == 10 and len(attention.kernels.traceable) == MOST_TRACED
    assert [k.traceable for k in attention.report().kernels] == [True] * 4 + [False] * 6
    assert str(attention.report()).count("not in compiled graphs, which hold 4 others like it") == 6
    attention.attend(**call(rows=3), attention_mask=step_mask(attention, rows=3))
    assert len(attention.kernels.traceable) == MOST_TRACED + 1


def test_prompts_of_attention_in_torch_are_causal_and_refuse_what_they_drop():
    given = call() | {"query": torch.randn(2, HEADS, SLOTS, D)}
    rest = dict(mask=None, dropout=0.0, softcap=None, sinks=None)
    want = sdpa_attention_forward(**given, attention_mask=None)[0]
    assert float((attention_in_torch(**given, **rest) - want).abs().max()) < 1e-6
    assert float((attention_in_torch(**given, **rest | {"softcap": 1e4}) - want).abs().max()) < 1e-4
    assert (
        float(
            (attention_in_torch(**given, **rest | {"sinks": torch.full((HEADS,), 2.0)}) - want)
            .abs()
            .max()
        )
        > 1e-2
    )
    with pytest.raises(InputError, match="position_bias together with softcap or sinks"):
        attention_in_torch(**given, **rest | {"softcap": 1.0}, position_bias=torch.zeros(1))


def test_a_missing_kernel_is_reported_once(monkeypatch):
    asked: list[Any] = []

    def resolve(program: Any, **_: Any) -> None:
        asked.append(program)
        raise SearchError("nothing found")

    monkeypatch.setattr(resolver, "resolve", resolve)
    attention, given = Attention("cpu"), call()
    mask = step_mask(attention)
    for _ in range(3):
        assert torch.equal(
            attention.attend(**given, attention_mask=mask)[0],
            sdpa_attention_forward(**given, attention_mask=mask)[0],
        )
    report = attention.report()
    assert len(asked) == 1 and report.by_torch == {"no kernel: nothing found": 3}
    assert (
        "no kernel for 2 x 4 heads of 8 (2 of keys), 21 keys, float32: no kernel: nothing found"
        in str(report)
    )


def test_bounds_of_a_mask():
    mask = torch.zeros(3, 1, 1, 7, dtype=torch.bool)
    mask[0, ..., 2:5], mask[1, ..., [1, 6]] = True, True
    lo, hi, bias = bounds_of(mask, torch.float16)
    assert lo.flatten().tolist() == [2, 1, 7] and hi.flatten().tolist() == [5, 7, 0]
    assert (
        lo.dtype is hi.dtype is torch.int32
        and bias.dtype is torch.float16
        and torch.equal(bias == 0, mask)
        and bias.min() == -65504
    )
    spread = bounds_of(mask[:1].expand(4, -1, -1, -1), torch.float32)
    assert all(x.is_contiguous() and x.shape[0] == 4 for x in spread) and spread[2].isfinite().all()


# -- generated kernels ----------------------------------------------------------------------------

INTERPRETED = """
import json
import torch
from mirage_hf.attention_interface import bounds_of
from mirage_hf.codegen import compile as compiler, triton
from mirage_hf.graph import symbolic
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.patterns.masked_attention import MASKED_ATTENTION
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.engine import search
from mirage_hf.tune import space

block = MASKED_ATTENTION.block(
    kv_heads=2,
    group=2,
    head_dim=16,
    value_dim=32,
    dtype=torch.float16,
    sinks=True,
    scale=0.3,
    softcap=30.0,
)
program = block.program(
    2, slots=77, strides=((77 * 2 * 16, 16, 2 * 16, 1), None)
)  # keys lie as (rows, slots, heads, d)
torch.manual_seed(0)
inputs = [
    torch.empty_strided(t.dims, t.strides, dtype=t.dtype).copy_(torch.randn(t.dims))
    for t in program.inputs
]
mask = torch.rand(2, 1, 1, 77) < 0.3
mask[0, ..., 8:61], mask[0, ..., 3], mask[0, ..., 70:], mask[1, ..., 5:] = (
    False,
    True,
    False,
    False,
)  # whole tiles and parts are shut
inputs[3:6] = bounds_of(mask, torch.float16)
inputs[1][1, :, 5:] = inputs[1][0, :, 72:] = float("nan")
(want,) = run_kernel_graph(
    program, [x.double() if x.is_floating_point() else x for x in inputs], torch.float64
)
found, _ = search(block.program(2, slots=256), SearchOptions(time_limit=20, threads=1))
errors = {}
for kernels in (1, 2):
    ugraph = symbolic.for_program(
        next(f.ugraph for f in found if f.ugraph.num_kernels == kernels), program
    )
    made = triton.generate(ugraph, [space.schedules(op, limit=1)[0] for op in ugraph.block_ops])
    (got,) = compiler.load(made.source, made.digest).run(inputs)
    errors[kernels] = float((got - want).abs().max())
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_generated_kernels_equal_torch():
    for kernels_of, error in triton_interpreter.run(INTERPRETED).items():
        assert error < 2e-3, f"{kernels_of} kernels: {error}"
