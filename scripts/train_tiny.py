"""Train the test assets: a byte-level Llama of 1.9 M parameters, a LoRA and an assistant for it.

    python -m scripts.train_tiny --seconds 100         # the model, tests/assets/tiny_llama
    python -m scripts.train_tiny --lora --seconds 30   # the adapter, tests/assets/tiny_llama_lora
    python -m scripts.train_tiny --assistant --seconds 400   # tests/assets/tiny_llama_assistant

Tests compare tokens, so logits must not be noise, and the model must be really trained. The text
comes with every CPython. The model reads the language reference (`pydoc_data/topics.py`) and the
docstrings of a fixed list of standard modules. The adapter reads the code of some of them without
docstrings and comments, so its effect is plain to see. The assistant is a smaller Llama that reads
what the model reads. It drafts tokens for the model. Both texts are (c) Python Software
Foundation, under the PSF licence version 2 (https://docs.python.org/3/license.html). Another Python
version gives slightly other text.

Everything is saved as bfloat16, so loading in float32 or bfloat16 gives exactly the saved weights.
"""

import argparse
import ast
import math
import platform
import sysconfig
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ASSETS = Path(__file__).resolve().parent.parent / "tests" / "assets"

PAD, BOS, EOS = 256, 257, 258  # ids 0..255 are the bytes
SPECIALS = {"<|pad|>": PAD, "<|bos|>": BOS, "<|eos|>": EOS}
VOCAB = 260  # padded, as real models pad theirs; 259 occurs in no text

# Modules and packages whose docstrings are read. One that a Python version lacks is skipped.
PROSE = """
    abc argparse ast asyncio base64 bdb bisect bz2 calendar cmd code codecs codeop collections
    compileall concurrent configparser contextlib copy copyreg csv ctypes curses dataclasses
    datetime _pydatetime _pydecimal dbm difflib dis doctest email encodings enum filecmp
    fileinput fnmatch fractions ftplib functools getopt getpass gettext glob graphlib gzip
    hashlib heapq hmac html http imaplib importlib inspect io _pyio ipaddress json keyword
    linecache locale logging lzma mailbox mimetypes modulefinder multiprocessing netrc ntpath
    numbers operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib
    posixpath pprint profile pstats pty py_compile pyclbr pydoc queue quopri random re reprlib
    rlcompleter runpy sched secrets selectors shelve shlex shutil signal site smtplib socket
    socketserver sqlite3 ssl stat statistics string stringprep struct subprocess symtable
    sysconfig tabnanny tarfile tempfile textwrap threading timeit tkinter token tokenize tomllib
    trace traceback tracemalloc tty turtle types typing unittest urllib uuid venv warnings wave
    weakref webbrowser wsgiref xml xmlrpc
    zipapp zipfile zipimport zoneinfo
""".split()

# Modules and packages whose code the adapter reads.
CODE = """
    argparse ast asyncio calendar collections concurrent configparser contextlib dataclasses
    difflib dis email enum fractions functools heapq http importlib inspect ipaddress json
    logging mailbox multiprocessing optparse pathlib pickle shutil socket statistics subprocess
    tarfile tempfile textwrap threading traceback typing unittest urllib
    xml zipfile
""".split()


# -------------------------------------------------------------------------------------------------


def sources(names: list[str]) -> list[Path]:
    """Return the .py files of standard modules and packages, without tests, in a fixed order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for name in names:
        if (stdlib / f"{name}.py").is_file():
            files.append(stdlib / f"{name}.py")
        inside = sorted((stdlib / name).rglob("*.py"))
        files += [f for f in inside if not {"test", "tests"} & set(f.relative_to(stdlib).parts)]
    return files


def parse(file: Path) -> ast.Module:
    """Parse a file without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read_text(encoding="utf-8"))


def documented(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of a file that have docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)]


def reference_topics() -> list[str]:
    """Return the language reference, one text per topic, as `help("for")` prints it."""
    file = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    if not file.is_file():
        print(
            "pydoc_data/topics.py: not in this Python (some Linux packages strip it; a full "
            "CPython has it); going on with docstrings alone, so the English will be poorer",
            flush=True,
        )
        return []
    table = next(node.value for node in parse(file).body if isinstance(node, ast.Assign))
    return list(ast.literal_eval(table).values())


def prose() -> list[str]:
    """Return topics, then docstrings, each text once."""
    texts = reference_topics()
    for file in sources(PROSE):
        texts += [ast.get_docstring(node) for node in documented(parse(file))]
    return list(dict.fromkeys(text.strip() for text in texts))


