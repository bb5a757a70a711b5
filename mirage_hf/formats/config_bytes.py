"""Say from a config how many bytes the weights of a quantized checkpoint take.

A config's `quantization_config` names the method, the bits and the groups. No library of a format
is imported, and no weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Bytes of a number in 16 bits and of one in 32 bits.
_HALF, _FLOAT = 2, 4

#: Bytes of a scale, by the format of compressed-tensors. Sparse formats are not known.
_CT_FORMATS = {
    "pack-quantized": _HALF,
    "int-quantized": _HALF,
    "float-quantized": _HALF,
    "naive-quantized": _HALF,
    "nvfp4-pack-quantized": 1,
    "mxfp4-pack-quantized": 1,
}

#: Bits of a code and bytes of the values of a block, by the class of torchao's config.
_TORCHAO = {
    "Int8WeightOnlyConfig": (8, _FLOAT),
    "Int8DynamicActivationInt8WeightConfig": (8, _FLOAT),
    "Float8WeightOnlyConfig": (8, _FLOAT),
    "Float8DynamicActivationFloat8WeightConfig": (8, _FLOAT),
    "Int4WeightOnlyConfig": (4, 2 * _HALF),
}

#: Codes of bitsandbytes that share a scale, and scales that share a second one.
_BNB_BLOCK, _BNB_SCALES = 64, 256


@dataclass(frozen=True)
class WeightLayout:
    """How a checkpoint stores the weight of a linear.

    Attributes:
        bits: Bits of a code.
        block: Outputs and inputs of the linear that share a scale. 0: all of them.
        block_bytes: Bytes of the scale and the zero point of a block.
        input_bytes: Bytes for each input besides, such as the number of its group.
    """

    bits: int
    block: tuple[int, int]
    block_bytes: float
    input_bytes: int = 0

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight with so many outputs and inputs, without its bias."""
        height, width = self.block[0] or rows, self.block[1] or columns
        blocks = math.ceil(rows / height) * math.ceil(columns / width)
        codes = rows * columns * self.bits / 8
        return math.ceil(codes + blocks * self.block_bytes + columns * self.input_bytes)

    def __str__(self) -> str:
        """Return a short text, such as "4 bits in groups of 128"."""
        height, width = self.block
        where = f"groups of {width}" if height == 1 and width else f"blocks of {height} × {width}"
        if not width:
            where = "rows" if height == 1 else "whole weights"
        return f"{self.bits} bits in {where}"


Chooses = Callable[[str], bool]


@dataclass(frozen=True)
class CheckpointLayout:
    """Which linears of a checkpoint hold codes, and how.

    Attributes:
        method: The name of the method.
        layouts: For some linears, chosen by their path, the layout of their weights.
        why_unknown: Why the bytes cannot be known from the config, or "".
    """

    method: str
    layouts: tuple[tuple[Chooses, WeightLayout], ...] = ()
    why_unknown: str = ""

    def of(self, path: str) -> WeightLayout | None:
        """Return the layout of a linear's weight, None if it holds no codes."""
        return next((layout for chooses, layout in self.layouts if chooses(path)), None)

    def __str__(self) -> str:
        """Return a text for the output of `explain`."""
        if self.why_unknown:
            return (
                f"quantized by {self.method}: {self.why_unknown}, "
                "so weights are counted as if they were not quantized"
            )
        kinds = " and ".join(dict.fromkeys(str(layout) for _, layout in self.layouts))
        return f"quantized by {self.method}: {kinds}; MB are those of codes, scales and zero points"


