"""Load a model from a folder or a Hub id, on a device and ready to generate."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.ops import table

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "tiny_llama"
_IN_CHECKOUT = _PACKAGE.parent / "tests" / "assets" / "tiny_llama"
#: The demo's model: inside the package once installed, and among the tests in a checkout.
DEMO_MODEL = _INSTALLED if _INSTALLED.is_dir() else _IN_CHECKOUT

#: The files in a model's folder that it is loaded from.
FILES = (
    "*config.json",
    "*.safetensors*",
    "*.bin*",
    "*token*",
    "*vocab*",
    "merges.txt",
    "*template*",
    "*.model",
    "*.py",
)


@dataclass(frozen=True)
class Loaded:
    """A causal language model, and if there is a prompt, its tokenizer and the prompt."""

    model: Any
    tokenizer: Any
    inputs: dict[str, torch.Tensor]
    prompt: str

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def generate(self, tokens: int, **options: Any) -> torch.Tensor:
        """Return `tokens` new greedy tokens of every row.

        Raises:
            MirageError: The prompt has no tokens.
        """
        if not self.inputs["input_ids"].numel():
            raise errors.MirageError(
                f"the tokenizer makes no tokens of the prompt {self.prompt!r}; "
                "give another with --prompt, or check the tokenizer in the model's folder"
            )
        ids = self.model.generate(**self.inputs, max_new_tokens=tokens, do_sample=False, **options)
        return ids[:, self.inputs["input_ids"].shape[1] :]

    @property
    def report(self) -> Any:
        """The report of optimize().

        Raises:
            MirageError: optimize() replaced nothing. A warning has said why.
        """
        if "mirage" not in self.model.__dict__:
            raise errors.MirageError(
                "nothing in this model was replaced, it runs as before; the warning above says why"
            )
        return self.model.mirage.report

    def text(self, ids: torch.Tensor) -> str:
        """Return the text of the first row of tokens."""
        return self.tokenizer.decode(ids[0], skip_special_tokens=True)


def demo_model() -> str:
    """Return the folder of the demo's model.

    Raises:
        MirageError: The installed package is incomplete.
    """
    if not DEMO_MODEL.is_dir():
        raise errors.MirageError(
            f"demo: its small model is missing, it should be in {DEMO_MODEL}; install the package "
            "again, or give a model: mirage-hf demo --model FOLDER-OR-HUB-ID"
        )
    return str(DEMO_MODEL)


def _place(device: str | None) -> torch.device:
    """Return a device by name.

    Raises:
        MirageError: This machine has no such device, or kernels do not run on it.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cuda", "cpu") or (index and not index.isdecimal()):
        raise errors.MirageError(
            f"--device {device}: kernels run on NVIDIA GPUs and on the CPU; use cuda, cuda:1 or cpu"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise errors.MirageError(
            f"--device {device}: torch sees no GPU here; leave it out, or use --device cpu"
        )
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise errors.MirageError(
            f"--device {device}: torch sees {torch.cuda.device_count()} GPUs here, "
            "which are numbered from 0"
        )
    return torch.device(device)


def _of_transformers(name: str, what: str, way_out: str, load: Callable[[], Any]) -> Any:
    """Call `load` and return its result.

    Raises:
        MirageError: It failed. The message has transformers' reason in one line.
    """
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError) as e:
        reason = textwrap.shorten(str(e), 300, placeholder=" …") or type(e).__name__
        raise errors.MirageError(f"{name}: {what} ({reason}); {way_out}") from e


def load(
    name: str,
    prompt: str | None,
    batch: int = 1,
    device: str | None = None,
    dtype: str | None = None,
) -> Loaded:
    """Load a model in eval mode.

    Args:
        name: A folder or a Hub id.
        prompt: The text that it continues. None: the tokenizer is not loaded.
        batch: How often the prompt is repeated.
        device: The device, as `--device` takes it.
        dtype: The dtype of weights. None: float32 on a CPU, the checkpoint's own on a GPU.

    Raises:
        MirageError: The model cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = _place(device)
    wanted = _dtype(dtype, place)
    looks_like_folder = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_folder and not Path(name).is_dir():  # the Hub's server is not asked
        raise errors.MirageError(
            f"{name}: there is no such folder; give a model's folder or a Hub id (owner/name)"
        )
    no_model = "cannot be loaded as a causal language model", "give a folder or a Hub id"
    _of_transformers(name, *no_model, lambda: AutoConfig.from_pretrained(name))
    tokenizer = None
    if prompt is not None:
        tokenizer = _of_transformers(
            name,
            "has no tokenizer that can be loaded",
            "put one beside the model: tokenizer.save_pretrained(FOLDER)",
            lambda: AutoTokenizer.from_pretrained(name),
        )
    model = _of_transformers(
        name, *no_model, lambda: AutoModelForCausalLM.from_pretrained(name, dtype=wanted)
    )
    model = model.to(place).eval()
    inputs: dict[str, Any] = {}
    if tokenizer:
        prompts = [prompt] * batch
        tokens = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
        inputs = dict(tokens.to(place))
    return Loaded(model, tokenizer, inputs, prompt or "")


def of_config(name: str, dtype: str) -> Any:
    """Return a model on the meta device, without weights, from its config alone.

    Args:
        name: A folder or a Hub id, whose config is read.
        dtype: The dtype of weights. bfloat16 if it is empty.

    Raises:
        MirageError: There is no config, or no model of its type.
    """
    from transformers import AutoConfig

    from mirage_hf.decode import meta_model

    wanted = _dtype(dtype or "bfloat16", torch.device("cpu"))
    way_out = "cannot be built from its config", "give a folder or a Hub id"
    config = _of_transformers(name, *way_out, lambda: AutoConfig.from_pretrained(name))
    return _of_transformers(name, *way_out, lambda: meta_model(config, wanted))


def _dtype(name: str | None, place: torch.device) -> Any:
    """Return the dtype to load weights in. "auto" is the checkpoint's own.

    Raises:
        MirageError: It is no floating-point dtype of kernels.
    """
    if not name:
        return torch.float32 if place.type == "cpu" else "auto"
    dtype = table.DTYPES.get(name.removeprefix("torch."))
    if dtype is None or not dtype.is_floating_point:
        raise errors.MirageError(f"--dtype {name}: models are run in float16, bfloat16 or float32")
    return dtype
