"""Time the linears of a decoding step as one chain of dependent kernels, beside torch.

    python -m scripts.bench_chain --model llama-3.2-1b,llama-3.1-8b --out chain.json
    python -m scripts.bench_chain --model llama-3.2-1b --batch 16 --tune full --searched

A layer is RMSNorm + q, k, v; o + residual; RMSNorm + gate, up and SiLU; down + residual. After the
last layer come RMSNorm + head. Attention is left out. In its place, o reads the first numbers of
the q, k, v result, so every kernel still waits for the one before. Every layer has random bfloat16
weights of its own. Ours runs what `optimize()` would run. The rivals have q, k, v and gate, up as
one weight each. The floor is the bytes of all weights divided by 4.47 TB/s. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.patterns.gated_mlp import GATED_MLP
from mirage_hf.patterns.linear_residual import LINEAR_RESIDUAL
from mirage_hf.patterns.rms_norm_linear import RMS_NORM_LINEAR
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import layer_choice, outcome, resolver
from mirage_hf.tune import measure
from scripts import benching
from scripts.bench_reports import Budget, Report, add_report_options, run_all
from scripts.benching import (
    BYTES_PER_SECOND,
    COMPILE,
    Contender,
    error_of,
    explained,
    need_gpu,
    relative_error,
    searched_run,
    take_turns,
    within,
)
from scripts.configs import MODELS, Sizes

DTYPE = torch.bfloat16
QKV, OUT, MLP, DOWN, HEAD = "qkv", "o", "gate_up", "down", "head"

Call = Callable[[list[Tensor]], Sequence[Tensor]]


class Layer(NamedTuple):
    """The weights of one layer, (N, K) each. Weights for the same input are parts of one tensor."""

    norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model(NamedTuple):
    """All weights of the chain."""

    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(t.nbytes for part in (*self.layers, (self.norm, self.head)) for t in part)


@dataclass(frozen=True)
class Chain:
    """The programs of a model at a batch size.

    Attributes:
        sizes: The model's sizes.
        rows: The batch size.
        separate: Whether kernels get q, k and v as three weights, as in the model.
    """

    sizes: Sizes
    rows: int
    separate: bool = False

    @property
    def attended(self) -> int:
        """Columns that o reads."""
        return self.sizes.heads * self.sizes.head_dim

    @property
    def qkv(self) -> tuple[int, ...]:
        """Columns of q, k and v, or of all of them together."""
        kv = self.sizes.kv_heads * self.sizes.head_dim
        return (self.attended, kv, kv) if self.separate else (self.attended + 2 * kv,)

    def blocks(self) -> dict[str, PatternBlock]:
        """Return the blocks of a layer, and the head."""
        s = self.sizes

        def norm_linear(n: tuple[int, ...]) -> PatternBlock:
            return RMS_NORM_LINEAR.block(k=s.hidden, n=n, bias=False, eps=s.eps, dtype=DTYPE)

        def linear(k: int) -> PatternBlock:
            return LINEAR_RESIDUAL.block(k=k, n=s.hidden, bias=False, dtype=DTYPE)

        mlp = GATED_MLP.block(
            k=s.hidden,
            n=s.intermediate,
            activation="silu",
            norm=True,
            bias=False,
            eps=s.eps,
            dtype=DTYPE,
        )
        return {
            QKV: norm_linear(self.qkv),
            OUT: linear(self.attended),
            MLP: mlp,
            DOWN: linear(s.intermediate),
            HEAD: norm_linear((s.vocab,)),
        }

    def programs(self) -> dict[str, KernelGraph]:
        """Return their tensor programs."""
        return {name: block.program(self.rows) for name, block in self.blocks().items()}

    def model(self, layers: int, device: torch.device | str) -> Model:
        """Return random weights that keep the size of what they multiply."""

        def matrix(n: int, k: int) -> Tensor:
            return torch.empty(n, k, dtype=DTYPE, device=device).normal_(
                0.0, k**-0.5, generator=generator
            )

        def norm() -> Tensor:
            return torch.empty(s.hidden, dtype=DTYPE, device=device).normal_(
                1.0, 0.1, generator=generator
            )

        s, generator = self.sizes, torch.Generator(device).manual_seed(0)
        return Model(
            tuple(
                Layer(
                    norm(),
                    matrix(sum(self.qkv), s.hidden),
                    matrix(s.hidden, self.attended),
                    norm(),
                    matrix(2 * s.intermediate, s.hidden),
                    matrix(s.hidden, s.intermediate),
                )
                for _ in range(layers)
            ),
            norm(),
            matrix(s.vocab, s.hidden),
        )

    def first(self, qkv: Tensor) -> Tensor:
        """Return the first numbers of q, k, v in place of attention's result, without a copy."""
        return qkv.view(-1)[: self.rows * self.attended].view(self.rows, self.attended)

    # -- by programs: ours and the reference ------------------------------------------------------

    def layer(self, h: Tensor, w: Layer, calls: Mapping[str, Call]) -> Tensor:
        """Run one layer through the given calls."""
        (qkv,) = calls[QKV]([h, w.norm[None], *(part.t() for part in w.qkv.split(self.qkv))])
        (h,) = calls[OUT]([self.first(qkv), w.o.t(), h])
        gate, up = w.gate_up.chunk(2)
        (y,) = calls[MLP]([h, w.mlp_norm[None], gate.t(), up.t()])
        (h,) = calls[DOWN]([y, w.down.t(), h])
        return h

    def logits(self, h: Tensor, model: Model, calls: Mapping[str, Call]) -> Tensor:
        """Run all layers and the head."""
        for w in model.layers:
            h = self.layer(h, w, calls)
        (y,) = calls[HEAD]([h, model.norm[None], model.head.t()])
        return y

    # -- as torch users write it: the rivals ------------------------------------------------------

    def torch_layer(self, h: Tensor, w: Layer) -> Tensor:
        """Run one layer in torch."""
        shape, eps = (self.sizes.hidden,), self.sizes.eps
        qkv = F.linear(F.rms_norm(h, shape, w.norm, eps), w.qkv)
        h = F.linear(self.first(qkv), w.o) + h
        gate, up = F.linear(F.rms_norm(h, shape, w.mlp_norm, eps), w.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w.down) + h

    def torch_logits(self, h: Tensor, model: Model) -> Tensor:
        """Run all layers and the head in torch."""
        for w in model.layers:
            h = self.torch_layer(h, w)
        return F.linear(F.rms_norm(h, (self.sizes.hidden,), model.norm, self.sizes.eps), model.head)


