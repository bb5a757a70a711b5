"""Declare the tables of README and docs: their rows and columns, read from results.csv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scripts.report import Result

MODELS = {
    "llama-3.2-1b": "Llama-3.2-1B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-0.6b": "Qwen3-0.6B",
}
BATCHES = (2, 4, 8, 16)
CONTEXTS = (128, 2048, 8192, 32768)
#: Stock ways to generate that a user has without code of their own.
STOCK = ("static", "eager", "batched_mm")


@dataclass(frozen=True)
class Cell:
    """Ours beside the best stock way, for one model, batch and context.

    Attributes:
        rival: The best stock way.
        theirs: Its result.
        ours: Our result, from the same file if that file has one.
    """

    rival: str
    theirs: Result
    ours: Result

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        return self.theirs.value / self.ours.value


def pick(
    results: Sequence[Result],
    subject: str,
    batch: int,
    context: int | str,
    peer: str,
    metric: str,
    source: str = "",
) -> Result | None:
    """Return the newest result of this kind, from one file if `source` names it.

    The three models of the README were measured on an H200, so newer results of other GPUs do not
    replace theirs.
    """
    is_one_of_three = subject in MODELS
    found = [
        r
        for r in results
        if (r.subject, r.batch, r.context, r.peer, r.metric)
        == (subject, batch, str(context), peer, metric)
        and (not source or r.source == source)
    ]

    def order(r: Result) -> tuple[bool, str, str]:
        return is_one_of_three and "H200" in r.machine, r.date, r.source

    return max(found, key=order, default=None)


def cell(
    results: Sequence[Result], subject: str, batch: int, context: int, metric: str = "ms_per_token"
) -> Cell | None:
    """Return ours beside the fastest stock way, each rival with the newest file that has it."""
    rivals = {
        peer: found
        for peer in STOCK
        if (found := pick(results, subject, batch, context, peer, metric)) is not None
    }
    newest = pick(results, subject, batch, context, "ours", metric)
    if not rivals or newest is None:
        return None
    best = min(rivals, key=lambda peer: rivals[peer].value)
    theirs = rivals[best]
    same_file = pick(results, subject, batch, context, "ours", metric, theirs.source)
    return Cell(best, theirs, same_file or newest)


def number(result: Result | None) -> str:
    """Return a value with three digits, or a dash."""
    return "–" if result is None else shown(result.value)


def shown(value: float) -> str:
    """Return a number with three significant digits and thousands separators."""
    if value >= 1000:
        return f"{value:,.0f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def spread(result: Result) -> str:
    """Return a value with its lowest and highest run."""
    if not result.low:
        return shown(result.value)
    return f"{shown(result.value)} ({shown(float(result.low))} to {shown(float(result.high))})"


def _run(r: Result) -> str:
    """Return when a result was measured, and on which GPU if it was no H200."""
    return r.date if "H200" in r.machine else f"{r.date}, {r.machine.split(',')[0]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def three_models(results: Sequence[Result]) -> str:
    """README's one table: three models, one sequence."""
    rows = []
    for subject, name in MODELS.items():
        found = cell(results, subject, 1, 128)
        assert found is not None, f"{subject} at batch 1 has no result"
        source = found.ours.source
        first = pick(results, subject, 1, 128, "ours", "first_token_ms", source)
        theirs_first = pick(results, subject, 1, 128, found.rival, "first_token_ms", source)
        floor = pick(results, subject, 1, 128, "floor", "ms_per_token", source)
        rows.append(
            [
                name,
                number(found.theirs),
                f"**{number(found.ours)}**",
                f"{found.ratio:.1f}×",
                f"{number(theirs_first)} → {number(first)}",
                number(floor),
            ]
        )
    header = [
        "ms per token",
        "HF static cache",
        "mirage_hf",
        "speed-up",
        "first token, ms",
        "memory floor",
    ]
    return table(header, rows)


