"""Calls that our generate does not cover.

Stock gets exactly the arguments of the user, and the call is counted with a reason.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MllamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from mirage_hf.decode import install
from mirage_hf.decode.cache_layers import INDEXED_LAYERS
from tests.helpers.generate_comparison import (
    FULL,
    SIZES,
    Recorder,
    assert_same,
    assert_same_cache,
    both,
    handled,
    left_padded,
    prompt,
    tiny,
)

pytestmark = pytest.mark.models


def with_hole():
    given = left_padded()
    given["attention_mask"][1, 4] = 0
    return given


def right_padded():
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": prompt(2), "attention_mask": mask}


def emptied(model, rows):
    """Return a cache with this many rows, cropped to no tokens."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(rows), past_key_values=cache, use_cache=True)
    cache.crop(-prompt().shape[1])
    return cache


ROUTES = {
    "beam search (num_beams=3)": lambda m: {"inputs": prompt(), "num_beams": 3},
    "prompt lookup": lambda m: {"inputs": prompt(), "prompt_lookup_num_tokens": 2},
    "assisted decoding": lambda m: {"inputs": prompt(), "assistant_model": tiny("llama", seed=3)},
    "use_cache=False": lambda m: {"inputs": prompt(), "use_cache": False},
    "guidance_scale=1.5": lambda m: {"inputs": prompt(), "guidance_scale": 1.5},
    "output_attentions": lambda m: {
        "inputs": prompt(),
        "output_attentions": True,
        "return_dict_in_generate": True,
    },
    "output_hidden_states": lambda m: {
        "inputs": prompt(),
        "output_hidden_states": True,
        "return_dict_in_generate": True,
    },
    "chunked prefill": lambda m: {"inputs": prompt(), "prefill_chunk_size": 3},
    "cache_implementation='static'": lambda m: {
        "inputs": prompt(),
        "cache_implementation": "static",
    },
    "inputs_embeds": lambda m: {"inputs_embeds": m.model.embed_tokens(prompt()).detach()},
    "cache type StaticCache": lambda m: {
        "inputs": prompt(),
        "past_key_values": StaticCache(config=m.config, max_cache_len=32),
    },
    "cache type Mine": lambda m: {
        "inputs": prompt(),
        "past_key_values": type("Mine", (DynamicCache,), {})(),
    },
    "holes in the mask": lambda m: with_hole(),
    "custom_generate": lambda m: {
        "inputs": prompt(),
        "custom_generate": lambda model, ids, **kw: ids + 1,
    },
    "model kwarg output_router_logits": lambda m: {
        "inputs": prompt(),
        "output_router_logits": False,
    },
    "logits_to_keep as a tensor": lambda m: {
        "inputs": prompt(),
        "logits_to_keep": torch.tensor([2]),
    },
    "logits_to_keep=None": lambda m: {"inputs": prompt(), "logits_to_keep": None},
    "position_ids of torch.float32": lambda m: {
        "inputs": prompt(),
        "position_ids": torch.arange(7.0)[None] + 0.5,
        **FULL,
    },
    "a mask for 1 rows of 2": lambda m: {
        "inputs": prompt(2),
        "attention_mask": torch.tensor([[0] + [1] * 6]),
    },
    "a mask for 2 rows of 1": lambda m: {
        "inputs": prompt(),
        "attention_mask": torch.tensor([[0] + [1] * 6] * 2),
    },
    "position_ids for 2 rows of 1": lambda m: {
        "inputs": prompt(),
        "position_ids": torch.arange(7).expand(2, -1),
    },
    "a cache of 2 rows for 1": lambda m: {"inputs": prompt(), "past_key_values": emptied(m, 2)},
    "stop tokens without a pad token": lambda m: {
        "inputs": prompt(2),
        "stopping_criteria": [EosTokenCriteria(5)],
    },
}


def outcome(run):
    try:
        return run()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("reason", ROUTES)
