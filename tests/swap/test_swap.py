"""A swapped layer looks unchanged from outside.

Its guard is tested in test_guard.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from mirage_hf.api import optimize, restore
from mirage_hf.decode.model_fingerprint import take_fingerprint
from mirage_hf.patterns import PATTERNS
from mirage_hf.swap.guard import BINDING_KEY
from mirage_hf.swap.swapped_module import swapped_class
from tests.helpers.swapped_models import EVENTS, layer_of, swapped
from tests.helpers.tiny_models import FOUR, decode_logits, prompt, same, snapshot, tiny

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("resolved"), pytest.mark.slow]
CLOSE = dict(atol=2e-5, rtol=1e-4)


# -- what others see ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FOUR)
@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_gives_the_stock_logits(family: str, batch: int) -> None:
    stock, ours = swapped(family, batch_sizes=(1, 3))
    torch.testing.assert_close(decode_logits(ours, batch), decode_logits(stock, batch), **CLOSE)
    bound = layer_of(ours).__dict__[BINDING_KEY]
    assert bound.calls == 4 and bound.fallbacks == {"prefill": 1}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_and_windows_come_with_the_stock_attention(implementation: str) -> None:
    stock, ours = swapped(
        "mistral", batch_sizes=(2,), patterns=[p for p in PATTERNS if p != "attention"]
    )
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :4] = 0
    for model in (stock, ours):
        model.set_attn_implementation(implementation)
    kwargs = dict(
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    a, b = stock.generate(prompt(2, 16), **kwargs), ours.generate(prompt(2, 16), **kwargs)
    assert torch.equal(a.sequences, b.sequences)
    torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), **CLOSE)
    assert layer_of(ours).__dict__[BINDING_KEY].calls >= 11


def test_names_and_types_stay() -> None:
    stock, ours = swapped()
    a, b = type(layer_of(stock)), type(layer_of(ours))
    assert b is swapped_class(a) and issubclass(b, a) and isinstance(layer_of(ours), a)
    assert (b.__name__, b.__qualname__, b.__module__, str(b)) == (
        a.__name__,
        a.__qualname__,
        a.__module__,
        str(a),
    )
    assert repr(ours) == repr(stock) and type(ours) is type(stock)
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in stock.named_modules()]
    assert list(ours.state_dict()) == list(stock.state_dict())


def test_only_the_layers_class_and_one_entry_change() -> None:
    model = tiny("llama")
    before = snapshot(model)
    optimize(model)
    after = snapshot(model)
    assert before["pointers"] == after["pointers"]
    changed = {n for n in before["classes"] if before["classes"][n] is not after["classes"][n]}
    assert changed == {f"model.layers.{i}" for i in range(3)}
    assert all(
        after["keys"][n] - before["keys"][n] <= {BINDING_KEY, "mirage", "generate", "__getstate__"}
        for n in before["keys"]
    )


def test_copies_are_stock_and_use_their_own_weights() -> None:
    stock, ours = swapped()
    twin = copy.deepcopy(ours)
    assert (
        type(layer_of(twin)) is type(layer_of(stock))
        and BINDING_KEY not in layer_of(twin).__dict__
        and not {"mirage", "generate", "__getstate__"} & set(twin.__dict__)
    )
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert decode_logits(twin).abs().max() == 0
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)
    optimize(twin)
    assert twin.mirage.report.swapped
    assert "mirage" not in restore(twin).__dict__


def test_a_shallow_copy_of_a_model_lacks_our_attributes() -> None:
    stock, ours = swapped()
    twin = copy.copy(ours)
    assert set(twin.__dict__) == set(stock.__dict__) and not hasattr(twin, "mirage")
    assert ours.mirage.report.swapped


@pytest.mark.parametrize("how", ["pickle", "torch.save", "copy"])
def test_pickles_are_stock(how: str) -> None:
    stock, ours = swapped()
    layer = layer_of(ours)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    elif how == "copy":
        other = copy.copy(layer)
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        assert b"mirage" not in buffer.getvalue()
        other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(other) is type(layer_of(stock)) and BINDING_KEY not in other.__dict__
    assert BINDING_KEY in layer.__dict__


def test_a_saved_model_loads_without_us() -> None:
    stock, ours = swapped()
    data = pickle.dumps(ours)
    assert b"mirage_hf" not in data
    back = pickle.loads(data)
    assert not hasattr(back, "mirage") and torch.equal(decode_logits(back), decode_logits(stock))


def test_save_pretrained_writes_the_stock_model(tmp_path: Any) -> None:
    stock, ours = swapped()
    ours.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    loaded = type(stock).from_pretrained(tmp_path / "ours")
    assert torch.equal(decode_logits(loaded), decode_logits(stock))


# -- the fingerprint ------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS)
def test_the_fingerprint_sees_it(event: str) -> None:
    _, ours = swapped()
    before = take_fingerprint(ours).facts
    assert before == take_fingerprint(ours).facts
    EVENTS[event](ours)
    assert take_fingerprint(ours).facts != before


def test_the_fingerprint_sees_an_epsilon_and_a_second_forward_at_the_address_of_a_first() -> None:
    _, ours = swapped()
    seen = [take_fingerprint(ours).facts]
    layer_of(ours).input_layernorm.variance_epsilon = 0.5
    seen.append(take_fingerprint(ours).facts)
    for _ in range(3):
        layer_of(ours).mlp.forward = lambda x: x
        seen.append(take_fingerprint(ours).facts)
        del layer_of(
            ours
        ).mlp.forward  # the next weight may get its memory, unless the fingerprint keeps it
    assert len(set(seen)) == 5


def test_restore_after_everything_leaves_a_stock_model() -> None:
    model = tiny("qwen2")
    before, logits = snapshot(model), decode_logits(model)
    optimize(model)
    decode_logits(model)
    model.generate(prompt(), max_new_tokens=3)
    restore(model)
    assert same(before, snapshot(model)) and torch.equal(decode_logits(model), logits)