def one_sequence(results: Sequence[Result]) -> str:
    """Every model at batch 1, with spread and the run that measured it."""
    rows = []
    places = sorted(
        {
            (r.subject, int(r.context))
            for r in results
            if r.metric == "ms_per_token" and r.batch == 1
        }
    )
    for subject, context in places:
        found = cell(results, subject, 1, context)
        if found is None:
            continue
        step = pick(results, subject, 1, context, "ours", "step_ms", found.ours.source)
        floor = pick(results, subject, 1, context, "floor", "ms_per_token", found.ours.source)
        rows.append(
            [
                MODELS.get(subject, subject),
                f"{context:,}",
                found.rival,
                spread(found.theirs),
                spread(found.ours),
                f"{found.ratio:.1f}×",
                number(step),
                number(floor),
                _run(found.ours),
            ]
        )
    header = ["model", "prompt", "best stock way", "its ms a token", "ours", "speed-up"]
    return table([*header, "our step", "floor", "run"], rows)


def batches(results: Sequence[Result]) -> str:
    """Three models by batch and prompt: the best stock way beside ours."""
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            row = [f"{batch} : {context:,}"]
            for subject in MODELS:
                found = cell(results, subject, batch, context)
                if found is None:
                    row += ["–", "–"]
                    continue
                mark = "ᵉ" if found.rival == "eager" else ""
                row += [
                    f"{number(found.theirs)}{mark} → **{number(found.ours)}**",
                    f"{found.ratio:.1f}×",
                ]
            rows.append(row)
    header = ["batch : prompt"]
    for name in MODELS.values():
        header += [name, "speed-up"]
    return table(header, rows)


def other_batches(results: Sequence[Result]) -> str:
    """Batches of all other models: the best stock way beside ours."""
    places = {
        (r.subject, r.batch, int(r.context))
        for r in results
        if r.metric == "ms_per_token" and r.batch > 1 and r.subject not in MODELS
    }
    rows = []
    for subject, batch, context in sorted(places):
        found = cell(results, subject, batch, context)
        if found is not None:
            rows.append(
                [
                    subject,
                    f"{batch} : {context:,}",
                    found.rival,
                    spread(found.theirs),
                    spread(found.ours),
                    f"{found.ratio:.1f}×",
                    _run(found.ours),
                ]
            )
    header = ["model", "batch : prompt", "best stock way", "its ms a token", "ours", "speed-up"]
    return table([*header, "run"], rows)


def drafts(results: Sequence[Result]) -> str:
    """Steps that verify drafts, beside plain steps and HF's assisted decoding."""
    rows = []
    for result in results:
        if (result.peer, result.metric) != ("drafted", "ms_per_token"):
            continue
        place = result.subject, result.batch, result.context
        plain = pick(results, *place, "ours", "ms_per_token", result.source)
        assisted = pick(results, *place, "assisted", "ms_per_token", result.source)
        tokens = pick(results, *place, "drafted", "tokens_per_step", result.source)
        speed_up = "–" if plain is None else f"{plain.value / result.value:.1f}×"
        rows.append(
            [
                result.subject,
                f"{result.batch} : {result.context}",
                "–" if assisted is None else spread(assisted),
                "–" if plain is None else spread(plain),
                spread(result),
                speed_up,
                number(tokens),
                _run(result),
            ]
        )
    header = ["model", "batch : prompt", "HF assisted, ms a token", "ours, no drafts", "ours"]
    return table([*header, "speed-up", "tokens a step", "run"], rows)


#: What tables call the ways of `bench_first_use`.
WAYS = {
    "auto": "`optimize()`",
    "never": '`optimize(tune="never")`',
    "full": '`optimize(tune="full")`',
    "background": '`optimize(tune="background")`',
    "static": "static cache",
    "eager": "eager",
}