def test_stock_gets_what_it_was_given(reason):
    model = tiny("llama")
    if "pad token" in reason:
        model.generation_config.pad_token_id = None
    runner = install(model)

    def run(generate):
        torch.manual_seed(0)
        return outcome(lambda: generate(**ROUTES[reason](model), max_new_tokens=5))

    stock, ours = run(lambda **kw: GenerationMixin.generate(model, **kw)), run(model.generate)
    if isinstance(stock, tuple) and isinstance(stock[0], type):
        assert stock == ours
    elif hasattr(stock, "past_key_values") and not isinstance(stock.past_key_values, DynamicCache):
        assert stock.sequences.tolist() == ours.sequences.tolist()
    else:
        assert_same(stock, ours)
    assert handled(runner) == 0
    assert [w for w in runner.counts if reason in w], runner.counts


@pytest.mark.parametrize(
    "interface, function",
    [(AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, sdpa_mask)],
)
def test_attention_that_a_user_registers_under_a_known_name_is_stock(interface, function):
    model = tiny("llama")
    runner = install(model)
    calls = []
    interface.register("sdpa", lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs))
    try:
        assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 4}))
    finally:
        interface.register("sdpa", function)
    assert (
        runner.counts == {"stock: attention implementation sdpa, replaced by a registration": 1}
        and calls
    )
    assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 4}))
    assert handled(runner) == 1


@pytest.fixture
def two_processes():
    """Initialize torch.distributed as if a second process existed."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_each_of_several_processes_may_hold_a_whole_model(two_processes):
    model = tiny("llama")
    runner = install(model)
    assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 4}))
    assert handled(runner) == 1


class FullyShardedDataParallel(torch.nn.Module):
    """A module with the name of FSDP's."""


@pytest.mark.parametrize(
    "kind",
    [
        "tensor parallel",
        "pipeline parallel",
        "FSDP",
        "FSDP in parts",
        "a buffer over a mesh",
        "ZeRO",
    ],
)
def test_weights_that_lie_in_several_processes_are_stock(two_processes, kind):
    model = tiny("llama")
    runner = install(model)
    if kind == "tensor parallel":
        model._tp_size = 2
    elif kind == "pipeline parallel":
        model._pp_stage = object()
    elif kind == "FSDP":
        model._is_fsdp_managed_module = True
    elif kind == "FSDP in parts":
        model.model.wrapped = FullyShardedDataParallel()
    elif kind == "ZeRO":
        model.model.norm.weight.ds_id = 1
    else:
        model.model.rotary_emb.inv_freq.device_mesh = object()
    assert model.generate(prompt(), max_new_tokens=4, synced_gpus=False).shape[1] > 4
    assert runner.counts == {"stock: weights spread over 2 processes": 1}


def test_right_padding_is_stock():
    model = tiny("llama")
    runner = install(model)
    assert_same(*both(model, {**right_padded(), "max_new_tokens": 4}))
    assert runner.counts == {"stock: holes in the mask": 1}


def test_a_mask_on_another_device_is_stocks():
    """Stock brings the mask to the device of the model if it can."""
    model = tiny("llama")
    runner = install(model)
    given = {
        "inputs": prompt(),
        "attention_mask": torch.ones(1, 7, device="meta"),
        "position_ids": torch.arange(7)[None],
    }
    stock = outcome(lambda: GenerationMixin.generate(model, **given))
    assert stock == outcome(lambda: model.generate(**given))
    # some versions read a mask before they choose the decoding method, which fails for this one
    assert runner.counts in ({}, {"stock: a mask or position_ids on meta, input_ids on cpu": 1})


def test_a_late_decision_feeds_the_streamer_once():
    model = tiny("llama")
    runner = install(model)
    recorders = []

    def arguments():
        recorders.append(recorder := Recorder())
        hole = with_hole()
        return {**hole, "max_new_tokens": 4, "streamer": recorder}

    assert_same(*both(model, arguments))
    assert recorders[0].events == recorders[1].events and runner.counts == {
        "stock: holes in the mask": 1
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": prompt(), "max_new_tokens": 4, "no_such_argument": 1},
        {"inputs": prompt(), "max_length": 3},
        {"inputs": prompt(), "num_beams": 2, "streamer": Recorder()},
        {"inputs": prompt(), "input_ids": prompt()},
        {"inputs": prompt(), "stop_strings": ["a"]},
        {"inputs": prompt(), "penalty_alpha": 0.5, "top_k": 4},
        {"inputs": prompt(), "max_new_tokens": 4, "past_key_values": ((1, 2),)},
    ],
)
def test_errors_are_stocks(arguments):
    model = tiny("llama")
    install(model)
    stock = outcome(lambda: GenerationMixin.generate(model, **arguments))
    assert isinstance(stock, tuple) and stock == outcome(lambda: model.generate(**arguments))