def in_float64(programs: Mapping[str, KernelGraph]) -> dict[str, Call]:
    """Return calls that run the programs in float64."""
    return {name: partial(_exact, program) for name, program in programs.items()}


def _exact(program: KernelGraph, inputs: list[Tensor]) -> list[Tensor]:
    return run_kernel_graph(program, inputs, torch.float64)


def resolved(chain: Chain, args: argparse.Namespace) -> tuple[dict[str, Call], dict[str, Any]]:
    """Return our kernel of each program and its description.

    With `--searched` it is always the searched kernel, even if the library is faster.
    """
    calls: dict[str, Call] = {}
    found: dict[str, Any] = {}
    blocks = chain.blocks()
    each = [
        resolver.resolve(
            b.program(chain.rows),
            device=benching.DEVICE,
            tune=args.tune,
            pattern=b.pattern.name,
            next_may_launch_early=b.pattern.next_may_launch_early,
        )
        for b in blocks.values()
    ]
    *layer, head = each
    for name, r in zip(
        blocks, [*layer_choice.chosen_for_layer(layer, device=benching.DEVICE), head], strict=True
    ):
        forced = searched_run(r) if args.searched else None
        calls[name] = forced or r.run
        found[name] = {
            "program": r.entry.key.title,
            "runs": outcome.OURS if r.runs_kernel or forced else outcome.LIBRARY,
            "source": r.source,
            "searched_us": r.time_us,
            "library_us": r.library_us,
            "reason": r.reason,
            "seconds": round(r.seconds, 1),
            "schedules": [str(s) for s in r.entry.schedules],
            "ugraph": str(r.ugraph),
        }
        print(program_line(name, found[name]), flush=True)
    return calls, found


def program_line(name: str, found: dict[str, Any]) -> str:
    """Describe a kernel in one line."""
    searched, library = (
        f"{us:.2f} µs" if us is not None else "not measured"
        for us in (found["searched_us"], found["library_us"])
    )
    return (
        f"    {name:8}{found['program']}: runs the {found['runs']} ({found['source']}, "
        f"{found['seconds']} s); searched {searched}, library {library}; "
        f"{'; '.join(found['schedules']) or found['reason']}"
    )


def captured_chain(run: Callable[[], Tensor], steps: int, reads: Any) -> tuple[Contender, Tensor]:
    """Capture `steps` chains one after another. Return them and the logits of the last one."""
    # Only the last logits are kept, because the graph may use the memory of others again.
    last: dict[str, Tensor] = {}
    captured = measure.capture(lambda _: last.update(logits=run()), [reads], steps)
    return Contender(captured), last["logits"]