def first_uses(results: Sequence[Result]) -> str:
    """Seconds that the first use of a model takes in a process with empty caches."""
    rows = []
    for result in results:
        if result.metric != "later_ms_per_token":
            continue
        place = result.subject, result.batch, result.context, result.peer
        if pick(results, *place, "later_ms_per_token") != result:
            continue
        optimize = pick(results, *place, "optimize_s", result.source)
        first = pick(results, *place, "first_generate_s", result.source)
        second = pick(results, *place, "second_generate_s", result.source)
        peak = pick(results, *place, "peak_mib_over_weights", result.source)
        several = f", {result.batch} sequences" if result.batch > 1 else ""
        rows.append(
            [
                MODELS.get(result.subject, result.subject) + several,
                WAYS[result.peer],
                number(optimize),
                number(first),
                number(second),
                number(peak),
                number(result),
                _run(result),
            ]
        )
    header = ["model", "way", "`optimize()`, s", "first call, s", "second call, s"]
    header += ["peak, MiB", "later, ms a token", "run"]
    return table(header, sorted(rows, key=lambda row: row[0].lower()))


def first_tokens(results: Sequence[Result]) -> str:
    """Time to the first token of long prompts, beside eager in the same run."""
    rows = []
    seen = {
        (r.subject, r.batch, int(r.context), r.source)
        for r in results
        if r.peer == "eager" and r.metric == "first_token_ms" and int(r.context) >= 512
    }
    newest: dict[tuple[str, int, int], str] = {}
    for subject, batch, context, source in sorted(seen, key=lambda place: place[3]):
        newest[subject, batch, context] = source
    for (subject, batch, context), source in sorted(newest.items()):
        ours = pick(results, subject, batch, context, "ours", "first_token_ms", source)
        eager = pick(results, subject, batch, context, "eager", "first_token_ms", source)
        if ours is None or eager is None:
            continue
        rows.append(
            [
                MODELS.get(subject, subject),
                str(batch),
                f"{context:,}",
                number(eager),
                f"**{number(ours)}**",
                f"{eager.value / ours.value:.1f}×",
                ours.date,
            ]
        )
    header = ["model", "batch", "prompt", "HF eager, ms", "ours, ms", "speed-up", "run"]
    return table(header, rows)


def attention_by_name(results: Sequence[Result]) -> str:
    """`attn_implementation="mirage"` beside the static cache and an optimized model."""
    source = max(r.source for r in results if r.peer == "attention")
    rows = []
    for batch in (1, 8):
        values = [
            pick(results, "llama-3.2-1b", batch, 8192, peer, "step_ms", source)
            for peer in ("static", "attention", "ours")
        ]
        rows.append([f"{batch} : 8,192", *map(number, values)])
    header = [
        "batch : prompt, ms a step",
        "HF static cache",
        "with this attention",
        "optimized model",
    ]
    return table(header, rows)


def adapters(results: Sequence[Result]) -> str:
    """Llama-3.1-8B with unmerged LoRA adapters beside the same model without."""
    source = max(r.source for r in results if r.peer == "bare")
    subject = next(r.subject for r in results if r.source == source)
    rows = []
    for metric, name in (
        ("ms_per_token", "a token, everything counted"),
        ("step_ms", "a step"),
        ("first_token_ms", "the first token"),
    ):
        without = pick(results, subject, 1, 128, "bare", metric, source)
        with_them = pick(results, subject, 1, 128, "ours", metric, source)
        assert without is not None and with_them is not None
        more = 100 * (with_them.value / without.value - 1)
        rows.append([name, spread(without), spread(with_them), f"+{more:.1f}%"])
    return table(["ms", "without adapters", "with adapters", "difference"], rows)


#: Weights of dense models in the table of weights in codes, by the name that bench_generate gives.
CODED = (
    "int4",
    "int4-zeros",
    "int4-tiles",
    "int8",
    "int8-and-head",
    "fp8",
    "fp8-and-head",
    "nf4",
    "hqq",
)


