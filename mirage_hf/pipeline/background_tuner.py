"""The process that tunes in the background (background.py starts it).

It reads one job from standard input: programs as JSON, never code. It prints one JSON object a
line: what it does now, which kernels are stored, and why it ended. Anything else that it prints is
a warning or an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from mirage_hf.errors import MirageError, Rejected, described
from mirage_hf.graph import json_format
from mirage_hf.pipeline.layer_choice import BlockToMake, LayerResolver
from mirage_hf.settings import settings
from mirage_hf.tune import turns

#: Seconds between looks at whether the parent process lives.
_LOOK_SECONDS = 0.5


class _Speaker:
    """Sends messages to the parent process, on what was standard output."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what a library prints is no message, though it arrives in the same pipe

    def __call__(self, **message: Any) -> None:
        try:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
        except OSError:  # nobody listens any more
            os._exit(0)


def main() -> None:
    """Do the job that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; stores are atomic
    say = _Speaker()
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    torch.set_num_threads(settings().threads)
    try:
        with turns.sharing(turns.SharedTurns(job["turns"])):
            reason = tune_layers(job, say)
    except (MirageError, OSError, RuntimeError) as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
    say(end=reason)
    os._exit(0)  # compile workers may be idle, and end when their input does


def _end_with(parent: int) -> None:
    """End this process when its parent ends, whether or not that could say so."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def tune_layers(job: Mapping[str, Any], say: Any) -> str:
    """Resolve every layer of a job. Return why it ended early, or ""."""
    device = torch.device(job["device"])
    blocks = blocks_of(job["blocks"])
    number = {block: n for n, block in enumerate(blocks)}
    resolver = LayerResolver(
        device=device,
        backend=job["backend"],
        zoo=job["zoo"] or None,
        tune="auto",
        progress=lambda stage, detail: say(now=_at(detail)) if stage == "kernel" else None,
        total=len(blocks),
    )
    for layer in job["layers"]:
        before = set(resolver.found)
        made = [blocks[n] for n in layer]
        with one_tuner(device, say), resolver.searching([made]):
            resolver.resolve_layer(made)
        new = [block for block in resolver.found if block not in before]
        kernels = {block: resolver.found[block] for block in new}
        for kernel in kernels.values():
            if not isinstance(kernel, Rejected) and kernel.unkept:
                return f"a tuned kernel could not be stored: {kernel.unkept}"
        say(done=[number[b] for b, kernel in kernels.items() if not isinstance(kernel, Rejected)])
    return ""


def _at(detail: Sequence[Any]) -> str:
    number, total, pattern = detail
    return f"kernel {number} of {total}, {pattern}"


def blocks_of(rows: Sequence[Mapping[str, Any]]) -> list[BlockToMake]:
    """Return the blocks that a job describes."""
    made: dict[int, BlockToMake] = {}

    def block(n: int) -> BlockToMake:
        if n not in made:
            one = rows[n]
            made[n] = BlockToMake(
                json_format.graph_from_dict(one["program"]),
                one["pattern"],
                json_format.graph_from_dict(one["like"]) if one["like"] is not None else None,
                one["early"],
                block(one["long"]) if one["long"] is not None else None,
            )
        return made[n]

    return [block(n) for n in range(len(rows))]


@contextlib.contextmanager
def one_tuner(device: torch.device, say: Any) -> Iterator[None]:
    """Let one process at a time tune on a device. The others find its kernels in the cache."""
    name = str(device)
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    with contextlib.ExitStack() as stack:
        try:
            lock = FileLock(_lock_folder() / f"tuning-{name}.lock")
            lock.acquire(timeout=0)
        except Timeout:
            say(now="it waits for another process that tunes on this device")
            lock.acquire()
        except (OSError, NotImplementedError) as error:  # a folder without locks, or that is full
            say(now=f"it tunes without a lock ({described(error)})")
            yield
            return
        stack.callback(lock.release)
        yield


def _lock_folder() -> Path:
    folder = settings().cache_dir
    folder.mkdir(parents=True, exist_ok=True)
    return folder
