"""The correction of estimates: its fit, its weights, and what it gains on measured kernels."""

import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.gpus import H200, device_named
from mirage_hf.tune import correction, cost, space
from mirage_hf.zoo.store import packaged_store
from scripts import fit_estimates
from scripts.fit_estimates import Measured
from tests.helpers import kernel_cases

RAW = Path(__file__).parents[2] / "docs" / "benchmarks" / "raw"


@cache
def packaged():
    """Return the plan of a packaged kernel of RMSNorm and a linear, of one row."""
    (entry,) = (
        e
        for e in packaged_store().entries()
        if e.key.title == "1x2048-to-1x3072-bfloat16" and not any(s.cuda for s in e.schedules)
    )
    (op,) = place_kernels(entry.ugraph)
    return plan_kernel(op, entry.schedules[0])


def linear_of_rows(rows):
    (op,) = place_kernels(kernel_cases.rms_norm_linear(rows, 1024, 512, stored="nk"))
    return next(plan_kernel(op, s) for s in space.schedules(op) if not s.mma)


def test_the_weights_are_those_of_the_features():
    _, known = cost.uncorrected(packaged())
    weights = json.loads(correction.WEIGHTS.read_text())["weights"]
    assert known.keys() == weights.keys()


def test_kernels_unlike_those_of_the_fit_are_not_corrected():
    attention = kernel_cases.online_attention(8, 1, 4096, 128, 4).block_ops[0]
    plans = [linear_of_rows(4), plan_kernel(attention, space.default_schedule(attention))]
    for plan in plans:
        found, known = cost.uncorrected(plan)
        assert known is None and cost.estimate(plan) == found


def test_an_estimate_is_never_below_the_time_of_memory():
    _, known = cost.uncorrected(packaged())
    least = 2.0 ** known["memory"]
    for doublings in (-9.0, 0.0, 9.0):
        weights = dict.fromkeys(known, 0.0)
        us = correction.corrected_by(3 * least, known, weights, doublings)
        assert us >= least and us <= 3.1 * least * correction.MOST


def test_the_fit_finds_the_weights_that_made_the_times():
    rng, made = random.Random(0), {"steps": 0.15, "warps": -0.1, "memory": 0.0}
    points = []
    for n in range(2000):
        known = {"steps": rng.random() * 4, "warps": rng.random() * 3, "memory": -9.0}
        us = 5.0 * 2 ** (0.2 + sum(made[k] * v for k, v in known.items()))
        points.append(Measured(("o", n % 7, 1), us, 5.0, 0.0, known))
    model = fit_estimates.fit(points)
    errors = [abs(math.log2(fit_estimates.estimated(p, *model) / p.us)) for p in points]
    assert max(errors) < 0.1 and sum(errors) / len(errors) < 0.03
    slower = replace(points[0], us=100 * points[0].us)
    assert fit_estimates.fit([slower, *points]) != model


@pytest.mark.parametrize("hidden", [1536, pytest.param(3072, marks=pytest.mark.thorough)])
def test_a_correction_finds_faster_kernels_among_measured_ones(hidden):
    """The time of the first choice over the fastest, with this size left out of the fit."""
    data = json.loads((RAW / "2026-11-25-tuned-schedules.json").read_text())
    gpu = device_named(data["machine"]["gpu"], 90)
    kept = [r for r in data["rows"] if r.get("hidden") in (512, 1536, 3072, 5120)]
    points = list(fit_estimates.measured(kept, gpu))
    assert len(points) > 500
    model = fit_estimates.fit([p for p in points if p.program[1] != hidden])
    own = [p for p in points if p.program[1] == hidden]
    plain = fit_estimates.regrets(own, [p.kernel_us + p.other_us for p in own])
    better = fit_estimates.regrets(own, [fit_estimates.estimated(p, *model) for p in own])
    mean = fit_estimates.summary(better.values())["geometric_mean"]
    assert len(better) == 4 and 1.0 <= mean < 1.25
    assert mean < fit_estimates.summary(plain.values())["geometric_mean"]


def test_the_committed_weights_come_from_the_committed_times():
    fitted = json.loads(correction.WEIGHTS.read_text())["fitted_to"]
    assert all((RAW / name).is_file() for name in fitted["files"])
    assert fitted["candidates"] > 4000 and fitted["programs"] >= 37
    assert torch.isfinite(torch.tensor(cost.estimate(packaged(), H200).us))