def bench(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model at one batch size."""
    torch._dynamo.reset()
    sizes = MODELS[name]
    chain = Chain(sizes, args.batch, args.qkv == "separate")
    calls, found = resolved(chain, args)
    model = chain.model(args.layers or sizes.layers, benching.DEVICE)
    h = torch.randn(args.batch, sizes.hidden, generator=torch.Generator().manual_seed(1)).to(
        benching.DEVICE, DTYPE
    )
    exact = in_float64(chain.programs())
    exact_layer = chain.layer(h.double(), model.layers[0], exact)
    exact_logits = chain.logits(h.double(), model, exact)

    rivals: dict[
        str, tuple[Callable[[Tensor, Layer], Tensor], Callable[[Tensor, Model], Tensor]]
    ] = {
        "ours": (partial(chain.layer, calls=calls), partial(chain.logits, calls=calls)),
        "eager": (chain.torch_layer, chain.torch_logits),
    }
    if args.compile:
        rivals["compiled"] = (
            chain.torch_layer,
            torch.compile(chain.torch_logits, mode=COMPILE, dynamic=False),
        )
    results: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Contender] = {}
    for who, (layer, logits) in rivals.items():
        try:
            with within(args.cap):
                results[who] = {"layer_error": error_of([layer(h, model.layers[0])], [exact_layer])}
                logits(h, model)
                contenders[who], last = captured_chain(
                    partial(logits, h, model), args.steps, (h, model)
                )
                contenders[who].captured.graph.replay()
                results[who]["logits_error"] = relative_error(last, exact_logits)
                if not results[who]["logits_error"] <= LOGITS_TOLERANCE:
                    raise ValueError(
                        f"wrong logits: RMS error {results[who]['logits_error']:.3g} of the "
                        "float64 result's RMS"
                    )
        except Exception as e:  # one contender that cannot run must not lose the others' numbers
            contenders.pop(who, None)
            results[who] = results.get(who, {}) | {"failed": explained(e)}
            benching.sync()
    take_turns(contenders.values(), args.rounds)
    for who, c in contenders.items():
        r = c.result()
        results[who] |= {
            "ms": r["us"] / 1e3,
            "low": r["low"] / 1e3,
            "high": r["high"] / 1e3,
            "spread": r["spread"],
            "rounds": r["rounds"],
            "share_of_bandwidth": model.weight_bytes / BYTES_PER_SECOND / r["us"] * 1e6,
        }
    return {
        "model": name,
        "batch": args.batch,
        "layers": len(model.layers),
        "weight_bytes": model.weight_bytes,
        "floor_ms": model.weight_bytes / BYTES_PER_SECOND * 1e3,
        "programs": found,
        "contenders": results,
    }


#: Like benching.TOLERANCE, after all layers: bfloat16 rounds the residual twice in each.
LOGITS_TOLERANCE = 0.15


def table(r: dict[str, Any]) -> str:
    """Return a model's numbers for the terminal."""
    lines = [
        f"{r['model']}, batch {r['batch']}, {r['layers']} layers, linears only: "
        f"{r['weight_bytes'] / 1e9:.3f} GB of weights, "
        f"floor {r['floor_ms']:.3f} ms",
        f"    {'':10}{'ms':>9}{'10%..90%':>18}{'of 4.47 TB/s':>14}"
        f"{'layer error':>13}{'logits error':>14}",
    ]
    for who, c in r["contenders"].items():
        if "ms" not in c:
            lines.append(f"    {who:10}{c['failed']}")
            continue
        between = f"{c['low']:.3f}..{c['high']:.3f}"
        lines.append(
            f"    {who:10}{c['ms']:9.3f}{between:>18}{c['share_of_bandwidth']:14.1%}"
            f"{c['layer_error']:13.2g}"
            f"{c['logits_error']:14.2g}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="llama-3.2-1b,llama-3.1-8b",
        help=f"one or more, with commas, of {', '.join(MODELS)}; "
        "biases and norms of q and k are left out",
    )
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--layers", type=int, help="a model cut down to so many layers")
    parser.add_argument(
        "--qkv",
        choices=("joined", "separate"),
        default="separate",
        help="q, k, v as three weights, as models have them, or as one",
    )
    parser.add_argument(
        "--tune", default="auto", choices=("auto", "never", "full"), help="as in mirage_hf.optimize"
    )
    parser.add_argument(
        "--searched",
        action="store_true",
        help="run searched kernels even where the library was measured faster",
    )
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave torch.compile out"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="chains in a CUDA graph, one after another"
    )
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds")
    parser.add_argument(
        "--cap", type=float, default=300.0, help="seconds that setting up one contender may take"
    )
    add_report_options(parser, "model")
    args = parser.parse_args()
    names = args.model.split(",")
    if unknown := [n for n in names if n not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(MODELS)}")
    budget = Budget(args.seconds)
    need_gpu("bench_chain")
    report = Report(args.out, vars(args), args.resume)
    with torch.no_grad():
        run_all(
            report,
            {f"{name}:{args.batch}": partial(bench, name, args) for name in names},
            budget,
            table,
        )


if __name__ == "__main__":
    main()
