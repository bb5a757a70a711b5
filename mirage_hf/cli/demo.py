"""`mirage-hf demo`: the main job on a small trained model, step by step, with what each step found."""

from __future__ import annotations

import copy
from typing import Any

import torch

import mirage_hf as mi
from mirage_hf.cli import show
from mirage_hf.cli.models import Loaded
from mirage_hf.match.matcher import match
from mirage_hf.patterns import PATTERNS
from mirage_hf.patterns.schema import PatternBlock

RUNS = 3


def run(loaded: Loaded, tokens: int, seconds: float | None) -> bool:
    """Show blocks, searches, report, text and times. Returns whether restore() was exact and, in float32, the tokens the same."""
    model, device = loaded.model, loaded.device
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    show.plain(
        f"{type(model).__name__}, {parameters:.1f} M parameters, {str(model.dtype).removeprefix('torch.')}, on {_place(device)}"
    )
    if device.type == "cpu":
        show.plain(
            "No GPU: kernels run on the cpu backend, which is correct and promises no speed. The search is the same."
        )
    stock_state, stock_types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]

    show.heading("1. Blocks found (nothing is changed yet)")
    show.plain(mi.optimize(model, dry_run=True))

    show.heading("2. Search: each block as a tensor program, on one row")
    search_all(blocks_of(model), seconds)

    show.heading("3. Text before")
    before = loaded.generate(tokens)
    show.plain(loaded.prompt + loaded.text(before))
    before_ms, _ = show.median_ms(lambda: loaded.generate(tokens), RUNS, device)

    show.heading("4. optimize(model)")
    with show.searching("optimize") as note:
        mi.optimize(model, progress=note)
    after = loaded.generate(tokens)
    after_ms, _ = show.median_ms(lambda: loaded.generate(tokens), RUNS, device)
    show.plain(loaded.report)

    show.heading("5. Text after")
    show.plain(loaded.prompt + loaded.text(after))
    same = torch.equal(before, after)
    show.plain(
        f"\nThe same {tokens} greedy tokens before and after."
        if same
        else f"\n{_parting(before, after)}"
    )

    show.heading("6. Time")
    for name, ms in (("before", before_ms), ("after", after_ms)):
        show.plain(
            f"{name:<7} {ms / tokens:.3f} ms a token ({ms:.0f} ms for {tokens} tokens, median of {RUNS})"
        )
    if device.type == "cpu":
        show.plain(
            "The cpu backend executes µGraphs with torch so that they can be checked anywhere; speed is for GPUs."
        )

    mi.restore(model)
    state = model.state_dict()
    exact = [type(m) for m in model.modules()] == stock_types and all(
        torch.equal(v, state[k]) for k, v in stock_state.items()
    )
    show.plain(
        f"\nrestore(model): classes and weights are {'exactly' if exact else 'NOT'} what they were."
    )
    return exact and (same or model.dtype != torch.float32)


def blocks_of(model: Any) -> list[PatternBlock]:
    """The distinct blocks of a model, in the order in which they occur."""
    found = match(model, list(PATTERNS))
    return list(dict.fromkeys(part.block for m in found.modules for part in m.parts))


def search_all(blocks: list[PatternBlock], seconds: float | None) -> None:
    table = show.search_table()
    options: dict[str, Any] = {} if seconds is None else {"time_limit": seconds}
    for block in blocks:
        program = block.program(1)
        with show.searching(block.pattern.name) as note:
            found = mi.superoptimize(program, progress=note, **options)
        outputs = " ".join("x".join(map(str, t.dims)) for t in program.outputs)
        show.search_row(table, f"{block.pattern.name} -> {outputs}", program, found, found.report)
    show.console.print(table)
    show.plain(
        "kernels: launched by the best result. ops: of the program. examined: values and kernels. "
        "wrong at most: the chance that the proof let a wrong kernel through."
    )


def _parting(before: torch.Tensor, after: torch.Tensor) -> str:
    length = min(before.shape[1], after.shape[1])
    same = int((before[0, :length] == after[0, :length]).long().cumprod(0).sum())
    return f"The tokens part after {same}: in half precision, logits closer than its rounding may change places; in float32 none should."


def _place(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