@pytest.mark.parametrize("lengths", [(15, 10), (12, 12, 9), (5,), (30, 3), (9.0, 12), (9.5,)])
def test_the_least_of_several_lengths_holds(lengths):
    """A user's criteria are asked after the first new token, not before it."""
    model = tiny("llama", max_position_embeddings=512)
    runner = install(model, depth=2)
    for length in (7, 300):
        given = {
            "inputs": prompt(2, length),
            "max_new_tokens": 20.0,
            "stopping_criteria": [MaxLengthCriteria(n) for n in lengths],
        }
        assert_same(*both(model, given))
    assert handled(runner) == 2, runner.counts


def test_a_watermark_given_as_a_dict_holds_in_every_call():
    model = tiny("llama")
    runner = install(model)
    given = {"inputs": prompt(2), "max_new_tokens": 6, "watermarking_config": {"bias": 9.0}}
    plain, want = (
        {"inputs": prompt(2), "max_new_tokens": 6},
        outcome(lambda: GenerationMixin.generate(model, **given)),
    )
    for _ in range(3):
        model.generate(**plain)  # after it stock need not read the model's config again
        got = outcome(lambda: model.generate(**given))
        assert (
            got == want if isinstance(want, tuple) else torch.equal(got, want)
        )  # transformers 5.4 raises
    assert handled(runner) == (3 if isinstance(want, tuple) else 6), runner.counts


def test_positional_arguments():
    model = tiny("llama")
    runner = install(model)
    config = model.generation_config.__class__(max_new_tokens=4)
    assert_same(GenerationMixin.generate(model, prompt(), config), model.generate(prompt(), config))
    assert handled(runner) == 1
    for broken in ((lambda g: g(prompt(), inputs=prompt())), (lambda g: g(*[None] * 40))):
        with pytest.raises(TypeError):
            broken(model.generate)


def test_state_of_the_model():
    model = tiny("llama")
    runner = install(model)
    arguments = {"inputs": prompt(2), "max_new_tokens": 5}
    hooked = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *a: hooked.append(1))
    assert_same(*both(model, arguments))
    handle.remove()
    assert len(hooked) == 10 and "forward hook" in next(iter(runner.counts))
    model.model.layers[0].train()
    assert_same(*both(model, arguments))
    model.train()
    assert_same(*both(model, arguments))
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        both(model, arguments)
    assert handled(runner) == 0
    assert {
        "stock: training mode",
        "stock: autocast",
        "stock: training mode (LlamaDecoderLayer)",
    } <= set(runner.counts)
    assert_same(*both(model, arguments))
    assert handled(runner) == 1
    # HF's capture hooks stay installed after this, and do nothing
    type(model).generate(
        model, **arguments, output_hidden_states=True, return_dict_in_generate=True
    )
    assert_same(*both(model, arguments))
    assert handled(runner) == 2, runner.counts


@pytest.mark.parametrize("twice", [lambda layer: layer, copy.deepcopy])
def test_a_layer_that_is_there_twice(twice):
    model = tiny("llama", num_hidden_layers=3)
    runner = install(model)
    model.model.layers[2] = twice(model.model.layers[1])
    assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 8}))
    assert runner.counts == {"stock: more than one LlamaAttention has the layer_idx 1": 1}


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ((1, 0, 2), "stock: Gemma2Attentions that are not in the order of their layer_idx"),
        ((0, 2), "stock: no layer with the layer_idx 1"),
        ((1, 2), "stock: no layer with the layer_idx 0"),
        ((0, 1), "called: no graphs on cpu"),
    ],
)
def test_layers_that_are_not_where_their_number_says(order, why):
    model = tiny("gemma2", num_hidden_layers=3)
    model.model.layers = torch.nn.ModuleList(model.model.layers[n] for n in order)
    runner = install(model)
    assert_same(*both(model, {"inputs": prompt(length=4), "max_new_tokens": 4, **FULL}))
    assert runner.counts == {why: 1}


