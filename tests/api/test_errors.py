"""Wrong input to optimize().

Each error says what is wrong, where, and the way out, and leaves the model untouched.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from mirage_hf.api import optimize, restore
from mirage_hf.errors import MirageError, OptimizeError, OptimizeWarning, ZooError
from mirage_hf.match.eligible import check_model, single_device
from tests.helpers.tiny_models import SIZES, same, snapshot, tiny

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("resolved")]


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (
            "meta-llama/Llama-3.2-1B",
            r"expected a PyTorch model \(torch.nn.Module\), got a str; "
            r"load one with AutoModelForCausalLM",
        ),
        (None, "got a NoneType"),
        ({"a": 1}, "got a dict"),
        (tf.LlamaForCausalLM, "got the class LlamaForCausalLM"),
        (types.SimpleNamespace(model=nn.Linear(2, 2)), r"pass its model: optimize\(it.model\)"),
        (torch.zeros(2), "got a torch.Tensor"),
    ],
)
def test_not_a_model(thing: Any, text: str) -> None:
    with pytest.raises(OptimizeError, match=text):
        optimize(thing)
    with pytest.raises(OptimizeError):
        restore(thing)


def _accelerate(m: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(m.model.layers[0], ModelHook())


def _int8(m: Any) -> None:
    m.model.layers[0].mlp.gate_proj.weight = nn.Parameter(
        torch.zeros(48, 32, dtype=torch.int8), requires_grad=False
    )


def _subclass(m: Any) -> None:
    class Packed(nn.Parameter):
        pass

    m.model.layers[0].mlp.gate_proj.weight = Packed(torch.zeros(48, 32))


def _meta(m: Any) -> None:
    m.model.layers[1].mlp.to("meta")


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "training": (
        lambda m: m.train(),
        r"LlamaForCausalLM is in training mode.*call model.eval\(\) first",
    ),
    "quantizer": (
        lambda m: setattr(m, "hf_quantizer", types.SimpleNamespace()),
        r"quantized \(SimpleNamespace\).*without quantization_config",
    ),
    "is_quantized": (lambda m: setattr(m, "is_quantized", True), "is quantized"),
    "quantization_config": (
        lambda m: setattr(m.config, "quantization_config", {"bits": 4}),
        "is quantized",
    ),
    "int8 weight": (_int8, r"is quantized: model.layers.0.mlp.gate_proj.weight has torch.int8"),
    "weight class": (_subclass, "gate_proj.weight is a Packed"),
    "accelerate hooks": (
        _accelerate,
        r"has accelerate hooks \(at model.layers.0\).*remove_hook_from_module",
    ),
    "meta": (
        _meta,
        r"weights on the meta device \(model.layers.1.mlp.gate_proj.weight\); load them first",
    ),
    "compiled in place": (lambda m: m.compile(backend="eager"), "is compiled by torch.compile"),
    "a layer compiled in place": (
        lambda m: m.model.layers[1].compile(backend="eager"),
        "is compiled by torch.compile",
    ),
    "a compiled forward": (
        lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager")),
        "is compiled by torch.compile",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_models_that_must_not_be_touched(case: str) -> None:
    change, text = WRONG[case]
    model = tiny("llama")
    change(model)
    before = snapshot(model)
    with pytest.raises(OptimizeError, match=text):
        optimize(model)
    assert same(before, snapshot(model))


def test_a_note_of_sizes_may_lie_on_another_device() -> None:
    """Containers of codes keep the shape of the weight as a parameter."""
    model = tiny("llama")
    shape = nn.Parameter(torch.zeros(2, dtype=torch.int64, device="meta"), requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight_shape = shape
    assert single_device(model) == torch.device("cpu")


def test_a_forward_that_is_kept_from_being_compiled_is_no_compiled_one() -> None:
    model = tiny("llama")
    stock = type(model)

    class Kept(stock):  # type: ignore[misc, valid-type]
        forward = torch.compiler.disable(stock.forward)

    model.__class__ = Kept
    assert hasattr(model.forward, "_torchdynamo_orig_callable")
    check_model(model)


def test_a_compiled_model() -> None:
    with pytest.raises(OptimizeError, match="pass the model as it was before compiling"):
        optimize(torch.compile(tiny("llama"), backend="eager"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            dict(patterns=["gated_mpl"]),
            r"unknown pattern 'gated_mpl' \(did you mean gated_mlp\?\); "
            r"known patterns: rms_norm_linear",
        ),
        (
            dict(patterns="gated_mlp"),
            r"patterns is the text 'gated_mlp'; give a list of names, as patterns=\['gated_mlp'\]",
        ),
        (
            dict(patterns=3),
            "patterns is 3; give a list of names of rms_norm_linear, .*, or None for all",
        ),
        (dict(batch_sizes=()), "batch_sizes is empty"),
        (dict(batch_sizes=(0,)), "batch_sizes has 0; batch sizes are positive integers"),
        (dict(batch_sizes=(1, "2")), "batch_sizes has '2'"),
        (dict(batch_sizes=(True,)), "batch_sizes has True"),
        (
            dict(batch_sizes=(1, 1025)),
            "batch_sizes has 1025; kernels are for 1024 sequences at most",
        ),
        (
            dict(batch_sizes=4),
            r"batch_sizes is the number 4; give a sequence, as batch_sizes=\(4,\)",
        ),
        (dict(batch_sizes=None), "batch_sizes is None; give a sequence"),
        (dict(backend="tritn"), r"backend is 'tritn' \(did you mean triton"),
        (dict(backend="cuda"), "backend is 'cuda'; choose 'auto' or 'triton' or 'cpu'"),
        (
            dict(backend="triton"),
            r"backend 'triton' does not run on cpu, where the model is; "
            r"use model.to\('cuda'\) first, or backend='cpu'",
        ),
        (dict(tune="always"), "tune is 'always'.*choose 'auto' or 'never' or 'full'"),
        (dict(on_unsupported="ignore"), "on_unsupported is 'ignore'"),
        (dict(decode="fast"), "decode is 'fast'"),
        (dict(verify="yes"), "verify is 'yes'"),
        (dict(max_cache_len=0), "max_cache_len is 0; give a positive number"),
        (dict(zoo=3), "zoo is 3; give a folder, a Hub repo"),
        (dict(zoo=[Path("."), 3]), "give a folder, a Hub repo"),
        (dict(progress=3), "progress is 3; give a function"),
    ],
)
def test_options(options: dict[str, Any], text: str) -> None:
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(OptimizeError, match=text):
        optimize(model, **options)
    assert same(before, snapshot(model))


def test_wrong_options_leave_an_optimized_model_optimized(tmp_path: Path) -> None:
    model = optimize(tiny("llama"))
    handle = model.mirage
    with pytest.raises(OptimizeError):
        optimize(model, tune="x")
    for dry_run in (False, True):
        with pytest.raises(ZooError, match="nowhere"):
            optimize(model, zoo=[tmp_path, tmp_path / "nowhere"], dry_run=dry_run)
    model.train()
    with pytest.raises(OptimizeError):
        optimize(model)
    assert model.mirage is handle and handle.report.swapped


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(),
        lambda: nn.Identity().eval(),
        lambda: tf.BertModel(
            tf.BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
        ).eval(),
    ],
)
def test_nothing_to_replace_is_a_loud_warning_or_an_error(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = snapshot(model)
    with pytest.warns(OptimizeWarning, match=r"nothing in this .* was replaced, it runs as before"):
        assert optimize(model) is model
    with pytest.raises(
        OptimizeError,
        match=r"nothing in this .* was replaced.*supported are layers of Llama, Mistral",
    ):
        optimize(model, on_unsupported="error")
    assert same(before, snapshot(model))


def test_batch_sizes_of_other_integers() -> None:
    model = optimize(
        tiny("llama", num_hidden_layers=1), batch_sizes=np.array([2, 1, 2]), dry_run=True
    )
    assert {type(r.rows) for r in model.rows if r.rows} == {int} and {
        r.rows for r in model.rows if r.rows
    } == {1, 2}


def test_errors_are_the_packages_own() -> None:
    assert issubclass(OptimizeError, MirageError) and issubclass(OptimizeError, ValueError)
