"""`mirage-hf demo`: the main job on a small trained model, step by step."""

from __future__ import annotations

import copy
from typing import Any

import torch

import mirage_hf as mi
from mirage_hf.cli import gpu_preview, show
from mirage_hf.cli.models import Loaded
from mirage_hf.match.matcher import match
from mirage_hf.patterns import PATTERNS
from mirage_hf.patterns.schema import PatternBlock

#: Timed calls of generate, before and after.
RUNS = 3


def run(loaded: Loaded, tokens: int, seconds: float | None) -> bool:
    """Show blocks, searches, report, text, and times. Without a GPU show a preview of one.

    Args:
        loaded: The model and its prompt.
        tokens: How many tokens to generate.
        seconds: The time limit of each search. None: the default.

    Returns:
        True if restore() was exact and, in float32, the tokens were the same.
    """
    model, device = loaded.model, loaded.device
    on_cpu = device.type == "cpu"
    _introduce(model, device)
    stock_state, stock_types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]

    show.heading("1. Blocks found (nothing is changed yet)")
    show.plain(mi.optimize(model, dry_run=True))

    show.heading("2. Search: each block as a tensor program, on one row")
    results = search_all(blocks_of(model), seconds)

    show.heading("3. Text before")
    before = loaded.generate(tokens)
    show.plain(loaded.prompt + loaded.text(before))
    times = {} if on_cpu else {"before": _generate_ms(loaded, tokens)}

    show.heading("4. optimize(model)")
    with show.searching("optimize") as note:
        mi.optimize(model, progress=note)
    after = loaded.generate(tokens)
    if not on_cpu:
        times["after"] = _generate_ms(loaded, tokens)
    show.plain(loaded.report)

    show.heading("5. Text after")
    show.plain(loaded.prompt + loaded.text(after))
    same = torch.equal(before, after)
    equal = f"The same {tokens} greedy tokens before and after."
    show.plain(f"\n{equal if same else _difference(before, after)}")

    mi.restore(model)
    state = model.state_dict()
    exact = [type(m) for m in model.modules()] == stock_types and all(
        torch.equal(v, state[k]) for k, v in stock_state.items()
    )
    are = "are exactly" if exact else "are NOT"
    show.plain(f"restore(model): classes and weights {are} what they were.")

    if on_cpu:
        show.heading("6. What a GPU would run")
        previews = [gpu_preview.preview(name, result[0]) for name, result in results]
        gpu_preview.print_previews(previews)
    else:
        show.heading("6. Time")
        for name, ms in times.items():
            show.plain(
                f"{name:<7} {ms / tokens:.3f} ms a token "
                f"({ms:.0f} ms for {tokens} tokens, median of {RUNS})"
            )
    return exact and (same or model.dtype != torch.float32)


def _generate_ms(loaded: Loaded, tokens: int) -> float:
    return show.median_ms(lambda: loaded.generate(tokens), RUNS, loaded.device)[0]


def _introduce(model: Any, device: torch.device) -> None:
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    dtype = str(model.dtype).removeprefix("torch.")
    show.plain(f"{type(model).__name__}, {millions:.1f} M parameters, {dtype}, on {_place(device)}")
    if device.type == "cpu":
        show.plain(
            "No GPU: the cpu backend is for checking, it runs µGraphs op by op in torch. "
            "The search is the same."
        )


def blocks_of(model: Any) -> list[PatternBlock]:
    """Return the distinct blocks of a model, in the order in which they occur."""
    matches = match(model, list(PATTERNS))
    return list(dict.fromkeys(part.block for m in matches.modules for part in m.parts))


def search_all(
    blocks: list[PatternBlock], seconds: float | None
) -> list[tuple[str, mi.SearchResult]]:
    """Search for every block and print a table. Return each block's name and result."""
    table = show.search_table()
    options: dict[str, Any] = {} if seconds is None else {"time_limit": seconds}
    results = []
    for block in blocks:
        program = block.program(1)
        with show.searching(block.pattern.name) as note:
            result = mi.superoptimize(program, progress=note, **options)
        outputs = " ".join("x".join(map(str, t.dims)) for t in program.outputs)
        name = f"{block.pattern.name} -> {outputs}"
        show.search_row(table, name, program, result, result.report)
        results.append((name, result))
    show.console.print(table)
    show.plain(
        "kernels: launched by the best result. ops: of the program. "
        "examined: values and kernels. "
        "wrong at most: the chance that the proof accepted a wrong kernel."
    )
    return results


def _difference(before: torch.Tensor, after: torch.Tensor) -> str:
    length = min(before.shape[1], after.shape[1])
    same = int((before[0, :length] == after[0, :length]).long().cumprod(0).sum())
    return (
        f"The tokens differ after {same}: in half precision, two logits that are closer than "
        "rounding may change places; in float32 none should."
    )


def _place(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