def weights_in_codes(results: Sequence[Result]) -> str:
    """Models whose linears hold codes, beside the same models in bfloat16 and torch's products."""
    rows = []
    for result in results:
        weights = result.subject.rpartition(", ")[2]
        if (result.peer, result.metric) != ("ours", "ms_per_token") or weights not in CODED:
            continue
        subject, batch, context = result.subject, result.batch, result.context
        seen = [
            pick(results, subject, batch, context, peer, metric, result.source)
            for peer, metric in (
                ("floor", "ms_per_token"),
                ("product", "ms_per_token"),
                ("plain", "ms_per_token"),
                ("ours", "ms_per_token"),
                ("ours", "step_ms"),
                ("ours", "first_token_ms"),
            )
        ]
        numbers = ["–" if x is None else spread(x) for x in seen]
        peaks = [
            pick(results, subject, batch, context, peer, "peak_mib_over_weights", result.source)
            for peer in ("ours", "static", "eager")
        ]
        ours, theirs = peaks[0], peaks[1] or peaks[2]
        peak = number(ours) + (f" ({number(theirs)})" if theirs else "")
        rows.append([subject, f"{batch} : {context}", *numbers, peak, _run(result)])
    header = ["model", "batch : prompt", "floor", "static cache, product of torch"]
    header += ["ours, bfloat16", "ours", "our step", "our first token, ms"]
    header += ["our peak, MiB (HF's)", "run"]
    return table(header, rows)


@dataclass(frozen=True)
class BlockRow:
    """One row of the table of blocks.

    Attributes:
        subject: The block's name in the results.
        title: What the table calls it.
        rivals: Peers that count as rivals, in order of the columns they may fill.
    """

    subject: str
    title: str
    rivals: tuple[str, ...]


COMPILED = ("eager compiled", "joined weights compiled")
BLOCKS = (
    BlockRow("norm_linear", "RMSNorm + Linear 4096→4096", COMPILED),
    BlockRow("norm_linear_6144", "RMSNorm + Linear 4096→6144", COMPILED),
    BlockRow("gated_mlp", "gated MLP, two 4096×4096", COMPILED),
    BlockRow("lora", "LoRA 4096→4096, rank 16", COMPILED),
    BlockRow("gqa_decode", "GQA decode, 8 and 2 heads, 4096 keys", ("sdpa rows",)),
    BlockRow("qk_norm_attention", "LayerNorm on q, k + attention, 4096 keys", ()),
    BlockRow("gqa_paper", "the paper's GQA, 256 queries", ("sdpa, k stored (keys, d)",)),
    BlockRow("mla_decode", "MLA decode, DeepSeek-V2-Lite, 4096 keys", ("absorbed",)),
    BlockRow(
        "attention_d128_8k", "32 and 8 heads, d 128, 8 k keys", ("sdpa rows", "flex_attention")
    ),
    BlockRow("gated_delta", "update of a gated delta net, 32 heads, state 128×128", ("fla",)),
    BlockRow("mamba2", "update of Mamba-2, 64 heads, state 64×128", ()),
)


def blocks(results: Sequence[Result]) -> str:
    """Blocks alone, µs."""
    rows = []
    for block in BLOCKS:
        counts = sorted({r.batch for r in results if r.subject == block.subject})
        for count in counts:
            ours = pick(results, block.subject, count, "", "ours", "us")
            if ours is None:
                continue
            source = ours.source
            eager = pick(results, block.subject, count, "", "eager", "us", source)
            rivals = [pick(results, block.subject, count, "", peer, "us") for peer in block.rivals]
            best = min((r for r in rivals if r is not None), key=lambda r: r.value, default=None)
            floor = pick(results, block.subject, count, "", "floor", "us", source)
            rival = f"{best.peer} {number(best)}" if best else "–"
            rows.append(
                [
                    block.title,
                    str(count),
                    number(eager),
                    rival,
                    spread(ours),
                    number(floor),
                    ours.date,
                ]
            )
    header = [
        "block",
        "rows",
        "torch eager",
        "best other rival",
        "searched kernels",
        "floor",
        "run",
    ]
    return table(header, rows)


