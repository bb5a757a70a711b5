"""What generate() of an optimized model must do, one function for each feature.

The checks run on a CPU and on a GPU. Each compares with stock on the same weights, and asks the
counters how the calls ran. In 16 bits, tokens may differ from stock's only where the choice of
stock is within its own error.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, pipeline
from transformers.generation.streamers import (
    AsyncTextIteratorStreamer,
    TextIteratorStreamer,
    TextStreamer,
)

from mirage_hf.api import optimize, restore
from mirage_hf.decode import install, prefill
from mirage_hf.decode import runner as decode_runner
from mirage_hf.decode import step as decode_step
from tests.helpers.generate_comparison import (
    FULL,
    Arguments,
    Recorder,
    assert_same,
    assert_same_cache,
    left_padded,
    tokenizer,
)
from tests.helpers.tiny_models import prompt, rows_parted, tiny, twin_of

KERNELS, CHANGED = "all by kernels", "the model has changed since optimize()"
#: Batch sizes that have kernels.
ROWS = (1, 2, 3)
GREEDY = {"do_sample": False, "max_new_tokens": 12}
#: Sizes of `small` that give a layer enough numbers for the check of optimize().
WIDE = dict(
    hidden_size=256,
    intermediate_size=640,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=2,
    initializer_range=0.05,
)


@dataclass(repr=False)
class Pair:
    """A stock model and its twin whose generate is ours.

    Steps run "kernels" (all by kernels) or "forward" (the model's own forward).
    """

    stock: Any
    how: str
    #: Options of optimize().
    options: dict[str, Any] = field(default_factory=dict)
    #: A copy of stock that becomes ours. It is made if not given.
    ours: Any = None
    #: An optimized model that drafts for ours.
    assistant: Any = None
    #: How the steps of the calls so far should have run.
    wanted: Counter[str] = field(default_factory=Counter)
    #: Number of calls so far.
    asked: int = 0

    def __post_init__(self) -> None:
        model = twin_of(self.stock) if self.ours is None else self.ours
        if self.how == "kernels":
            optimize(model, batch_sizes=ROWS, **self.options)
        elif "generate" not in model.__dict__:
            install(model)
        self.ours = model
        self._lock = threading.Lock()

    def again(self) -> Pair:
        """Return a pair of copies that a test may change."""
        return Pair(twin_of(self.stock), self.how, self.options)

    @property
    def device(self) -> torch.device:
        return self.stock.device

    @property
    def half(self) -> bool:
        """Return whether tokens may differ at ties."""
        return self.stock.dtype in (torch.bfloat16, torch.float16)

    @property
    def runner(self) -> Any:
        return self.ours.generate.runner

    # -- calls

    def fresh(self, arguments: Arguments) -> dict[str, Any]:
        """Return the arguments of one call, with tensors on the device of the models."""
        given = arguments() if callable(arguments) else arguments
        return {
            k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in given.items()
        }

    def expect(self, batch: int, step: str | None = None, calls: int = 1) -> None:
        """Say how the steps of the following calls should run."""
        without = f"no kernels for a batch of {batch}; optimize(batch_sizes=…) makes them"
        with self._lock:
            self.asked += calls
            if self.how == "kernels":
                self.wanted[step or (KERNELS if batch in ROWS else without)] += calls

    def generate(
        self,
        arguments: Arguments,
        step: str | None = None,
        seed: int = 5,
        drafts: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return our output, and count the call. `drafts` are more arguments."""
        torch.manual_seed(seed)
        out = self.ours.generate(**self.fresh(arguments), **(drafts or {}))
        self.expect(len(out if isinstance(out, torch.Tensor) else out.sequences), step)
        return out

    def agree(
        self,
        arguments: Arguments,
        step: str | None = None,
        whole: bool = True,
        drafts: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return our output after comparing it with stock's for the same arguments.

        Unless `whole`, ours may have stopped earlier. `drafts` are arguments of our call alone.
        """
        given = self.fresh(arguments)
        torch.manual_seed(5)
        stock = type(self.stock).generate(self.stock, **{**given, **(FULL if self.half else {})})
        ours = self.generate(arguments, step, drafts=drafts)
        if self.half:
            tokens = ours if isinstance(ours, torch.Tensor) else ours.sequences
            parted = rows_parted(self.stock, stock, tokens, given)
            assert parted or not whole or tokens.shape == stock.sequences.shape, (
                tokens.shape,
                stock.sequences.shape,
            )
            return ours
        try:
            assert_same(stock if whole else stock[:, : ours.shape[1]], ours)
        except AssertionError as error:
            raise AssertionError(f"{self._where(stock, ours, given)}\n{error}") from error
        return ours

    def _where(self, stock: Any, ours: Any, given: dict[str, Any]) -> str:
        """Say where tokens differ and how much stock preferred its own, for a failure message."""
        a, b = (out if isinstance(out, torch.Tensor) else out.sequences for out in (stock, ours))
        told = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        if a.shape != b.shape or torch.equal(a, b):
            shapes = f"{list(a.shape)} tokens of stock's, {list(b.shape)} of ours"
            return f"{told}: {shapes}, alike: {a.shape == b.shape}"
        row, at = (a != b).nonzero()[0].tolist()
        with torch.no_grad():
            seen = a[row : row + 1, :at]
            mask = torch.ones_like(seen)
            if (padding := given.get("attention_mask")) is not None and len(padding) == len(a):
                mask[:, : padding.shape[1]] = padding[row, :at]
            logits = self.stock(
                seen, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
            ).logits[0, -1]
        gap = float(logits[a[row, at]] - logits[b[row, at]])
        tokens = f"{a[row, at]} and {b[row, at]}, whose logits differ by {gap:.3g} in stock"
        return f"{told}: row {row} differs at position {at}: {tokens}"

    def check_counts(self) -> None:
        """Assert that every call ran as expected, in graphs if there are any.

        Raises:
            AssertionError: with all counts.
        """
        counts = self.runner.counts
        steps = {
            what.removeprefix("step: "): n
            for what, n in counts.items()
            if what.startswith("step: ")
        }
        called = {what: n for what, n in counts.items() if not what.startswith("step: ")}
        place = (
            "captured"
            if decode_runner.why_no_capture(self.device) is None
            else "called: no graphs on cpu"
        )
        text = f"counts {dict(counts)}, steps wanted {dict(self.wanted)}"
        assert set(called) == ({place} if self.asked else set()) and steps == dict(self.wanted), (
            text
        )
        assert self.how == "forward" or called.get(place, 0) == self.wanted.total(), text


Check = Callable[[Pair], None]
FEATURES: dict[str, Check] = {}


def feature(check: Check) -> Check:
    FEATURES[check.__name__] = check
    return check


class Recording(TorchDispatchMode):
    """Record the ops that run inside, so that they can be run again on the same memory.

    As in a CUDA graph, values that Python computed are not computed again.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Operands and results of each op; a result that is no view by its place among the
        #: results.
        self.ops: list[tuple[Any, Any, Any, dict[int, torch.Tensor]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = op(*args, **kwargs)
        there = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        writes = any(
            a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments
        )
        new = {
            n: x
            for n, x in enumerate(_tensors(made))
            if x.numel() and x.untyped_storage().data_ptr() not in there
        }
        if writes or new:
            self.ops.append((op, args, kwargs, new))
        return made

    def replay(self) -> None:
        with torch.inference_mode():  # which may write to tensors of either kind
            for op, args, kwargs, new in self.ops:
                made = _tensors(op(*args, **kwargs))
                for n, x in new.items():
                    x.copy_(made[n])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def fake_captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make "graphs" on a CPU run the captured ops again.

    Returns:
        A list that gets the name of the module at each capture.
    """
    made: list[str] = []

    def capture_for(name: str) -> Callable[..., Any]:
        def capture(run: Callable[[], None], device: torch.device, pool: Any) -> Any:
            for _ in range(3):  # as warming up does
                run()
            with Recording() as graph:
                run()
            made.append(name)
            return graph, pool

        return capture

    monkeypatch.setattr(decode_runner, "why_no_capture", lambda device: None)
    for module in (prefill, decode_step):
        monkeypatch.setattr(module, "capture", capture_for(module.__name__.rpartition(".")[2]))
    return made


def in_threads(jobs: list[Callable[[], None]]) -> None:
    """Run jobs at once, and raise the first error."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


# -- what is generated ----------------------------------------------------------------------------


@feature
def left_padded_batches(pair: Pair) -> None:
    for lengths in ((4, 11, 7), (1, 19), (9, 9, 2)):
        pair.agree({**left_padded(lengths), **GREEDY, **FULL})
        pair.agree({**left_padded(lengths), **GREEDY})


@feature
def num_return_sequences(pair: Pair) -> None:
    sampled = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12}
    if not pair.half:  # one candidate each, so the random number does not matter
        out = pair.agree({"inputs": prompt(), **sampled, "top_k": 1})
        assert out.shape == (3, 19) and len(set(map(tuple, out.tolist()))) == 1
    seen = [
        pair.generate({"inputs": prompt(), **sampled, "top_k": 20}, seed=seed).tolist()
        for seed in (1, 1, 2)
    ]
    # in 16 bits a replayed prefill may round differently from the first one, which was called
    assert (
        (pair.half or seen[0] == seen[1])
        and seen[1] != seen[2]
        and len(set(map(tuple, seen[0]))) == 3
    ), seen
    text = torch.tensor(seen[0], device=pair.device)
    with torch.no_grad():
        logits = pair.stock(text).logits[:, 6:-1].float()
    chosen, least = logits.gather(-1, text[:, 7:, None])[..., 0], logits.topk(20).values[..., -1]
    room = 0.1 if pair.half else 1e-3
    assert bool((chosen >= least - room).all()), (
        f"a token that is not among the 20 most likely, by {float((least - chosen).max())}"
    )


@feature
def eos_lists(pair: Pair) -> None:
    free = pair.stock.generate(**pair.fresh(left_padded()), do_sample=False, max_new_tokens=16)[
        :, 11:
    ].tolist()
    for eos in (free[1][4], [free[1][4], free[0][9], free[2][5]], list(range(3, 99, 2))):
        out = pair.agree(
            {**left_padded(), **FULL, "max_new_tokens": 16, "do_sample": False, "eos_token_id": eos}
        )
        if not pair.half:
            assert not out.sequences[1, -1] or out.sequences.shape[1] < 27, "no row ended early"


@feature
def min_new_tokens(pair: Pair) -> None:
    out = pair.agree(
        {"inputs": prompt(2), **GREEDY, "min_new_tokens": 9, "eos_token_id": list(range(3, 60))}
    )
    assert out.shape[1] >= 16 and bool((out[:, 7:16] >= 60).logical_or(out[:, 7:16] < 3).all())


@feature
def repetition_penalty(pair: Pair) -> None:
    out = pair.agree({**left_padded(), **GREEDY, "repetition_penalty": 1.4})
    assert pair.half or not torch.equal(out, pair.agree({**left_padded(), **GREEDY}))


@feature
def bad_words(pair: Pair) -> None:
    free = pair.stock.generate(**pair.fresh({"inputs": prompt(2)}), **GREEDY)[0, 7:].tolist()
    out = pair.agree(
        {"inputs": prompt(2), **GREEDY, "bad_words_ids": [[free[0]], [free[3]], [free[5], free[6]]]}
    )
    assert not {free[0], free[3]} & set(out[:, 7:].flatten().tolist())


@feature
def scores_and_logits(pair: Pair) -> None:
    for extra in (
        {},
        {"output_logits": False},
        {"output_scores": False},
        {"eos_token_id": list(range(3, 40, 3))},
        {"repetition_penalty": 1.3},
    ):
        out = pair.agree({**left_padded(), **GREEDY, **FULL, **extra})
        new = out.sequences.shape[1] - 11
        for name in ("scores", "logits"):
            kept = getattr(out, name)
            assert (
                kept is None
                if extra.get(f"output_{name}") is False
                else len(kept) == new and kept[0].dtype == torch.float32
            )
        if (choices := out.scores or out.logits) and "eos_token_id" not in extra:
            assert torch.stack(choices, 1).argmax(-1).tolist() == out.sequences[:, 11:].tolist()


# -- streams and stops ----------------------------------------------------------------------------


class Kept(TextStreamer):
    """A text streamer that keeps what it would print."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


@feature
def text_streamers(pair: Pair) -> None:
    tok = tokenizer()
    for extra in ({}, {"do_sample": True}, {"repetition_penalty": 1.2}):
        kept, given = Kept(tok, skip_prompt=True), {"inputs": prompt(), **GREEDY, **extra}
        out = (pair.generate if "do_sample" in extra else pair.agree)(
            lambda given=given, kept=kept: {**given, "streamer": kept}
        )
        # stock has used the same object before
        text = tok.decode(out[0, 7:])
        assert kept.text.endswith(text) and len(text) >= 12, (kept.text, text)


@feature
def streamed_calls(pair: Pair) -> None:
    for extra in (
        {},
        {"eos_token_id": list(range(3, 50))},
        {"repetition_penalty": 1.2},
        {"max_time": 100.0},
    ):
        for batch in (1, 2):
            seen: list[Recorder] = []

            def arguments(
                seen: list[Recorder] = seen, batch: int = batch, extra: dict[str, Any] = extra
            ) -> dict[str, Any]:
                seen.append(r := Recorder())
                return {"inputs": prompt(batch), **GREEDY, **extra, "streamer": r}

            out = pair.agree(arguments)
            put = [value for what, *_, value in (e for e in seen[-1].events if e[0] == "put")]
            assert (
                put[0] == prompt(batch).tolist()
                and put[1:] == out[:, 7:].T.tolist()
                and seen[-1].events[-1] == ("end",)
            )
            assert pair.half or seen[-1].events == seen[-2].events


@feature
def iterators_of_text(pair: Pair) -> None:
    tok, given = tokenizer(), {"inputs": prompt(), **GREEDY}
    streamer: Any = TextIteratorStreamer(tok, skip_prompt=True, timeout=60)
    out: list[Any] = []
    thread = threading.Thread(
        target=lambda: out.append(pair.generate({**given, "streamer": streamer}))
    )
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == tok.decode(out[0][0, 7:]) and len(pieces) > 1

    async def listen() -> tuple[str, Any]:
        streamer = AsyncTextIteratorStreamer(tok, skip_prompt=True, timeout=60)
        running = asyncio.get_running_loop().run_in_executor(
            None, lambda: pair.generate({**given, "streamer": streamer})
        )
        text = "".join([piece async for piece in streamer])
        return text, await running

    text, tokens = asyncio.run(listen())
    assert text == tok.decode(tokens[0, 7:])
    if not pair.half:
        assert torch.equal(tokens, out[0]) and torch.equal(tokens, pair.agree(given))


@feature
def stop_strings(pair: Pair) -> None:
    tok = tokenizer()
    free = tok.decode(
        pair.stock.generate(
            **pair.fresh({"inputs": prompt(2)}), do_sample=False, max_new_tokens=20
        )[0, 7:]
    )
    stops, out = [free[5:7], "never"], free.find(free[5:7])
    given = {"tokenizer": tok, "do_sample": False, "max_new_tokens": 20, "stop_strings": stops}
    text = tok.decode(pair.agree({"inputs": prompt(2)[:1], **given})[0, 7:])
    assert pair.half or text == free[: out + 2]
    pair.agree({"inputs": prompt(2), **given})


@feature
def max_time(pair: Pair) -> None:
    assert (
        pair.agree(
            {"inputs": prompt(2), "do_sample": False, "max_new_tokens": 50, "max_time": 0.0}
        ).shape[1]
        == 8
    )

    class Slow(Recorder):
        def put(self, value: torch.Tensor) -> None:
            time.sleep(0.02)

    limits = iter(
        ({}, {"max_time": 0.2, "streamer": Slow()})
    )  # stock has no time limit: our text is a beginning of its text
    out = pair.agree(
        lambda: {"inputs": prompt(), "do_sample": False, "max_new_tokens": 60, **next(limits)},
        whole=False,
    )
    assert 8 <= out.shape[1] < 30, out.shape


@feature
def interrupted_calls(pair: Pair) -> None:
    """Press Ctrl-C in a call. The model stays usable and no memory stays leased."""
    for at, extra in (
        (0, {}),
        (1, {}),
        (5, {}),
        (3, {"do_sample": True}),
        (3, {"repetition_penalty": 1.2}),
    ):

        class Interrupting(Recorder):
            def put(self, value: torch.Tensor, at: int = at) -> None:
                super().put(value)
                if len(self.events) > at:
                    raise KeyboardInterrupt

        before = pair.runner.counts.total()
        try:
            pair.ours.generate(
                **pair.fresh({"inputs": prompt(2, seed=at), **GREEDY, **extra}),
                streamer=Interrupting(),
            )
            raise AssertionError("the interrupt was lost")
        except KeyboardInterrupt:
            assert not pair.runner.pool._leased
        if (
            at or pair.runner.counts.total() > before
        ):  # the prompt is put before a step is chosen, except if the step ran early
            pair.expect(2)
        pair.agree({"inputs": prompt(2), **GREEDY, **FULL})


# -- caches ---------------------------------------------------------------------------------------


@feature
def caches_passed_in(pair: Pair) -> None:
    for given in ({"input_ids": prompt(1, 12)}, left_padded()):
        used: list[DynamicCache] = []

        def first(used: list[DynamicCache] = used, given: dict[str, Any] = given) -> dict[str, Any]:
            used.append(DynamicCache(config=pair.stock.config))
            return {**given, **GREEDY, "past_key_values": used[-1]}

        text = pair.agree(first)
        if pair.half:
            continue  # after texts differ, so do the caches
        assert_same_cache(*used, mask=given.get("attention_mask"))
        again, mask = iter(used), given.get("attention_mask", torch.ones_like(given["input_ids"]))
        longer = torch.cat([text, prompt(len(text), 3, seed=9).to(text)], -1)
        mask = torch.cat([mask, mask.new_ones(len(text), 15)], -1)
        pair.agree(
            lambda again=again, longer=longer, mask=mask: {
                "input_ids": longer,
                "attention_mask": mask,
                "past_key_values": next(again),
                **GREEDY,
                **FULL,
            }
        )
        assert_same_cache(*used, mask=given.get("attention_mask"))


@feature
def caches_handed_back(pair: Pair) -> None:
    """Keep returned caches. Later calls leave them alone, and the next turn can use them."""
    out = pair.agree({"inputs": prompt(2), **GREEDY, **FULL})
    kept = [layer.keys.clone() for layer in out.past_key_values.layers]
    pair.agree({"inputs": prompt(2, 20, seed=8), "do_sample": False, "max_new_tokens": 30})
    assert all(
        torch.equal(a, layer.keys)
        for a, layer in zip(kept, out.past_key_values.layers, strict=True)
    )
    longer = torch.cat([out.sequences, prompt(2, 4, seed=3).to(out.sequences)], -1)
    turn = {"input_ids": longer, "attention_mask": torch.ones_like(longer), **GREEDY}
    fresh = pair.agree(turn)
    cached = pair.generate({**turn, "past_key_values": out.past_key_values})
    assert pair.half or torch.equal(fresh, cached)
    assert out.past_key_values.get_seq_length() == cached.shape[1] - 1


# -- many calls -----------------------------------------------------------------------------------


@feature
def fifty_prompts_of_changing_length(pair: Pair) -> None:
    for n in range(50):
        pair.agree(
            {
                "inputs": prompt(1 + n % 2, 1 + n * 37 % 300, seed=n),
                "do_sample": False,
                "max_new_tokens": 1 + n % 4,
            }
        )
    assert len(pair.runner.pool.blocks) <= 4


@feature
def batches_of_changing_size(pair: Pair) -> None:
    for n, batch in enumerate((1, 3, 4, 2, 1, 5, 3, 1, 2, 4)):
        pair.agree(
            {"inputs": prompt(batch, 5 + n, seed=n), "do_sample": False, "max_new_tokens": 5}
        )


@feature
def threads(pair: Pair) -> None:
    def job(seed: int) -> Callable[[], None]:
        def run() -> None:
            for n in range(2):
                pair.agree(
                    {"inputs": prompt(1 + (seed + n) % 2, 9 + n, seed=10 * seed + n), **GREEDY}
                )

        return run

    in_threads([job(seed) for seed in range(4)])
    assert not pair.runner.pool._leased


@feature
def two_models_at_once(pair: Pair) -> None:
    other = Pair(different(pair), pair.how, pair.options)

    class Asking(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.events) % 2:
                other.agree(
                    {
                        "inputs": prompt(2, seed=len(self.events)),
                        "do_sample": False,
                        "max_new_tokens": 3,
                    }
                )

    # first calls inside of the other's calls, then at the same time
    pair.agree(
        lambda: {"inputs": prompt(), "do_sample": False, "max_new_tokens": 5, "streamer": Asking()}
    )
    in_threads(
        [
            lambda p=p: [p.agree({**left_padded(), **GREEDY}) for _ in range(2)]
            for p in (pair, other)
        ]
    )
    other.check_counts()


def different(pair: Pair) -> Any:
    """Return another stock model of the same sizes."""
    model = twin_of(pair.stock)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                p.flatten()[torch.randperm(p.numel(), generator=generator).to(p.device)].view(
                    p.shape
                )
            )
    return model


# -- around generate ------------------------------------------------------------------------------


@feature
def text_pipeline(pair: Pair) -> None:
    tok, texts = tokenizer(), ["hello", "a-longer-prompt", "of", "x"]
    options = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2}
    mine, stocks = (
        pipeline("text-generation", model=m, tokenizer=tok) for m in (pair.ours, pair.stock)
    )
    got = mine(texts, **options)
    pair.expect(2, calls=2)
    assert pair.half or got == stocks(texts, **options)
    assert all(
        len(out[0]["generated_text"]) > len(text) for out, text in zip(got, texts, strict=True)
    )


@feature
def chat_templates(pair: Pair) -> None:
    tok = tokenizer()
    tok.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages = [{"role": "user", "content": "What-is-it?"}]
    for _ in range(2):  # two turns
        given = tok.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = pair.agree({**{k: given[k] for k in ("input_ids", "attention_mask")}, **GREEDY})
        reply = tok.decode(out[0, given["input_ids"].shape[1] :])
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Why?"}]
    mine, stocks = (
        pipeline("text-generation", model=m, tokenizer=tok)(messages, **GREEDY)
        for m in (pair.ours, pair.stock)
    )
    pair.expect(1)
    assert pair.half or mine == stocks
    assert mine[0]["generated_text"][-1]["role"] == "assistant"


@feature
def inference_mode(pair: Pair) -> None:
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            pair.agree({**left_padded(), **GREEDY, **FULL})


@feature
def a_deep_copy(pair: Pair) -> None:
    """Copy the model. The copy is of stock's class; optimizing it gives it kernels."""
    pair.agree({"inputs": prompt(), **GREEDY})
    mine, stocks = copy.deepcopy(pair.ours), different(pair)
    with torch.no_grad():
        for p, q in zip(mine.parameters(), stocks.parameters(), strict=True):
            p.copy_(q)
    assert not {"mirage", "generate", "__getstate__"} & set(mine.__dict__)
    for how in dict.fromkeys(("forward", pair.how)):
        copied = Pair(stocks, how, pair.options, mine)
        copied.agree({**left_padded(), **GREEDY})
        copied.check_counts()
    pair.agree({"inputs": prompt(), **GREEDY})


@feature
def moved_and_cast(pair: Pair) -> None:
    pair = pair.again()
    pair.agree({**left_padded(), **GREEDY})
    home, dtype = pair.device, pair.stock.dtype
    others = [torch.float64, torch.bfloat16, torch.float16, torch.float32]
    changes: list[Callable[[Any], Any]] = [
        *(lambda m, d=d: m.to(d) for d in others),
        lambda m: m.half(),
        lambda m: m.float().cpu(),
        lambda m: m.to(home),
        lambda m: m.to(dtype),
    ]
    for n, change in enumerate(changes):
        change(pair.stock)
        change(pair.ours)
        pair.agree({**left_padded(), **GREEDY}, step=CHANGED)
        assert handled(pair) == n + 2, f"after change {n}: {pair.runner.counts}"
    if pair.how == "kernels":
        pair = Pair(pair.stock, pair.how, pair.options)
        pair.agree({**left_padded(), **GREEDY})
        pair.check_counts()


def handled(pair: Pair) -> int:
    return sum(
        n for what, n in pair.runner.counts.items() if what.startswith(("captured", "called"))
    )


@feature
def saved_and_loaded(pair: Pair) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pair.ours.save_pretrained(folder)
        back = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=pair.stock.dtype)
            .to(pair.device)
            .eval()
        )
    assert type(back) is type(pair.stock) and not {"mirage", "generate"} & set(back.__dict__)
    assert back.config.architectures == [type(pair.stock).__name__]
    state = pair.stock.state_dict()
    assert list(back.state_dict()) == list(state) and all(
        torch.equal(v, state[k]) for k, v in back.state_dict().items()
    )
    loaded = Pair(pair.stock, pair.how, pair.options, back)
    loaded.agree({**left_padded(), **GREEDY})
    loaded.check_counts()


@feature
def taken_back(pair: Pair) -> None:
    pair = pair.again()
    pair.agree({**left_padded(), **GREEDY})
    pair.check_counts()
    if pair.how == "kernels":
        restore(pair.ours)
        want, got = (
            m.generate(**pair.fresh(left_padded()), **GREEDY) for m in (pair.stock, pair.ours)
        )
        assert torch.equal(want, got) and "generate" not in pair.ours.__dict__


@contextmanager
def alone(cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """Let the tests inside see only the kernels that they find, kept from one model to the next.

    MIRAGE_HF_TEST_KERNELS may name a folder of kernels found by
    tests/helpers/search_gpu_kernels.py. Float32 is exact.
    """
    if prepared := os.environ.get("MIRAGE_HF_TEST_KERNELS"):
        shutil.copytree(prepared, cache, dirs_exist_ok=True)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAGE_HF_CACHE", str(cache))
        yield patch
    torch.backends.cuda.matmul.allow_tf32 = before


def small(family: str, dtype: torch.dtype, device: str, **sizes: Any) -> Any:
    """Return a random model whose caches reach over two sizes of blocks."""
    return tiny(family, dtype=dtype, max_position_embeddings=1024, **sizes).to(device)
