"""The installed `generate` during the life of a model.

The model is wrapped, copied, moved, shared by threads, interrupted and restored.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM, pipeline

from mirage_hf.decode import (
    DecodeError,
    cache_block,
    cache_pool,
    install,
    prefill,
    uninstall,
)
from mirage_hf.decode import step as decode_step
from mirage_hf.decode.cache_pool import most_idle
from mirage_hf.decode.control import Control
from mirage_hf.decode.model_fingerprint import take_fingerprint
from tests.helpers.generate_comparison import (
    VOCABULARY,
    Recorder,
    assert_same,
    assert_same_cache,
    both,
    handled,
    left_padded,
    prompt,
    tiny,
    tokenizer,
)
from tests.helpers.generate_features import fake_captures

pytestmark = pytest.mark.models

ASSET = Path(__file__).parents[1] / "assets" / "tiny_llama"
GREEDY = {"inputs": prompt(2), "max_new_tokens": 9}


def stock(model, **arguments):
    return type(model).generate(model, **arguments)


# -- coming and going -----------------------------------------------------------------------------


def test_uninstall_leaves_the_instance_as_it_was():
    model = tiny("llama")
    before, keys = dict(model.__dict__), list(model.__dict__)
    install(model)
    install(model, mode="eager")
    both(model, GREEDY)
    uninstall(model)
    uninstall(model)
    assert list(model.__dict__) == keys and all(model.__dict__[k] is before[k] for k in keys)
    assert model.generate.__func__ is type(model).generate


def test_wrong_models_are_refused():
    with pytest.raises(DecodeError, match="Linear is not a transformers model"):
        install(torch.nn.Linear(2, 2))
    model = tiny("llama")
    with pytest.raises(DecodeError, match="mode must be 'graph' or 'eager'"):
        install(model, mode="fast")
    with pytest.raises(DecodeError, match="max_cache_len must be at least 1"):
        install(model, max_cache_len=0)
    model.generate = lambda *a: None
    with pytest.raises(DecodeError, match="already has an instance-level generate"):
        install(model)
    assert "Generate" not in repr(model.__dict__["generate"])


def test_signature_and_documentation_are_stocks():
    model = tiny("llama")
    before = inspect.signature(model.generate)
    install(model)
    assert (
        inspect.signature(model.generate) == before
        and model.generate.__doc__ == type(model).generate.__doc__
    )
    assert model.generate.__name__ == "generate" and model.generate.__self__ is model


def test_a_deleted_model_frees_its_memory():
    model = tiny("llama")
    runner = install(model)
    model.generate(**GREEDY)
    alive, kept = weakref.ref(model.model), model.generate
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(DecodeError, match="its model has been deleted"):
        kept(**GREEDY)
    assert runner.counts


def test_a_deleted_model_frees_its_pool():
    model = tiny("llama")
    runner = install(model)
    model.generate(**GREEDY)
    alive = weakref.ref(runner.pool._idle[0])
    gc.collect()
    gc.disable()
    try:
        del model, runner
        assert alive() is None
    finally:
        gc.enable()


def test_release():
    model = tiny("llama")
    runner = install(model)
    assert runner.bytes == 0
    model.generate(**GREEDY)
    used = runner.bytes
    assert used > 2 * 2 * 2 * 2 * 256 * 8 * 4
    model.generate(**GREEDY)
    assert runner.bytes == used
    runner.release()
    assert runner.bytes == 0
    assert_same(*both(model, GREEDY))
    assert runner.bytes == used


def test_release_in_mid_call():
    model = tiny("llama")
    runner = install(model)

    class Releasing(Recorder):
        def put(self, value):
            runner.release()

    ours = model.generate(prompt(), max_new_tokens=9, streamer=Releasing())
    assert_same(stock(model, inputs=prompt(), max_new_tokens=9), ours)
    assert runner.bytes == 0


# -- memory ---------------------------------------------------------------------------------------


def test_memory_is_counted_while_another_call_adds_a_selection():
    block = cache_block.CacheBlock(1, 256, (None,), torch.device("cpu"))

    def tensors():
        block.choosers.pop("first", None)  # another thread may do this at any moment
        return [torch.zeros(4)]

    for name in ("first", "second"):
        block.choosers[name] = SimpleNamespace(tensors=tensors)
    assert block.bytes >= 32


def test_idle_memory_beyond_the_limit_is_freed_the_longest_idle_first(monkeypatch):
    model = tiny("llama")
    runner = install(model)
    for batch in (1, 2, 3):
        model.generate(prompt(batch), max_new_tokens=3)
    one, two, three = (b.bytes for b in runner.pool._idle)
    for room, kept in (
        (one + two + three, [1, 2, 3]),
        (two + three, [2, 3]),
        (one + three, [1, 3]),
        (three, [3]),
        (three - 1, [3]),
    ):
        runner.release()
        monkeypatch.setattr(cache_pool, "most_idle", lambda device, room=room: room)
        for batch in (1, 2, 3):
            assert_same(*both(model, {"inputs": prompt(batch), "max_new_tokens": 3}))
        assert runner.pool.blocks == [(batch, 256) for batch in kept]
        assert runner.bytes <= max(room, three)  # the last call's block stays
    assert cache_pool.most_idle is not most_idle and most_idle(torch.device("cpu")) == math.inf


class NoMemory:
    """Lets allocations fail: always while `on`, or the first `times`."""

    def __init__(self, patch, *places, times=0, on=False):
        self.left, self.on, self.failed = times, on, 0
        for owner, name in places:
            patch.setattr(owner, name, self.failing(getattr(owner, name)))

    def failing(self, asks):
        def ask(*args, **kwargs):
            if self.on or self.left:
                self.left -= not self.on
                self.failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return asks(*args, **kwargs)

        return ask


SLABS, LEASES, FORWARD = (
    (cache_block, "_zeros"),
    (Control, "allocate"),
    (LlamaForCausalLM, "_prefill"),
)


@pytest.mark.parametrize("place", [SLABS, LEASES, FORWARD])
def test_without_memory_idle_blocks_go_first(monkeypatch, place):
    model = tiny("llama")
    runner = install(model)
    model.generate(prompt(1), max_new_tokens=3)
    with monkeypatch.context() as patch:
        no = NoMemory(patch, place, times=1)
        ours = model.generate(prompt(2), max_new_tokens=9)
    assert no.failed == 1 and runner.pool.blocks == [(2, 256)]
    assert_same(stock(model, inputs=prompt(2), max_new_tokens=9), ours)
    assert not any(what.startswith("stock") for what in runner.counts), runner.counts


@pytest.mark.parametrize("place", [SLABS, LEASES])
@pytest.mark.parametrize("past", [False, True])
def test_without_any_memory_a_call_is_stocks(monkeypatch, place, past):
    model = tiny("mistral")
    runner = install(model)
    kept = [DynamicCache(config=model.config) for _ in range(2)]
    for each in kept if past else ():
        stock(model, inputs=prompt(2), max_new_tokens=5, past_key_values=each)
    recorders = [Recorder(), Recorder()]
    each = iter(zip(kept, recorders, strict=True))

    def arguments():
        theirs, recorder = next(each)
        return {
            "inputs": prompt(2, 20),
            "max_new_tokens": 6,
            "past_key_values": theirs,
            "streamer": recorder,
        }

    with monkeypatch.context() as patch:
        no = NoMemory(patch, place, on=True)
        assert_same(*both(model, arguments))
    assert_same_cache(*kept)
    assert recorders[0].events == recorders[1].events and no.failed >= 2
    assert runner.counts == {"stock: out of memory": 1} and not runner.pool.blocks
    assert_same(*both(model, GREEDY))


@pytest.mark.parametrize("seen", [False, True])
def test_a_block_that_cannot_grow(monkeypatch, seen):
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    model = tiny("llama", max_position_embeddings=1024)
    runner, given = install(model), {"inputs": prompt(1, 250), "max_new_tokens": 40}
    want = stock(model, **given)
    kept = cache_block._zeros
    monkeypatch.setattr(
        cache_block,
        "_zeros",
        lambda shape, like: kept(shape, like) if 512 not in shape else out_of_memory(),
    )
    if seen:  # what was streamed cannot be taken back
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(**given, streamer=Recorder())
    else:
        assert_same(want, model.generate(**given))
        assert runner.counts["stock: out of memory"] == 1
    assert not runner.pool._leased


def test_a_call_whose_blocks_cannot_be_captured_is_counted_once(monkeypatch):
    fake_captures(monkeypatch)
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    model = tiny("llama", max_position_embeddings=1024)
    runner = install(model)
    monkeypatch.setattr(decode_step, "capture", lambda *a: out_of_memory())
    for calls in (1, 2):
        given = {"inputs": prompt(1, 250, seed=calls), "max_new_tokens": 40}
        assert_same(stock(model, **given), model.generate(**given))
        assert runner.counts == {
            "called: capture failed (OutOfMemoryError: CUDA out of memory)": calls
        }


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("times", [1, 2])
def test_a_capture_without_memory(monkeypatch, times):
    """Idle blocks are freed first.

    Then the call runs its steps without a graph, and the next call is captured again.
    """
    fake_captures(monkeypatch)
    model = tiny("llama")
    runner = install(model)
    model.generate(prompt(1), max_new_tokens=3)
    with monkeypatch.context() as patch:
        no = NoMemory(patch, (decode_step, "capture"), times=times)
        ours = model.generate(prompt(2), max_new_tokens=9)
    assert no.failed == times and runner.pool.blocks == [(2, 256)]
    assert_same(stock(model, inputs=prompt(2), max_new_tokens=9), ours)
    assert_same(*both(model, GREEDY))
    called = {"called: capture failed (OutOfMemoryError: CUDA out of memory)": 1}
    assert runner.counts == {"captured": 3} if times == 1 else {"captured": 2, **called}


@pytest.mark.parametrize("times", [1, 2])
def test_a_capture_of_a_prompt_without_memory(monkeypatch, times):
    fake_captures(monkeypatch)
    model = tiny("llama")
    runner = install(model)
    for batch in (1, 2):
        model.generate(prompt(batch), max_new_tokens=3)
    with monkeypatch.context() as patch:
        no = NoMemory(patch, (prefill, "capture"), times=times)
        assert_same(*both(model, GREEDY))
    assert no.failed == times and runner.pool.blocks == [(2, 256)]
    failed = (
        {} if times == 1 else {"called: capture failed (OutOfMemoryError: CUDA out of memory)": 1}
    )
    assert runner.prefills == ({"captured": 1} | failed if times == 1 else failed)
    for _ in range(2):  # memory may be free at another time
        assert_same(*both(model, GREEDY))
    assert (
        runner.prefills == {"captured": 4 - times, **failed}
        if times == 1
        else {"captured": 1, **failed}
    )


def test_a_call_that_begins_again_draws_and_counts_once(monkeypatch):
    model = tiny("llama", max_position_embeddings=1024)
    runner, given = (
        install(model),
        {"inputs": prompt(1, 250), "max_new_tokens": 40, "do_sample": True},
    )

    def drawn(times):
        monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
        runner.release()
        runner.counts.clear()
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            kept, left = cache_block._zeros, [times]

            def zeros(shape, like):
                if 512 in shape and left[0]:
                    left[0] -= 1
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return kept(shape, like)

            patch.setattr(cache_block, "_zeros", zeros)
            return model.generate(**given), torch.rand(1), dict(runner.counts)

    once, again, none = (drawn(times) for times in (0, 1, 1 << 30))
    assert torch.equal(once[0], again[0]) and torch.equal(once[1], again[1]) and once[2] == again[2]
    assert none[2] == {"stock: out of memory": 1}
    torch.manual_seed(0)
    assert torch.equal(none[0], stock(model, **given))


# -- copies ---------------------------------------------------------------------------------------


def pickle_and_load(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle_and_load])
def test_copies_and_pickles_are_stock_models(copied, monkeypatch):
    """They have no attribute of ours, and follow a later patch of their class."""
    model = tiny("llama")
    keys = set(model.__dict__)
    install(model)
    expected = model.generate(**GREEDY)
    twin = copied(model)
    assert set(twin.__dict__) == keys and type(twin) is type(model)
    assert twin.generate.__func__ is type(model).generate and twin.generate.__self__ is twin
    assert_same(expected, twin.generate(**GREEDY))
    again = copied(twin)
    assert again.generate.__self__ is again and set(again.__dict__) == keys
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda self, **_: "patched")
    assert twin.generate(**GREEDY) == "patched"
    del model
    gc.collect()
    uninstall(twin)  # nothing happens


def test_a_deep_copy_has_weights_of_its_own():
    model = tiny("llama")
    install(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(-1.3)
    runner = install(twin)
    assert_same(*both(twin, GREEDY))
    assert_same(*both(model, GREEDY))
    assert model.generate(**GREEDY).tolist() != twin.generate(**GREEDY).tolist()
    assert handled(runner) == 2


def test_pickles_name_nothing_of_ours(tmp_path):
    model = tiny("llama")
    install(model)
    expected = model.generate(**GREEDY)
    assert b"mirage_hf" not in pickle.dumps(model)
    torch.save(model, tmp_path / "model.pt")
    assert_same(expected, torch.load(tmp_path / "model.pt", weights_only=False).generate(**GREEDY))
    uninstall(model)
    assert "__getstate__" not in model.__dict__


def test_save_and_reload(tmp_path):
    model = tiny("llama")
    keys = list(model.state_dict())
    install(model)
    expected = model.generate(**GREEDY)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    back = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert "generate" not in back.__dict__ and back.config.architectures == ["LlamaForCausalLM"]
    assert_same(expected, back.generate(**GREEDY))


# -- changes to the model -------------------------------------------------------------------------


def test_dtype_changes():
    model = tiny("llama")
    runner = install(model)
    for change in (
        lambda m: m,
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.float(),
    ):
        change(model)
        stock_out, ours = both(
            model, {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
        )
        if (
            model.dtype == torch.bfloat16
        ):  # rounds differently over a masked cache: compare before tokens can part
            torch.testing.assert_close(ours.logits[0], stock_out.logits[0])
            assert ours.past_key_values.layers[0].keys.dtype == torch.bfloat16
        else:
            assert_same(stock_out, ours)
    assert handled(runner) == 4
    model.half()
    assert model.generate(**GREEDY).shape == (2, 16)


def test_weights_changed_in_place_and_replaced():
    model = tiny("llama")
    runner = install(model)
    first = model.generate(**GREEDY)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert_same(*both(model, GREEDY))
    model.load_state_dict(
        {k: v.flip(-1).contiguous() for k, v in model.state_dict().items()}, assign=True
    )
    assert_same(*both(model, GREEDY))
    model.set_attn_implementation("eager")
    assert_same(*both(model, GREEDY))
    model.resize_token_embeddings(VOCABULARY + 13)
    assert_same(*both(model, GREEDY))
    assert first.tolist() != model.generate(**GREEDY).tolist()
    assert handled(runner) == 6, runner.counts


def test_the_fingerprint_sees_all_that_a_graph_depends_on():
    model = tiny("llama")
    seen = [take_fingerprint(model).graph_facts]
    assert take_fingerprint(model).graph_facts == seen[0]

    def changed(what):
        key = take_fingerprint(model).graph_facts
        assert key not in seen, what
        seen.append(key)

    model.model.layers[0].mlp.__class__ = type("Swapped", (type(model.model.layers[0].mlp),), {})
    changed("class of a module")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    changed("a weight replaced")
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()
    changed("strides of a weight")
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
    changed("an instance forward")
    model.config._attn_implementation = "eager"
    changed("attention implementation")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        changed("SDPA backends")
    model.bfloat16()
    changed("dtype")
    model.model.layers[0].mlp.register_forward_hook(lambda *a: None)
    assert "forward hook" in take_fingerprint(model).obstacle


def test_steps_are_called_under_a_mode_that_looks_at_ops():
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny("llama")
    with FlopCounterMode(display=False):
        assert take_fingerprint(model).no_graph == "a torch dispatch mode is active"
    assert take_fingerprint(model).no_graph is None


def test_a_captured_step_depends_on_the_windows():
    model = tiny("mistral")
    runner, keys = install(model), []
    make_step = runner.make_step
    runner.make_step = lambda *a, **k: keys.append(a[3]) or make_step(*a, **k)
    for window in (9, 9, 5):
        model.config.sliding_window = window
        assert_same(*both(model, GREEDY))
    assert keys[0] == keys[1] != keys[2]


def test_rope_that_reads_the_length_is_not_captured():

    model = tiny(
        "llama",
        rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        max_position_embeddings=16,
    )
    assert (
        "RoPE of type dynamic" in take_fingerprint(model).rope.reason
        and take_fingerprint(tiny("llama")).rope is None
    )
    twin = copy.deepcopy(
        model
    )  # stock's own second call differs from its first in transformers 5.4
    install(twin)
    arguments = {"inputs": prompt(1, 7), "max_new_tokens": 30}
    assert_same(stock(model, **arguments), twin.generate(**arguments))


def test_rope_that_remembers_the_longest_text_sees_no_steps_ahead_of_the_host():
    """On a GPU, steps run ahead of the host.

    A step in which no row is alive adds no text. Otherwise the next call would have other
    frequencies.
    """
    model = tiny(
        "llama",
        rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        max_position_embeddings=16,
    )
    eos = stock(copy.deepcopy(model), inputs=prompt(1, 20), max_new_tokens=3)[0, -1].item()
    twin = copy.deepcopy(model)
    install(twin, depth=2)
    for arguments in (
        {"inputs": prompt(1, 20), "max_new_tokens": 9, "eos_token_id": eos, "pad_token_id": 0},
        {
            "inputs": prompt(1, 18),
            "max_new_tokens": 3,
            "output_logits": True,
            "return_dict_in_generate": True,
        },
    ):
        assert_same(stock(model, **arguments), twin.generate(**arguments))
        assert twin.model.rotary_emb.max_seq_len_cached == model.model.rotary_emb.max_seq_len_cached


# -- PEFT -----------------------------------------------------------------------------------------


def test_peft_life_cycle():
    peft = pytest.importorskip("peft")

    base = tiny("llama")
    runner = install(base)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(base, config).eval()
    model.add_adapter("other", config)
    model.eval()
    reference = copy.deepcopy(model)
    uninstall(reference.get_base_model())
    keys, texts = [], []

    def check():
        keys.append(take_fingerprint(base).graph_facts)
        ours = model.generate(**GREEDY)
        assert ours.tolist() == reference.generate(**GREEDY).tolist()
        texts.append(str(ours.tolist()))

    def on_both(do):
        for m in (model, reference):
            do(m)

    check()
    on_both(lambda m: m.set_adapter("other"))
    check()
    with model.disable_adapter(), reference.disable_adapter():
        check()
    on_both(lambda m: m.merge_adapter(["other"]))
    check()
    on_both(lambda m: m.unmerge_adapter())
    on_both(lambda m: m.set_adapter("default"))
    check()
    on_both(lambda m: m.delete_adapter("other"))
    check()
    for m in (model, reference):
        for module in m.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.set_scale("default", 3.0)
    check()
    assert handled(runner) == 7, runner.counts
    assert (
        len({k for i, k in enumerate(keys) if i != 4}) == 6 and len(set(texts)) == 4
    )  # default, other, base, default × 3
    # adapter_names come through forward hooks: stock's
    out = model.generate(**GREEDY, adapter_names=["default", "__base__"])
    assert (
        out.tolist() == reference.generate(**GREEDY, adapter_names=["default", "__base__"]).tolist()
    )
    assert handled(runner) == 7
    merged, expected = model.merge_and_unload(), reference.merge_and_unload()
    assert merged is base
    assert merged.generate(**GREEDY).tolist() == expected.generate(**GREEDY).tolist()
    assert handled(runner) == 8


def test_install_after_peft_and_prompt_learning():
    peft = pytest.importorskip("peft")
    base = tiny("llama")
    model = peft.get_peft_model(
        base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ).eval()
    runner = install(model.get_base_model())
    ours = model.generate(
        input_ids=prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=5
    )
    counts = dict(runner.counts)
    uninstall(model.get_base_model())
    expected = model.generate(
        input_ids=prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=5
    )
    assert ours.tolist() == expected.tolist() and len(counts) == 1
    with pytest.raises(DecodeError, match="get_base_model"):
        install(model)


# -- surroundings ---------------------------------------------------------------------------------


def test_inference_mode_and_back():
    model = tiny("gemma2")
    install(model)
    arguments = {
        **left_padded(),
        "max_new_tokens": 8,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    with torch.inference_mode():
        assert_same(*both(model, arguments))
    assert_same(*both(model, arguments))
    with torch.inference_mode():
        assert_same(*both(model, {**arguments, "do_sample": True}))
    with torch.enable_grad():
        assert_same(*both(model, arguments))


def test_a_failed_prefill_leaves_nothing_behind():
    model = tiny("llama")
    runner = install(model)
    model.generate(**GREEDY)
    layer = model.model.layers[1].self_attn
    broken = copy.deepcopy(layer)
    broken.k_proj.weight.data.fill_(float("nan"))
    broken.v_proj.weight.data.fill_(float("nan"))
    broken.o_proj = None  # fails after its keys and values are in the cache
    model.model.layers[1].self_attn = broken
    with pytest.raises(TypeError):
        model.generate(prompt(2, 60), max_new_tokens=3)
    model.model.layers[1].self_attn = layer
    assert_same(*both(model, GREEDY))
    assert runner.pool.blocks == [(2, 256)] and not runner.pool._leased


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("past", [0, 3])
def test_layers_that_the_config_still_has(family, past, monkeypatch):
    """A model may lose layers while its config keeps their number.

    A cache made from the config then has layers that nothing fills.
    """
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 64)
    model = tiny(family, max_position_embeddings=1024)
    model.model.layers = model.model.layers[:1]
    runner = install(model)

    def arguments():
        cache, ids = DynamicCache(config=model.config), prompt(2, 9)
        if past:
            model(ids[:, :past], past_key_values=cache, use_cache=True)
        return {
            "inputs": ids,
            "past_key_values": cache,
            "max_new_tokens": 300,
            "return_dict_in_generate": True,
        }

    stock, ours = both(model, arguments)
    assert stock.sequences.tolist() == ours.sequences.tolist() and handled(runner) == 1, (
        runner.counts
    )
    torch.testing.assert_close(
        ours.past_key_values.layers[0].keys,
        stock.past_key_values.layers[0].keys,
        rtol=1e-4,
        atol=2e-5,
    )
    assert not past or not ours.past_key_values.layers[1].is_initialized


def test_slots_below_a_users_window_are_cleared():
    model = tiny("mistral")
    runner = install(model)
    model.generate(prompt(1, 30), max_new_tokens=3)
    for slab in runner.pool._idle[0].slabs:
        slab[:, :, :, :33].fill_(float("nan"))

    def arguments():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(1, 20), past_key_values=cache)
        return {"inputs": prompt(1, 25), "past_key_values": cache, "max_new_tokens": 4}

    assert_same(*both(model, arguments))
    assert handled(runner) == 2 and runner.pool.blocks == [(1, 256)]


def test_nested_calls():
    model = tiny("llama")
    runner = install(model)
    inner = stock(model, inputs=prompt(1, seed=7), max_new_tokens=5)

    class Nested(Recorder):
        def put(self, value):
            assert_same(inner, model.generate(prompt(1, seed=7), max_new_tokens=5))

    assert_same(
        stock(model, inputs=prompt(), max_new_tokens=5),
        model.generate(prompt(), max_new_tokens=5, streamer=Nested()),
    )
    assert runner.pool.blocks == [(1, 256)] * 2


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("extra", [{}, {"do_sample": True}])
def test_ctrl_c(at, extra):
    model = tiny("llama")
    runner = install(model, depth=2)

    class Interrupting(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.events) > at:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(), max_new_tokens=9, streamer=Interrupting(), **extra)
    assert not runner.pool._leased
    assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 9, **extra}))
    assert len(runner.pool.blocks) == 1


def test_ctrl_c_between_a_lease_and_its_end(monkeypatch):
    from mirage_hf.decode import generate

    model = tiny("llama")
    runner = install(model)
    model.generate(**GREEDY)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generate, "Session", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**GREEDY)
    gc.collect()
    assert not runner.pool.blocks and runner.bytes == 0
    assert_same(*both(model, GREEDY))
    assert runner.pool.blocks == [(2, 256)]


def test_a_bad_prompt_leaves_it_usable():
    model = tiny("llama")
    runner = install(model)
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[VOCABULARY + 5]]), max_new_tokens=3)
    assert not runner.pool._leased
    assert_same(*both(model, GREEDY))


def test_stop_strings():
    model, tok = tiny("llama"), tokenizer()
    runner = install(model)
    long = stock(model, inputs=prompt(2), max_new_tokens=30)
    text = tok.decode(long[0, 7:])
    for where in ("argument", "config"):

        def arguments(where=where):
            given = {"inputs": prompt(2), "tokenizer": tok, "max_new_tokens": 30}
            if where == "argument":
                return {**given, "stop_strings": [text[3:5], "never"]}
            config = type(model.generation_config)(
                max_new_tokens=30, stop_strings=text[3:5], pad_token_id=0
            )
            return {"inputs": prompt(2), "tokenizer": tok, "generation_config": config}

        theirs, ours = both(model, arguments)
        assert_same(theirs, ours)
        assert handled(runner) == 1, runner.counts
        runner.counts.clear()
    assert_same(*both(model, {"inputs": prompt(), "tokenizer": tok, "max_new_tokens": 5}))
    model.generation_config.stop_strings = ["x"]
    assert_same(*both(model, {"inputs": prompt(), "tokenizer": tok, "max_new_tokens": 5}))
    assert runner.counts["stock: stop_strings in the model's generation_config"] == 1


# -- the trained model ----------------------------------------------------------------------------

trained = pytest.mark.skipif(
    not (ASSET / "config.json").exists(), reason="tests/assets/tiny_llama is not built"
)


def load_trained():
    return LlamaForCausalLM.from_pretrained(
        ASSET, dtype=torch.float32
    ).eval(), AutoTokenizer.from_pretrained(ASSET, padding_side="left")


@pytest.mark.slow
@trained
def test_trained_model_writes_the_same_256_tokens():
    model, tok = load_trained()
    runner = install(model, depth=3)
    inputs = tok("The function returns ", return_tensors="pt")
    stock_out, ours = both(
        model, {**inputs, "max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False}
    )
    assert_same(stock_out, ours)
    model.generation_config.eos_token_id = None
    stock_out, ours = both(model, {**inputs, "max_new_tokens": 256, "do_sample": False})
    assert_same(stock_out, ours)
    assert ours.shape[1] == inputs["input_ids"].shape[1] + 256
    assert len(set(tok.decode(ours[0]).split())) > 8
    assert handled(runner) == 2


@pytest.mark.slow
@trained
def test_trained_model_with_everything_around_it():
    model, tok = load_trained()
    runner = install(model)
    batch = tok(
        ["The module", "This function returns a list of", "A"], return_tensors="pt", padding=True
    )
    text = tok.decode(stock(model, **batch, max_new_tokens=40)[1, batch["input_ids"].shape[1] :])
    for extra in (
        {},
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
        {"repetition_penalty": 1.2},
        {"stop_strings": [text[9:12], "never"], "tokenizer": tok},
        {"eos_token_id": [32, 46]},
        {"bad_words_ids": [[101], [116, 104]]},
    ):
        assert_same(
            *both(
                model,
                {
                    **batch,
                    "max_new_tokens": 40,
                    "return_dict_in_generate": True,
                    "output_scores": True,
                    **extra,
                },
            )
        )
    assert handled(runner) == 6
    pipe = pipeline("text-generation", model=model, tokenizer=tok)
    ours = pipe("The module", max_new_tokens=12, do_sample=False)
    chat = None
    if tok.chat_template:
        chat = pipe(
            [{"role": "user", "content": "What is a module?"}], max_new_tokens=12, do_sample=False
        )
    assert handled(runner) == 7 + (chat is not None), runner.counts
    uninstall(model)
    assert ours == pipe("The module", max_new_tokens=12, do_sample=False)
    if chat is not None:
        assert chat == pipe(
            [{"role": "user", "content": "What is a module?"}], max_new_tokens=12, do_sample=False
        )


def test_constants_of_graphs_are_part_of_their_key():
    """These are numbers and switches of modules and configs, and buffers changed in place."""
    model = tiny("qwen3")
    attention, rotary = model.model.layers[1].self_attn, model.model.rotary_emb
    keys = [take_fingerprint(model).graph_facts]
    for change in (
        lambda: setattr(attention, "scaling", 0.9),
        lambda: setattr(attention, "softcap", None),
        lambda: setattr(attention, "softcap", 30.0),
        lambda: setattr(attention, "softcap", torch.zeros(3)),
        lambda: setattr(attention, "softcap", torch.zeros(3)),
        lambda: setattr(model.config, "final_logit_softcapping", 2.0),
        lambda: rotary.inv_freq.mul_(0.5),
        lambda: model.set_attn_implementation("eager"),
    ):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert take_fingerprint(model).graph_facts == keys[-1]  # no call changes them
        change()
        keys.append(take_fingerprint(model).graph_facts)
    assert all(a != b for n, a in enumerate(keys) for b in keys[:n])
