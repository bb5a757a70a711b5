"""Survey what optimize() does to every architecture of the installed transformers.

    python -m scripts.survey_models --out survey.jsonl
    python -m scripts.survey_models --out even.jsonl --part 0/2
    python -m scripts.survey_models --out some.jsonl llama qwen3_next
    python -m scripts.survey_models --table survey.jsonl
    python -m scripts.survey_models --grid survey.jsonl

Takes every type with a causal-LM or an image-text-to-text head, and as NAME/seq2seq or NAME/speech
every type with a head for texts or speech after an encoder. Each is built from a small random
config, in float32 on the CPU. It generates tokens as stock, twice after `optimize`, and a few again
after `restore`. It does so for one text, and for three texts of different lengths. Some types also
get an image. Every text must be stock's, and all logits up to rounding. Texts also go on from a
cache of the other: the optimized model takes stock's, and the restored model takes ours. Each type
runs in a process of its own, and gives a line of JSON.

With `--drafts 3` each call runs once more, with steps that verify three drafts. 30% of these
drafts are wrong.

`--table` counts the types by class (survey_tables.py), and `--grid` prints two tables for the docs.
If a file has a type several times, the last line counts.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ2SEQ,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH,
)

import mirage_hf
from mirage_hf.errors import OptimizeWarning
from scripts.scripted_drafts import drafting
from scripts.survey_calls import (
    Call,
    Returned,
    calls_of,
    continued,
    logits_difference,
    returned,
    stock_returned,
    text_calls,
    text_of,
)
from scripts.survey_configs import IMPOSSIBLE, PREPARED, small_config
from scripts.survey_tables import Row, class_of, grid, rows_of, table

#: New tokens of each text after `restore`.
FEW_TOKENS = 8

#: The share of drafts that are wrong.
WRONG_DRAFTS = 0.3

#: The most parameters that a small model may have.
MOST_PARAMETERS = 300_000_000

_HEADS: dict[str, Any] = {
    "causal": AutoModelForCausalLM,
    "image-text": AutoModelForImageTextToText,
    "seq2seq": AutoModelForSeq2SeqLM,
    "speech": AutoModelForSpeechSeq2Seq,
}


# -- building --------------------------------------------------------------------------------------


class UnbuiltError(Exception):
    """There is no small model of a type."""


def model_types() -> dict[str, str]:
    """Return every type with its head. Types that generate after an encoder have names of both."""
    heads = {name: "causal" if name in CAUSAL else "image-text" for name in CAUSAL | IMAGE_TEXT}
    after_encoder = {name: "seq2seq" if name in SEQ2SEQ else "speech" for name in SEQ2SEQ | SPEECH}
    return heads | {f"{name}/{head}": head for name, head in after_encoder.items()}


def build(model_type: str, head: str) -> Any:
    """Return a small random model of a type.

    Raises:
        UnbuiltError: The type cannot be built small.
    """
    model_type = model_type.partition("/")[0]
    if model_type in IMPOSSIBLE:
        raise UnbuiltError(IMPOSSIBLE[model_type])
    config = small_config(model_type)
    make = _HEADS[head].from_config
    size = _parameters_on_meta(make, config)
    if size > MOST_PARAMETERS:
        raise UnbuiltError(f"{size:,} parameters, even if small")
    torch.manual_seed(1)
    model = make(config, dtype=torch.float32).eval()
    PREPARED.get(model_type, lambda _: None)(model)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    if generation.bos_token_id is None:
        generation.bos_token_id = 1
    return model


def _parameters_on_meta(make: Callable[..., Any], config: Any) -> int:
    """Return the number of parameters without their memory, or 0 if that fails."""
    try:
        with torch.device("meta"):
            return _parameters(make(config, dtype=torch.float32))
    except Exception:  # models that read numbers while they are built
        return 0


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# -- one type --------------------------------------------------------------------------------------


def survey(model_type: str, head: str, tokens: int, drafts: int = 0) -> Row:
    """Return the row of a type.

    Args:
        model_type: The type.
        head: The kind of its head.
        tokens: New tokens of each text.
        drafts: Drafts that steps verify in further calls, 0 for no such calls.
    """
    row: Row = {"type": model_type, "head": head, "transformers": transformers.__version__}
    try:
        model = build(model_type, head)
        row["params"] = _parameters(model)
        cases, row["not_run"] = _stock_cases(model, model_type, tokens)
    except Exception as error:  # whatever a model of another project raises
        return row | {"unbuilt": _described(error)}
    try:
        return row | _compared(model, cases, tokens, drafts)
    except Exception as error:  # an error of ours is a result
        return row | {"error": _described(error)}


@dataclass
class _Case:
    """A call, with what stock returns for it.

    Attributes:
        call: The call.
        text: Stock's text.
        stock: What stock returns if it is asked for more than the text.
        more: The text that goes on from stock's cache. None if stock cannot go on.
        cache: The cache that the optimized model returned.
    """

    call: Call
    text: Tensor
    stock: Returned
    more: Tensor | None = None
    cache: Any = field(default=None, init=False)


def _stock_cases(model: Any, model_type: str, tokens: int) -> tuple[list[_Case], dict[str, str]]:
    """Return the calls that stock can run, and why it cannot run the others."""
    cases, not_run = [], {}
    try:
        planned = calls_of(model, model_type)
    except Exception as error:  # as below
        planned, not_run["image"] = text_calls(model, model_type), _described(error)
    for call in planned:
        try:
            text = text_of(model, call, tokens)
            stock = stock_returned(model, call, text, tokens)
        except Exception as error:  # stock may refuse padding, or images
            if call.name == "batch 1":
                raise
            not_run[call.name] = _described(error)
            continue
        cases.append(_Case(call, text, stock, _stock_more(model, call, stock)))
    return cases, not_run


def _stock_more(model: Any, call: Call, stock: Returned) -> Tensor | None:
    """Return the text that goes on from a copy of stock's cache, None if stock cannot go on."""
    if stock.cache is None:
        return None
    try:
        return continued(model, call, stock.text, copy.deepcopy(stock.cache))
    except Exception:  # caches that cannot be copied, and models that take none
        return None