def checkpoint_layout(config: Any, head: str = "lm_head") -> CheckpointLayout | None:
    """Return how the checkpoint of a config stores its weights, None if it is not quantized.

    Args:
        config: The config of a model of transformers.
        head: The path of the head, which most methods leave out unless the config names it.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    settings: Mapping[str, Any] = given if isinstance(given, Mapping) else given.to_dict()
    method = _text(settings.get("quant_method")) or "an unnamed method"
    if method == "an unnamed method" and "load_in_4bit" in settings:
        method = "bitsandbytes"
    reader = _METHODS.get(method)
    if reader is None:
        return CheckpointLayout(method, why_unknown="its config is not read")
    try:
        found = reader(settings, head)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"its config has another form ({type(error).__name__}: {error})"
    if isinstance(found, str):
        return CheckpointLayout(method, why_unknown=found)
    return CheckpointLayout(method, tuple(found))


Found = list[tuple[Chooses, WeightLayout]]


def _compressed_tensors(settings: Mapping[str, Any], head: str) -> Found | str:
    ignored = _names(settings.get("ignore"))
    found: Found = []
    for group in settings["config_groups"].values():
        args = group["weights"]
        if args is None:
            continue
        name = _text(group.get("format") or settings.get("format"))
        if name not in _CT_FORMATS:
            return f"the bytes of its format {name} are not known"
        scale, bits = _CT_FORMATS[name], args["num_bits"]
        blocks: dict[str, Any] = {
            "group": (1, args.get("group_size")),
            "tensor_group": (1, args.get("group_size")),
            "block": args.get("block_structure"),
            "channel": (1, 0),
            "tensor": (0, 0),
        }
        strategy = _text(args.get("strategy")) or ("group" if args.get("group_size") else "tensor")
        if blocks.get(strategy) is None:
            return f"the groups of its strategy {strategy} are not known"
        height, width = map(int, blocks[strategy])
        zero = 0 if args.get("symmetric", True) else bits / 8 if name == "pack-quantized" else 1
        layout = WeightLayout(bits, (height, width), scale + zero)
        found.append((_chooser(_names(group["targets"]), ignored), layout))
    return found


def _fp8(settings: Mapping[str, Any], head: str) -> Found | str:
    height, width = settings.get("weight_block_size") or (0, 0)
    return [(_except(settings, head), WeightLayout(8, (height, width), _FLOAT))]


def _gptq(settings: Mapping[str, Any], head: str) -> Found | str:
    if settings.get("dynamic"):
        return "its config gives modules settings of their own"
    bits, group = settings["bits"], max(0, settings["group_size"])
    # every input has the number of its group
    layout = WeightLayout(bits, (1, group), _HALF + bits / 8, 4)
    inside = [
        name for names in settings.get("modules_in_block_to_quantize") or [] for name in names
    ]
    left_out = [] if settings.get("lm_head") else [head]

    def chooses(path: str) -> bool:
        named = not inside or any(path.endswith(f".{name}") for name in inside)
        return named and path not in left_out

    return [(chooses, layout)]


def _awq(settings: Mapping[str, Any], head: str) -> Found | str:
    bits = settings.get("bits") or settings["w_bit"]
    group = max(0, settings.get("group_size") or settings["q_group_size"])
    return [(_except(settings, head), WeightLayout(bits, (1, group), _HALF + bits / 8))]


def _bitsandbytes(settings: Mapping[str, Any], head: str) -> Found | str:
    chooses = _except(settings, head, "llm_int8_skip_modules")
    if not (settings.get("load_in_4bit") or settings.get("_load_in_4bit")):
        return [(chooses, WeightLayout(8, (1, 0), _FLOAT))]
    twice = settings.get("bnb_4bit_use_double_quant")
    scale = 1 + _FLOAT / _BNB_SCALES if twice else _FLOAT
    # a block is 64 codes of the flat weight
    return [(chooses, WeightLayout(4, (1, _BNB_BLOCK), scale))]


def _hqq(settings: Mapping[str, Any], head: str) -> Found | str:
    args = settings["quant_config"].get("weight_quant_params")
    if args is None:
        return "its config gives modules settings of their own"
    bits, group, axis = args["nbits"], args.get("group_size") or 0, args.get("axis", 1)
    if bits == 3:
        return "words of codes of 3 bits have bits that no code has"
    block = (1, group) if axis == 1 else (group, 1)
    return [(_except(settings, head, "skip_modules"), WeightLayout(bits, block, 2 * _HALF))]


def _torchao(settings: Mapping[str, Any], head: str) -> Found | str:
    kinds = settings["quant_type"]
    kind = kinds.get("default") if isinstance(kinds, Mapping) else None
    if not isinstance(kind, Mapping) or len(kinds) > 1:
        return "its config names no one kind of weight"
    name = kind.get("_type")
    if name not in _TORCHAO:
        return f"the bytes of {name} are not known"
    bits, values = _TORCHAO[name]
    given = kind.get("_data") or {}
    group = given.get("group_size", 128 if bits == 4 else 0) or 0
    granularity = str(given.get("granularity") or "PerRow")
    if "PerRow" not in granularity and "PerTensor" not in granularity:
        return f"the groups of its granularity {granularity} are not known"
    block = (1, group) if "PerRow" in granularity else (0, 0)
    return [(_except(settings, head), WeightLayout(bits, block, values))]


_METHODS: dict[str, Callable[[Mapping[str, Any], str], Found | str]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "torchao": _torchao,
}


# -- which linears --------------------------------------------------------------------------------


def _except(settings: Mapping[str, Any], head: str, key: str = "modules_to_not_convert") -> Chooses:
    """Choose all linears except those that transformers does not convert."""
    names = settings.get(key)
    left_out = [head] if names is None else _names(names)

    def chooses(path: str) -> bool:
        return not any(re.match(name, path) or path.endswith(name) for name in left_out)

    return chooses


def _chooser(targets: Iterable[str], ignored: Iterable[str]) -> Chooses:
    """Choose linears by the names or patterns that compressed-tensors gives."""

    def is_one_of(path: str, names: Iterable[str]) -> bool:
        return any(
            re.match(name[3:], path) is not None if name.startswith("re:") else name == path
            for name in names
        )

    def chooses(path: str) -> bool:
        is_target = "Linear" in targets or is_one_of(path, targets)
        return is_target and not is_one_of(path, ignored)

    return chooses


def _names(given: Any) -> list[str]:
    return [str(name) for name in given or ()]


def _text(x: Any) -> str:
    """Return the text of a name, which may be an enum."""
    return str(getattr(x, "value", x) or "")