def test_layers_that_run_in_another_order():
    model = tiny("llama", num_hidden_layers=3)
    first, second = model.model.layers[0].forward, model.model.layers[1].forward
    model.model.layers[0].forward, model.model.layers[1].forward = second, first
    runner = install(model)
    for _ in range(2):
        assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 8, **FULL}))
    assert handled(runner) == 2, runner.counts


def test_a_layer_that_runs_twice():
    model = tiny("llama")
    runner = install(model)
    layer = model.model.layers[1]
    once = layer.forward
    layer.forward = lambda x, **given: once(once(x, **given), **given)
    recorders = []

    def arguments():
        recorders.append(recorder := Recorder())
        return {"inputs": prompt(), "max_new_tokens": 8, "streamer": recorder}

    for _ in range(2):
        assert_same(*both(model, arguments))
    assert recorders[0].events == recorders[1].events and not runner.pool._leased
    assert runner.counts == {"stock: a forward that runs a layer twice": 2}


def test_a_class_with_its_own_ways():
    model = tiny("llama")
    model.__class__ = type(
        "Own", (type(model),), {"prepare_inputs_for_generation": lambda self, *a, **k: {}}
    )
    runner = install(model)
    with pytest.raises(Exception):  # noqa: B017
        model.generate(prompt(), max_new_tokens=3)
    assert runner.counts == {"stock: the model has its own prepare_inputs_for_generation": 1}


ONE_MASK = "layer_types in the config of a model that takes one mask for all layers"
NO_SLIDING_MASK = "a sliding_window in the config of a model that makes no mask for one"


@pytest.mark.parametrize(
    "entries, configured, reason",
    [
        ({"layer_types": ["full_attention", "full_attention"]}, True, ONE_MASK),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
            False,
            ONE_MASK,
        ),
        ({"sliding_window": 5}, True, None),
        ({"sliding_window": 5}, False, NO_SLIDING_MASK),
    ],
)
def test_entries_of_the_config_that_the_models_class_does_not_read(entries, configured, reason):
    """A cache made from the config follows these entries all the same."""
    model = tiny("llama", **entries)
    runner = install(model)
    for length in (3, 12):
        assert_same(
            *both(
                model,
                lambda n=length: {
                    "inputs": prompt(2, n),
                    "max_new_tokens": 9,
                    "past_key_values": DynamicCache(config=model.config)
                    if configured
                    else DynamicCache(),
                },
            )
        )
    assert runner.counts == (
        {"called: no graphs on cpu": 2} if reason is None else {f"stock: {reason}": 2}
    )


def test_a_window_of_one_is_stocks():
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=1)).eval()
    install(model)
    arguments = {"inputs": prompt(), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    assert_same(*both(model, arguments))
    assert model.generate.runner.counts == {
        "stock: a sliding window of 1, for which stock's cache keeps every key": 1
    }


@pytest.mark.parametrize(
    "family, reason",
    [
        ("llama", None),
        ("mistral", "a cache that has 8 keys of 0 tokens in a window of 9"),
        ("qwen3", "a cache whose layers hold 0 to 27 tokens"),
    ],
)
def test_a_cache_that_was_reset(family, reason):
    """Before transformers 5.23 a reset cache keeps zeros as keys.

    Full layers treat them as a text. Sliding layers forget the length, so stock cannot append.
    """
    model = tiny(family)
    runner, caches = install(model), []
    for _ in range(2):
        caches.append(DynamicCache(config=model.config))
        type(model).generate(model, prompt(1, 22), past_key_values=caches[-1], max_new_tokens=6)
        caches[-1].reset()
    if not caches[0].layers[0].is_initialized:  # it is like a new one
        reason = None
    used = iter(caches)

    def arguments():
        return {
            "inputs": prompt(1, 30),
            "past_key_values": next(used),
            "max_new_tokens": 4,
        }

    if family == "mistral" and reason is not None:
        for generate in (type(model).generate.__get__(model), model.generate):
            with pytest.raises(RuntimeError, match="must match the size"):
                generate(**arguments())
    else:
        assert_same(*both(model, arguments))
        assert_same_cache(*caches)
    assert runner.counts == (
        {"called: no graphs on cpu": 1} if reason is None else {f"stock: {reason}": 1}
    )


@pytest.mark.parametrize("cross", [[], [0], [1]])
def test_mllama_looks_into_its_cache_itself(cross):
    model = MllamaForCausalLM(
        MllamaTextConfig(**{**SIZES, "num_hidden_layers": 3}, cross_attention_layers=cross)
    ).eval()
    install(model)
    assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 4, "do_sample": False}))
    assert model.generate.runner.counts == {
        "stock: MllamaForCausalLM reads the cache's layers itself": 1
    }