def _compared(model: Any, cases: Sequence[_Case], tokens: int, drafts: int) -> Row:
    """Return what optimize() did, and whether results are stock's with it and after restore()."""
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draft_tokens = (drafts,) if drafts else ()
        mirage_hf.optimize(model, batch_sizes=(1, 3), draft_tokens=draft_tokens)
    row: Row = {
        "optimize_seconds": round(time.monotonic() - start, 1),
        "warned": [str(w.message) for w in caught if issubclass(w.category, OptimizeWarning)],
        "optimized": hasattr(model, "mirage"),
    } | {key: {} for key in ("decode", "equal", "logits", "handed_in", "restored", "handed_out")}
    for case in cases:
        _compare_optimized(model, case, row, tokens)
        name = case.call.name
        if drafts and row["equal"][name] and row["optimized"]:
            drafted = _drafted(model, case.call, case.text, tokens, drafts)
            row.setdefault("drafts", {})[name] = drafted
    if row["optimized"]:
        row |= _report_facts(model)
        mirage_hf.restore(model)
    for case in cases:
        _compare_restored(model, case, row, tokens)
    return row


def _compare_optimized(model: Any, case: _Case, row: Row, tokens: int) -> None:
    """Add to a row whether texts and logits of the optimized model are stock's."""
    call, stock = case.call, case.stock
    before = _decode_counts(model)
    texts = [(text_of(model, call, tokens), case.text)]
    if stock.logits is None and stock.cache is None:
        texts.append((text_of(model, call, tokens), case.text))
    else:
        ours = returned(model, call, tokens)  # Whisper returns another text with it than alone
        texts.append((ours.text, stock.text))
        case.cache = ours.cache
        if stock.logits is not None:
            row["logits"][call.name] = logits_difference(ours.logits or (), stock.logits)
    row["decode"][call.name] = dict(_decode_counts(model) - before)
    row["equal"][call.name] = all(torch.equal(mine, theirs) for mine, theirs in texts)
    if not row["equal"][call.name]:
        row.setdefault("got", {})[call.name] = [mine.tolist() for mine, _ in texts]
    elif case.more is not None:
        more = continued(model, call, stock.text, stock.cache)
        row["handed_in"][call.name] = torch.equal(more, case.more)


def _compare_restored(model: Any, case: _Case, row: Row, tokens: int) -> None:
    """Add to a row whether texts of the restored model are stock's."""
    call, text = case.call, case.text
    again = text_of(model, call, min(tokens, FEW_TOKENS))[:, :-1]  # the last may be forced
    row["restored"][call.name] = torch.equal(again, text[:, : again.shape[1]])
    if not row["equal"][call.name]:
        row.setdefault("wanted", {})[call.name] = text.tolist()
        row.setdefault("margin", {})[call.name] = _margins(case.stock)
    elif case.more is not None:
        row["handed_out"][call.name] = case.cache is not None and torch.equal(
            continued(model, call, case.stock.text, case.cache), case.more
        )