def code() -> list[str]:
    """Return modules as code alone, without docstrings and comments."""
    texts = []
    for file in sources(CODE):
        tree = parse(file)
        for node in documented(tree):
            node.body[0].value = ast.Constant(...)
        texts.append(ast.unparse(tree))
    return list(dict.fromkeys(text for text in texts if text.strip()))


def streams(texts: list[str], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training ids and held-out ids, each text between <|bos|> and <|eos|>.

    Every twentieth is held out.
    """
    if not texts:
        raise SystemExit(
            "no text found: this Python's standard library has no .py files (is it zipped or "
            "stripped?)"
        )
    rows = [[BOS, *text.encode("utf-8"), EOS] for text in texts]
    train = [i for n, row in enumerate(rows) if n % 20 != 19 for i in row]
    held = [i for n, row in enumerate(rows) if n % 20 == 19 for i in row]
    return torch.tensor(train, dtype=torch.int16, device=device), torch.tensor(
        held, dtype=torch.int16, device=device
    )


# -------------------------------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose id b is byte b, so any UTF-8 text comes back.

    It puts <|bos|> before the text, as Llama's does.
    """
    letters = byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B:1", special_tokens=[("<|bos|>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template="{{ bos_token }}{% for m in messages %}"
        "{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )


def byte_letters() -> list[str]:
    """Return the printable character that stands for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = {b: 256 + n for n, b in enumerate(b for b in range(256) if b not in printable)}
    return [chr(shifted.get(b, b)) for b in range(256)]


#: Sizes of the model, and of the assistant. The assistant's file has less than 1 MB.
MODEL_SIZES = {
    "hidden_size": 192,
    "intermediate_size": 480,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
}
ASSISTANT_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def new_model(sizes: dict[str, int]) -> LlamaForCausalLM:
    """Return an untrained model."""
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            vocab_size=VOCAB,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


# -------------------------------------------------------------------------------------------------


def windows(
    ids: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a stream into windows."""
    cut = ids[starts[:, None] + torch.arange(context + 1, device=ids.device)].long()
    return cut[:, :-1], cut[:, 1:]


def loss_of(model, x: torch.Tensor, y: torch.Tensor, bf16: bool) -> torch.Tensor:
    """Return the loss of a batch."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        logits = model(input_ids=x, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def held_out_loss(model, held: torch.Tensor, args) -> float:
    """Return the mean over up to 128 windows, in nats a byte."""
    starts = torch.arange(0, len(held) - args.context - 1, args.context, device=held.device)[:128]
    parts = [
        loss_of(model, *windows(held, some, args.context), args.bf16) * len(some)
        for some in starts.split(16)
    ]
    return float(sum(parts) / len(starts))


def train(model, ids: torch.Tensor, held: torch.Tensor, args) -> dict:
    """Train with AdamW.

    Linear warm-up, then cosine down to zero at --steps or --seconds, whichever comes first.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    model.train()
    step, begin, recent = 0, time.monotonic(), torch.zeros((), device=ids.device)
    while (progress := max(step / args.steps, (time.monotonic() - begin) / args.seconds)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = (
                args.lr
                * min(1, (step + 1) / args.warmup)
                * 0.5
                * (1 + math.cos(math.pi * progress))
            )
        starts = torch.randint(len(ids) - args.context, (args.batch,), device=ids.device)
        loss = loss_of(model, *windows(ids, starts, args.context), args.bf16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent = loss.detach() if step == 1 else recent.lerp(loss.detach(), 0.02)
        if step % args.log_every == 0:
            print(
                f"step {step:6d}  {time.monotonic() - begin:6.0f} s  loss {recent.item():.3f}",
                flush=True,
            )
    model.eval()
    done = {
        "steps": step,
        "tokens": step * args.batch * args.context,
        "train": recent.item(),
        "held": held_out_loss(model, held, args),
    }
    print(
        f"{step} steps, loss {done['train']:.3f}, held out {done['held']:.3f} nats a byte",
        flush=True,
    )
    return done


@torch.no_grad()
def sample(model, tokenizer, prompt: str) -> str:
    """Return a sample of the model's text."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(
        **inputs, min_new_tokens=200, max_new_tokens=200, do_sample=True, temperature=0.6, top_k=0
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


# -------------------------------------------------------------------------------------------------


def write_readme(
    out: Path, what: str, text: str, args, ids: torch.Tensor, done: dict, example: str
) -> None:
    """Write the README of the assets."""
    limit = (
        f"--seconds {args.seconds:g}" if math.isfinite(args.seconds) else f"--steps {args.steps}"
    )
    kind = "--lora " * args.lora + "--assistant " * args.assistant
    flags = f"{kind}{limit} --batch {args.batch} --context {args.context}"
    flags += f" --lr {args.lr:g}"
    untrained = (
        ""
        if args.context == 1024
        else (
            f"\n- Positions from {args.context} on were never trained, though "
            "`max_position_embeddings` is 1024."
        )
    )
    amount = f"{done['tokens'] / 1e6:.1f} M bytes"
    before = f" (without the adapter {done['before']:.3f})" if args.lora else ""
    (out / "README.md").write_text(
        f"""# {out.name}
{what} Written by `scripts/train_tiny.py`.

- Text: {text} of CPython {platform.python_version()}, {len(ids) / 1e6:.2f} MB.
- Licence of the text: Python Software Foundation License version 2, © Python Software Foundation.
- Trained: {done["steps"]} steps of {args.batch} × {args.context} bytes, {amount} in all,
  on {args.device}.
- Final loss: {done["train"]:.3f} nats a byte; on texts held out {done["held"]:.3f}{before}.
- Saved as bfloat16, so float32 and bfloat16 see the same values. `from_pretrained` keeps bfloat16
  unless it is given `dtype=torch.float32`.{untrained}
- To make it again: `python -m scripts.train_tiny {flags}{" --bf16" * args.bf16}`.
  Other hardware or another Python gives other weights.

It writes (temperature 0.6):
```text
{example}
```
""",
        encoding="utf-8",
    )


def make_model(args) -> None:
    """Train and save the model, or the assistant."""
    ids, held = streams(prose(), args.device)
    sizes = ASSISTANT_SIZES if args.assistant else MODEL_SIZES
    model, tokenizer = new_model(sizes).to(args.device), byte_tokenizer()
    size = f"{model.num_parameters() / 1e6:.2f} M parameters"
    print(f"{size}, {len(ids) / 1e6:.2f} MB of text, on {args.device}", flush=True)
    done = train(model, ids, held, args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    example = sample(model, tokenizer, "The ")
    print(example)
    role = " that drafts for `tiny_llama`" if args.assistant else ""
    write_readme(
        args.out,
        f"A byte-level Llama of {size}{role}, for tests.",
        "language reference (`pydoc_data/topics.py`) and standard-library docstrings",
        args,
        ids,
        done,
        example,
    )


def make_lora(args) -> None:
    """Train and save the adapter."""
    from peft import LoraConfig, get_peft_model

    ids, held = streams(code(), args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    base = LlamaForCausalLM.from_pretrained(args.base, dtype=torch.float32).to(args.device)
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    before = held_out_loss(base, held, args)
    print(
        f"{len(ids) / 1e6:.2f} MB of text, on {args.device}; held out, without the adapter: "
        f"{before:.3f}",
        flush=True,
    )
    done = train(model, ids, held, args) | {"before": before}
    model.peft_config["default"].base_model_name_or_path = f"tests/assets/{Path(args.base).name}"
    model.to(torch.bfloat16).save_pretrained(args.out)
    example = sample(model, tokenizer, "The ")
    print(example)
    write_readme(
        args.out,
        "A rank-8 LoRA (alpha 16, every linear but the head) for `tiny_llama`, for tests.",
        "code, without docstrings and comments, of some standard modules",
        args,
        ids,
        done,
        example,
    )


def main() -> None:
    """Run the training."""
    parser = argparse.ArgumentParser(
        description="Train the tiny byte-level Llama of the tests, its LoRA, or its assistant."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--lora", action="store_true", help="train the adapter, on a model that is there already"
    )
    which.add_argument("--assistant", action="store_true", help="train the smaller model")
    parser.add_argument(
        "--out",
        type=Path,
        help="default: tests/assets/tiny_llama, tiny_llama_lora or tiny_llama_assistant",
    )
    parser.add_argument(
        "--base", type=Path, default=ASSETS / "tiny_llama", help="the model that --lora adapts"
    )
    parser.add_argument("--steps", type=int, default=20_000, help="stop after so many steps")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after so much training time"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="bytes a row, at most 1024")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="bfloat16 autocast; worth it on a CPU with AVX512-BF16 or AMX",
    )
    args = parser.parse_args()
    suffix = "_lora" * args.lora + "_assistant" * args.assistant
    args.out = args.out or ASSETS / f"tiny_llama{suffix}"
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    (make_lora if args.lora else make_model)(args)


if __name__ == "__main__":
    main()