def test_an_indexer_keeps_its_keys_in_the_cache_or_is_stocks():
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 4}
    config = GlmMoeDsaConfig(
        **sizes,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=4,
    )
    model = GlmMoeDsaForCausalLM(config).eval()
    install(model)
    assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 4, "do_sample": False}))
    reason = (
        "called: no graphs on cpu"
        if INDEXED_LAYERS
        else "stock: GlmMoeDsaForCausalLM chooses keys by an indexer of its own"
    )
    assert model.generate.runner.counts == {reason: 1}


def test_encoder_decoder():
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    ).eval()
    runner = install(model)
    ids = torch.randint(3, 50, (2, 5))
    assert_same(*both(model, {"input_ids": ids, "max_new_tokens": 4}))
    assert runner.counts == {"stock: encoder-decoder model": 1}


def test_max_cache_len():
    model = tiny("llama")
    runner = install(model, max_cache_len=16)
    assert_same(*both(model, {"inputs": prompt(1, 7), "max_new_tokens": 10}))
    assert handled(runner) == 1
    assert_same(*both(model, {"inputs": prompt(1, 7), "max_new_tokens": 11}))
    assert runner.counts["stock: more cache slots needed than max_cache_len=16"] == 1


def test_options_mean_the_same_in_every_call():
    """From the second call on, stock's generate gets the options as a GenerationConfig."""
    model = tiny("llama")
    model.generation_config.repetition_penalty = 1.7
    model.generation_config.min_new_tokens = 2
    install(model)
    for _ in range(2):
        for options in (
            {"max_new_tokens": 6},
            {"max_new_tokens": 6, "repetition_penalty": None},
            {"max_length": 12},
            {"max_new_tokens": 6, "min_length": 9, "eos_token_id": list(range(3, 60))},
            {"repetition_penalty": 1.0},
            {
                "max_new_tokens": 6,
                "use_cache": True,
                "return_dict_in_generate": True,
                "output_scores": True,
            },
        ):
            assert_same(*both(model, {"inputs": prompt(), "do_sample": False, **options}))
    model.config.temperature = 0.5
    model.generate(
        prompt(), generation_config=GenerationConfig(max_new_tokens=3)
    )  # neither ours nor stock's reads it
    for generate in (model.generate, type(model).generate.__get__(model)):
        with pytest.raises(ValueError, match="modified the pretrained model configuration"):
            generate(prompt(), max_new_tokens=3)
    del model.config.temperature
    assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": 3}))


def test_phi3_is_covered_up_to_the_length_at_which_it_drops_its_cache():
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SIZES, original_max_position_embeddings=16)).eval()
    model.generation_config.eos_token_id = None
    runner = install(model)
    for tokens in (9, 10):
        assert_same(*both(model, {"inputs": prompt(), "max_new_tokens": tokens}))
    assert handled(runner) == 1
    assert (
        runner.counts[
            "stock: the model's own prepare_inputs_for_generation treats more than 16 tokens "
            "differently"
        ]
        == 1
    )
