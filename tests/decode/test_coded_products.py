"""Where linears in codes run by their own forwards, because kernels of steps take longer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mirage_hf as mi
from mirage_hf.decode import decoded_products
from mirage_hf.decode.decoded_products import DecodedProducts, coded_linears_of
from mirage_hf.formats.coding import Coding
from mirage_hf.formats.stored import Split
from mirage_hf.tune import measure
from tests.decode.test_coded_models import coded, decoded_twin, generated

ROWS, COLUMNS = 1024, 2048
#: The µs in which the GPU of these tests writes and reads a decoded weight.
MOVED_US = 10.0


def linear(columns: int = COLUMNS, fails: bool = False):
    """Return a linear in codes. Its forward only counts how often it is timed."""
    split = Split(ROWS, columns, group=64)
    codes, scales = split.codes(torch.uint4), split.per_row(torch.bfloat16)
    coding = Coding(ROWS, columns, torch.bfloat16, codes, scales, zero=8.0)
    module = nn.Identity()
    if fails:
        module.forward = None  # type: ignore[assignment]
    return SimpleNamespace(path="a", weight=SimpleNamespace(coding=coding), module=lambda: module)


def group_of(*linears):
    """Return a group of products with these linears. None stands for a plain weight."""
    weights = [SimpleNamespace(weight=SimpleNamespace(coded=x)) for x in linears]
    return SimpleNamespace(products=[SimpleNamespace(operands=(None, w)) for w in weights])


@pytest.fixture
def products(monkeypatch):
    """Return `DecodedProducts` on the CPU, where each forward takes `us`."""
    bandwidth = 4 * ROWS * COLUMNS / MOVED_US * 1e6
    timed = []

    def time_run(run, sets, replays):
        run(sets[0])
        timed.append(sets[0][0].shape)
        return measure.timing([found.us], 1)

    monkeypatch.setattr(DecodedProducts, "_bandwidth", bandwidth)
    monkeypatch.setattr(decoded_products, "time_run", time_run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    found = DecodedProducts(torch.device("cpu"))
    found.us, found.timed = 20.0, timed
    return found


def test_a_kernel_gives_way_if_it_takes_longer(products):
    one = linear()
    for us, gives_way in ((24.0, False), (26.0, True), (250.0, True)):
        kernel = SimpleNamespace(time_us=us)
        assert products.are_faster(group_of(one), kernel, 16) == gives_way
    assert products.timed == [(16, COLUMNS)]  # linears of one coding share a time
    assert not products.are_faster(group_of(one, one), SimpleNamespace(time_us=49.0), 16)
    assert products.are_faster(group_of(one, linear()), SimpleNamespace(time_us=51.0), 16)
    assert len(products.timed) == 1
    products.are_faster(group_of(one), SimpleNamespace(time_us=26.0), 12)
    assert len(products.timed) == 2


def test_nothing_is_timed_if_a_decoded_weight_takes_longer_to_move(products):
    assert not products.are_faster(group_of(linear()), SimpleNamespace(time_us=12.5), 16)
    assert products.timed == []


@pytest.mark.parametrize(
    "group, kernel",
    [
        (group_of(), 500.0),
        (group_of(None), 500.0),
        (group_of(linear(), None), 500.0),
        (group_of(linear()), None),
    ],
    ids=["no product", "plain", "some plain", "not measured"],
)
def test_other_kernels_stay(products, group, kernel):
    assert not products.are_faster(group, SimpleNamespace(time_us=kernel), 16)
    assert products.timed == []


def test_a_kernel_stays_if_the_linear_fails(products):
    assert not products.are_faster(group_of(linear(fails=True)), SimpleNamespace(time_us=1e9), 16)


def test_nothing_is_compared_without_a_gpu():
    kernel = SimpleNamespace(time_us=1e9)
    assert not DecodedProducts(None).are_faster(group_of(linear()), kernel, 16)


@pytest.mark.models
def test_linears_without_kernels_run_in_steps_and_give_the_same_tokens(monkeypatch):
    pytest.importorskip("torchao")
    seen = []

    def are_faster(self, group, kernel, rows):
        seen.append((len(coded_linears_of(group)), rows))
        return bool(coded_linears_of(group))

    monkeypatch.setattr(DecodedProducts, "are_faster", are_faster)
    model = coded("int8")
    want = generated(decoded_twin(model), 2)
    mi.optimize(model, batch_sizes=(2,))
    assert set(seen) == {(3, 2), (1, 2), (2, 2), (0, 2)}
    assert str(model.mirage.report).count(decoded_products.WHY) == 4
    assert torch.equal(generated(model, 2), want)
    assert model.mirage.report.decode["step: traced"] == 1
