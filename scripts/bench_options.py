"""The options of `bench_generate`, and what is wrong with them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from scripts.bench_peers import (
    ASSISTED,
    ATTENTION,
    BARE,
    BATCHED,
    DRAFTED,
    LOOKUP,
    PEERS,
    PLAIN,
    PRODUCT,
)
from scripts.coded_models import FORMATS, product_of
from scripts.configs import config_of, names
from scripts.survey_images import IMAGES


def numbers(text: str) -> tuple[int, ...]:
    """Parse positive numbers with commas."""
    given = tuple(int(n) if n.strip().isdecimal() else 0 for n in text.split(","))
    if min(given) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of 1 and more, as 1 or 1,8")
    return given


def why_no_images(args: argparse.Namespace) -> str:
    """Return why prompts cannot have the images that they should have, or an empty text."""
    for name in args.model.split(","):
        config = config_of(name)
        if config.model_type not in IMAGES or not hasattr(config, "vision_config"):
            return f"--images: {name} takes no images here"
    if args.padded:
        return "--images: prompts with images are not padded"
    if min(args.prompt) <= args.images:
        return f"--images: {args.images} images need {args.images + 1} or more tokens of text"
    return ""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of all options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-3.2-1b", help=f"one or more of {', '.join(names())}, with commas"
    )
    parser.add_argument(
        "--prompt", type=numbers, default=(128,), help="tokens, one length or more with commas"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens, 2 or more")
    parser.add_argument("--batch", type=numbers, default=(1,), help="one size or more with commas")
    parser.add_argument(
        "--peers",
        type=lambda s: tuple(s.split(",")),
        default=PEERS,
        help=f"default: {','.join(PEERS)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each peer")
    parser.add_argument(
        "--cap", type=float, default=150.0, help="seconds that setting up one peer may take"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no row after this time"
    )
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="adapters of this rank on every linear (PEFT, unmerged)",
    )
    parser.add_argument(
        "--padded",
        action="store_true",
        help="prompts from the whole length down to half of it, with padding on the left",
    )
    parser.add_argument(
        "--weights",
        default="",
        choices=("", *FORMATS),
        help="the linears of the layers, or their experts, hold codes of this format",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=0,
        metavar="N",
        help="each prompt has so many random images besides its tokens of text",
    )
    parser.add_argument(
        "--times-only",
        action="store_true",
        help="profile no kernels, and compare no logits with float32",
    )
    parser.add_argument(
        "--draft",
        default="",
        metavar=f"{LOOKUP}|MODEL",
        help="where the drafts of the peers drafted and assisted come from",
    )
    parser.add_argument(
        "--draft-tokens", type=int, default=4, metavar="K", help="drafts of a step, 1 to 15"
    )
    parser.add_argument(
        "--accept", type=float, metavar="P", help="the probability that a draft is right"
    )
    parser.add_argument(
        "--adapt", action="store_true", help="let the number of drafts depend on how many are taken"
    )
    parser.add_argument("--layers", type=int, help="a model cut down to so many layers")
    parser.add_argument("--tune", default="auto", choices=("auto", "never", "full"))
    parser.add_argument(
        "--kernel-names", nargs="*", default=("mirage",), help="how names of searched kernels begin"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write all numbers there, row by row")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows that the JSON file has"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="peers one after another, their memory freed in between, if not all fit",
    )
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="set up all rows at the same time, each in a process and with weights of its own, "
        "then time one after another; the GPU needs memory for all",
    )
    parser.add_argument(
        "--long-calls",
        action="store_true",
        help="take all times of a round from one call with a streamer",
    )
    parser.add_argument("--strict", action="store_true", help="stop at a peer that fails")
    return parser


def why_wrong(args: argparse.Namespace) -> str:
    """Return why options do not fit together, or an empty text."""
    known = (
        *PEERS,
        ATTENTION,
        BATCHED,
        *([BARE] if args.lora else []),
        *([PLAIN] if args.weights else []),
        *([PRODUCT] if product_of(args.weights) else []),
        *([DRAFTED, ASSISTED] if args.draft else []),
    )
    unknown = set(args.peers) - set(known)
    if args.side_by_side and (args.apart or args.seconds < math.inf):
        return (
            "--side-by-side needs memory for all at once and ends when it ends: without --apart "
            "and --seconds"
        )
    if args.draft not in ("", LOOKUP, *names()):
        return f"--draft {args.draft}: give {LOOKUP} or one of {', '.join(names())}"
    if args.accept is not None and not (args.draft and 0 <= args.accept <= 1):
        return "--accept is a probability, and needs --draft"
    if args.images and (why := why_no_images(args)):
        return why
    if unknown:
        return f"unknown peers {', '.join(unknown)}; there are {', '.join(known)}"
    return "--new must be 2 or more" if args.new < 2 else ""