#: What the table of CUDA kernels calls the blocks of `bench_cuda`, and its kinds of kernels.
CUDA_BLOCKS = {
    "norm_linear_2048_512": "RMSNorm + Linear 2048→512",
    "norm_linear_4096_4096": "RMSNorm + Linear 4096→4096",
    "attention_8x4_64_256": "GQA decode, 8 keys of 4 heads, d 64, 256 keys",
}
KINDS = {"triton": "Triton", "cuda": "CUDA", "cluster": "CUDA, clusters"}


def cuda_kernels(results: Sequence[Result]) -> str:
    """Kernels of both generators for the same programs, µs alone and in a chain."""
    rows = []
    for subject, title in CUDA_BLOCKS.items():
        source = max(r.source for r in results if r.subject == subject and r.peer == "cluster")
        cells = []
        for kind in KINDS:
            for metric in ("us", "chain_us"):
                cells.append(number(pick(results, subject, 1, "", kind, metric, source)))
        floor = number(pick(results, subject, 1, "", "floor", "us", source))
        rows.append([title, floor, *cells, source[:10]])
    header = [f"{name}{where}" for name in KINDS.values() for where in ("", ", chained")]
    return table(["block, one row", "floor", *header, "run"], rows)


def chains(results: Sequence[Result]) -> str:
    """All linears of a model as one chain of dependent kernels."""
    rows = []
    for subject, name in MODELS.items():
        key = f"{subject}, linears only"
        ours = pick(results, key, 1, "", "ours", "ms")
        if ours is None:
            continue
        others = [pick(results, key, 1, "", peer, "ms") for peer in ("eager", "compiled", "floor")]
        assert others[2] is not None
        share = 100 * others[2].value / ours.value
        rows.append(
            [name, *map(number, others[:2]), spread(ours), number(others[2]), f"{share:.0f}%"]
        )
    header = [
        "ms a step",
        "torch eager",
        "max-autotune",
        "searched kernels",
        "floor",
        "of the bandwidth",
    ]
    return table(header, rows)


def sizes(results: Sequence[Result]) -> str:
    """Odd sizes: how often the searched kernel is faster, and the least and the mean ratio."""
    source = max(r.source for r in results if r.peer == "library")
    rows = []
    found = [r for r in results if r.source == source and r.peer == "library"]
    for kind in sorted({r.subject.split()[0] for r in found}):
        ratios = []
        for library in (r for r in found if r.subject.startswith(f"{kind} ")):
            ours = pick(results, library.subject, library.batch, "", "ours", "us", source)
            ratios.append(library.value / ours.value if ours else 1.0)
        mean = 1.0
        for ratio in ratios:
            mean *= ratio ** (1 / len(ratios))
        rows.append([kind, str(len(ratios)), f"{min(ratios):.2f}", f"{mean:.2f}"])
    return table(["block", "sizes", "least library / ours", "geometric mean"], rows)


def searches(results: Sequence[Result]) -> str:
    """Seconds of the search on a CPU."""
    source = max(r.source for r in results if r.metric == "found_s")
    programs = list(dict.fromkeys(r.subject for r in results if r.source == source))
    rows = []
    for program in programs:
        values = [
            pick(results, program, 1, "", "ours", metric, source)
            for metric in ("found_s", "verified_s", "done_s")
        ]
        rows.append([program, *map(number, values)])
    header = ["program", "first candidate, s", "first one proven, s", "all proven and checked, s"]
    return table(header, rows)


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "three-models": three_models,
    "one-sequence": one_sequence,
    "batches": batches,
    "other-batches": other_batches,
    "drafts": drafts,
    "first-tokens": first_tokens,
    "first-uses": first_uses,
    "attention-by-name": attention_by_name,
    "adapters": adapters,
    "weights-in-codes": weights_in_codes,
    "blocks": blocks,
    "cuda-kernels": cuda_kernels,
    "chains": chains,
    "sizes": sizes,
    "searches": searches,
}