def _drafted(model: Any, call: Call, text: Tensor, tokens: int, drafts: int) -> Row:
    """Return what a call with drafts did, and whether its text is stock's."""
    generator = torch.Generator().manual_seed(4)
    is_wrong = torch.rand(text.shape, generator=generator) < WRONG_DRAFTS
    script = torch.where(is_wrong, text.roll(1, -1), text)
    before = _decode_counts(model)
    try:
        with drafting(script, call.name):
            ours = text_of(model, call, tokens, prompt_lookup_num_tokens=drafts)
    except Exception as error:  # stock, which serves what we do not cover, may refuse drafts
        with contextlib.suppress(type(error)):
            lookup = {"max_new_tokens": tokens, "prompt_lookup_num_tokens": drafts}
            type(model).generate(model, **call.inputs, **lookup)
            raise
        decode = dict(_decode_counts(model) - before)
        return {"equal": True, "decode": decode, "error": _described(error)}
    decode = dict(_decode_counts(model) - before)
    is_stocks = any(what.startswith("stock: ") for what in decode)  # which may be wrong (RoFormer)
    return {"equal": is_stocks or torch.equal(ours, text), "decode": decode}


def _decode_counts(model: Any) -> Counter[str]:
    report = getattr(model, "mirage", None)
    return Counter(report.report.decode or {}) if report is not None else Counter()


def _report_facts(model: Any) -> Row:
    report = model.mirage.report
    return {
        "notes": list(report.notes),
        "swapped": dict(Counter(r.pattern for r in report.rows if r.status == "swapped")),
        "stock": dict(
            Counter(f"{r.pattern}: {r.reason}" for r in report.rows if r.status == "stock")
        ),
        "fallbacks": report.fallbacks,
    }


def _margins(stock: Returned) -> list[float]:
    """Return by how much stock's tokens win, for each step: near 0, rounding may change them."""
    best = [logits.float().topk(2).values for logits in stock.logits or ()]
    return [round((b[:, 0] - b[:, 1]).min().item(), 6) for b in best]


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, UnbuiltError):
        return text
    if isinstance(error, ImportError):
        text = text.split(". ")[0]
    return f"{type(error).__name__}: {text}"


# -- all types -------------------------------------------------------------------------------------


def in_own_process(model_type: str, head: str, tokens: int, seconds: float, drafts: int) -> Row:
    """Return the row of a type, from a process that ends after some seconds."""
    context = multiprocessing.get_context("fork")  # so that torch is imported once
    ours, theirs = context.Pipe(duplex=False)
    arguments = (model_type, head, tokens, drafts, theirs)
    process = context.Process(target=_send_row, args=arguments)
    process.start()
    theirs.close()
    failed = {"type": model_type, "head": head, "transformers": transformers.__version__}
    try:
        if not ours.poll(seconds):
            return failed | {"error": f"not done after {seconds:g} s"}
        row: Row = ours.recv()
        return row
    except EOFError:
        process.join()
        return failed | {"error": f"its process ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _send_row(model_type: str, head: str, tokens: int, drafts: int, to: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(None):  # some models print
        row = survey(model_type, head, tokens, drafts)
    to.send(row)


def run(types: Mapping[str, str], out: Path, tokens: int, seconds: float, drafts: int = 0) -> None:
    """Survey types, and append a line for each to a file."""
    with out.open("a") as file:
        for number, (model_type, head) in enumerate(types.items(), 1):
            row = in_own_process(model_type, head, tokens, seconds, drafts)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{number}/{len(types)} {model_type}: {class_of(row)}", flush=True)


# -- the command -----------------------------------------------------------------------------------


def part_of(text: str) -> tuple[int, int]:
    """Parse "0/2", the first of two parts."""
    first, parts = map(int, text.split("/"))
    if not 0 <= first < parts:
        raise ValueError(text)
    return first, parts


def main() -> None:
    """Run the survey, or print a table of its results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="names of types; all if none is given")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each type")
    parser.add_argument("--part", type=part_of, default=(0, 1), help="such as 0/2: every second")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--seconds", type=float, default=200, help="the most for one type")
    parser.add_argument("--drafts", type=int, default=0, help="drafts that further calls verify")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="count the classes")
    parser.add_argument("--grid", type=Path, nargs="+", metavar="FILE", help="print markdown")
    args = parser.parse_args()
    if args.table or args.grid:
        if args.table:
            print(table(rows_of(args.table)))
        if args.grid:
            rows = rows_of(args.grid)
            for part in (False, True):
                if chosen_rows := [row for row in rows if ("/" in row["type"]) == part]:
                    print(grid(chosen_rows))
        return
    if args.out is None:
        parser.error("--out is missing")
    types = model_types()
    if unknown := {*args.types} - {*types}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [name for name in types if not args.types or name in args.types]
    first, parts = args.part
    chosen_types = {name: types[name] for name in chosen[first::parts]}
    run(chosen_types, args.out, args.tokens, args.seconds, args.drafts)


if __name__ == "__main__":
    main()
