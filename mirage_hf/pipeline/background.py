"""Tune kernels in another process while a model is used, and say when better ones are there.

The process (background_tuner.py) has an interpreter of its own and low priority. It resolves the
layers' blocks as `optimize(tune="auto")` does, and stores each kernel in the user's cache. So
nothing is lost if it is killed. It ends with this process, however this process ends, and with
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mirage_hf.errors import Rejected, described
from mirage_hf.graph import json_format
from mirage_hf.pipeline import resolver
from mirage_hf.pipeline.layer_choice import BlockToMake
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.settings import settings
from mirage_hf.tune.turns import SharedTurns

#: Starts the tuner: with this process's import path, and low priority from the first import on.
#: It imports the stages up to `pipeline`. What `mirage_hf/__init__.py` imports, transformers among
#: it, would take more time than they do.
START = (
    "import json, os, sys, types; os.nice(19); sys.path[:] = json.loads(sys.argv[1]); "
    "package = sys.modules['mirage_hf'] = types.ModuleType('mirage_hf'); "
    "package.__path__ = [sys.argv[2]]; "
    "from mirage_hf.pipeline.background_tuner import main; main()"
)

#: The folder of the package.
_PACKAGE = str(Path(__file__).resolve().parent.parent)

#: Puts kernels that were measured in the place of those that run. Returns how many blocks run
#: another kernel now, or why none does.
ReplaceKernels = Callable[[Mapping[BlockToMake, Resolved]], "int | Rejected"]

#: Seconds that the tuner has to end before it is killed.
_END_SECONDS = 1.0

#: How much of what a tuner printed before it died is quoted.
_MOST_CHARACTERS = 200


class BackgroundTuning:
    """The tuner of one model.

    Calls of the model are wrapped in `call`. Between two of them, better kernels are put in place.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[BlockToMake]],
        *,
        device: torch.device,
        backend: str,
        zoo: str | Path | Sequence[str | Path] | None,
        replace: ReplaceKernels,
    ):
        """Prepare a tuner. `start` starts it.

        Args:
            layers: The blocks to tune. Those of one layer are chosen together.
            device: Where they run.
            backend: As for `resolve`.
            zoo: As for `resolve`.
            replace: Puts better kernels in place. It is called between calls, in a thread of its
                own, so no context of the caller's thread (such as autocast) holds there.
        """
        self._layers = layers
        #: None once nothing is left to replace, so that nothing here holds the model.
        self._replace: ReplaceKernels | None = replace
        self._options: dict[str, Any] = dict(device=device, backend=backend, zoo=zoo)
        self.blocks = _distinct(layers)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._owner = os.getpid()
        self._gate = threading.Lock()
        self._is_replacing = False
        self._ready: dict[BlockToMake, Resolved] = {}
        self._now = "it starts"
        self._is_over = False
        self._measured = self._replaced = 0
        self._stopped: list[str] = []
        self._ended = ""
        self._notes: list[str] = []
        self.turns: SharedTurns | None = None

    # -- the process

    def start(self) -> None:
        """Start the tuner. If that fails, `status` has the reason."""
        try:
            self.turns = SharedTurns()
            try:
                self._process = self._begin()
            finally:
                os.close(self.turns.handle)  # the tuner has its own, and the memory stays mapped
        except (OSError, ValueError) as e:
            self.turns, self._replace, self._is_over = None, None, True
            self._ended = f"it could not be started ({described(e)})"
            return
        # neither of them holds this object, which ends with its model
        weakref.finalize(self, _end, self._process, os.getpid())
        job = json.dumps(self._job()) + "\n"
        arguments = (weakref.ref(self), self._process, self.turns, job)
        self._reader = threading.Thread(
            target=_read, args=arguments, name="mirage_hf tuner", daemon=True
        )
        self._reader.start()

    def _begin(self) -> subprocess.Popen[str]:
        assert self.turns is not None
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("sys.executable names no Python interpreter")
        path = json.dumps([p for p in sys.path if isinstance(p, str)])
        threads = max(1, settings().threads // 2)
        return subprocess.Popen(
            [sys.executable, "-c", START, path, _PACKAGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "MIRAGE_HF_THREADS": str(threads)},
            pass_fds=(self.turns.handle,),
        )

    def _job(self) -> dict[str, Any]:
        """Return what the tuner is asked to do, as plain data."""
        assert self.turns is not None
        number = {block: n for n, block in enumerate(self.blocks)}
        zoo = self._options["zoo"]
        zoos = [zoo] if isinstance(zoo, (str, Path)) else list(zoo or ())
        return {
            "parent": os.getpid(),
            "turns": self.turns.handle,
            "device": str(self._options["device"]),
            "backend": self._options["backend"],
            "zoo": [str(z) for z in zoos],
            "blocks": [
                {
                    "program": json_format.graph_to_dict(block.program),
                    "like": json_format.graph_to_dict(block.like) if block.like else None,
                    "pattern": block.pattern,
                    "early": block.next_may_launch_early,
                    "long": number[block.for_long_caches] if block.for_long_caches else None,
                }
                for block in self.blocks
            ],
            "layers": [[number[block] for block in layer] for layer in self._layers],
        }

    def _take(self, message: Mapping[str, Any]) -> None:
        """Note one message of the tuner."""
        if "now" in message:
            self._now = str(message["now"])
        if "end" in message:
            self._ended = str(message["end"])
        for n in message.get("done", ()):
            block = self.blocks[n]
            kernel = resolver.look_up(
                block.program, next_may_launch_early=block.next_may_launch_early, **self._options
            )
            self._measured += 1
            if isinstance(kernel, Resolved):
                with self._gate:
                    self._ready[block] = kernel
            else:
                self._note(f"a kernel that was tuned is not in the cache ({kernel.reason})")

    def _has_ended(self, code: int, last: str) -> None:
        """Note that the tuner has ended: its exit code, and what it printed last."""
        if self._stopped:
            self._ended = self._stopped[0]
        elif not self._ended:
            self._ended = _how_it_ended(code, last)
        self._is_over = True
        if not self._ready:
            self._replace = None

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def stop(self, reason: str = "the model was restored") -> None:
        """End the tuner. What it has stored stays."""
        if self._process is not None and os.getpid() == self._owner and not self._is_over:
            self._stopped.append(reason)
            _end(self._process, self._owner)

    # -- calls of the model

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Wrap a call of the model: kernels are not replaced and not measured while it lasts."""
        turns = self.turns
        if turns is None:
            yield
            return
        with self._gate:
            if not turns.calls:
                self._put_in_place()
            turns.begin_call()
        try:
            yield
        except KeyboardInterrupt:  # in a notebook only this process is interrupted
            self.stop("it was interrupted")
            raise
        finally:
            turns.end_call()

    def forward_begins(self) -> None:
        """Note a forward of the model that is no part of `generate`."""
        turns = self.turns
        if turns is None or turns.calls or self._is_replacing:
            return
        if self._ready and not _is_capturing():
            with self._gate:
                if not turns.calls:
                    self._put_in_place()
        turns.note_forward()

    def _put_in_place(self) -> None:
        """Replace the kernels for which better ones are ready."""
        if not self._ready:
            return
        ready, self._ready = self._ready, {}
        self._is_replacing = True
        worker = threading.Thread(target=self._replace_all, args=(ready,), daemon=True)
        try:
            worker.start()
            _join(worker)
        finally:
            self._is_replacing = False
            if self._is_over:
                self._replace = None

    def _replace_all(self, ready: Mapping[BlockToMake, Resolved]) -> None:
        assert self._replace is not None
        try:
            outcome = self._replace(ready)
        except Exception as e:  # the kernels that ran before still run
            outcome = Rejected(described(e))
        if isinstance(outcome, Rejected):
            self._note(f"measured kernels were not put in place: {outcome.reason}")
        else:
            self._replaced += outcome

    # -- the report

    def wait(self, seconds: float) -> bool:
        """Wait until the tuner has ended, for at most so long. Return whether it has."""
        if self._reader is not None:
            self._reader.join(seconds)
        return self._reader is None or not self._reader.is_alive()

    @property
    def status(self) -> str:
        """What the tuner does, or how it ended, in a line."""
        total = len(self.blocks)
        if not self._is_over:
            state = f"goes on ({self._now})"
        elif self._ended:
            state = f"ended early: {self._ended}"
        else:
            state = "is done"
        counts = (
            f"{self._measured} of {total} kernels are tuned, {self._replaced} blocks run new ones"
        )
        waiting = f", {len(self._ready)} wait for the next call" if self._ready else ""
        return "; ".join([f"tuning in the background {state}: {counts}{waiting}", *self._notes])


def _read(
    weak: weakref.ref[BackgroundTuning],
    process: subprocess.Popen[str],
    turns: SharedTurns,
    job: str,
) -> None:
    """Give a tuner its job, and read what it says until it ends."""
    assert process.stdin is not None and process.stdout is not None
    last = ""
    with contextlib.suppress(OSError, ValueError):  # if it ended at once, its output says why
        process.stdin.write(job)  # waits until the tuner has started, if the job is long
        process.stdin.flush()
    with contextlib.suppress(OSError, ValueError):
        for line in process.stdout:
            message = _message(line)
            if message is None:  # a warning, or the traceback of what ended it
                last = line.strip() or last
            elif (tuning := weak()) is not None:
                try:
                    tuning._take(message)
                except Exception as e:  # reading goes on, else the tuner would wait for ever
                    tuning._note(f"a tuned kernel could not be used ({described(e)})")
                del tuning
    code = process.wait()
    turns.tuner_has_ended()
    if (tuning := weak()) is not None:
        tuning._has_ended(code, last)


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """End a tuner, unless this process is a fork of its owner."""
    if os.getpid() != owner or process.poll() is not None:
        return
    with contextlib.suppress(OSError):
        process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _distinct(layers: Sequence[Sequence[BlockToMake]]) -> list[BlockToMake]:
    """Return every block once, those for long caches included."""
    blocks = [block for layer in layers for block in layer]
    return list(
        dict.fromkeys(
            one for block in blocks for one in (block, block.for_long_caches) if one is not None
        )
    )


def _is_capturing() -> bool:
    """Return whether the caller captures a CUDA graph, during which kernels must not be checked."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _message(line: str) -> Mapping[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _how_it_ended(code: int, last: str) -> str:
    """Return why a tuner ended, by its exit code. Empty if its work was done."""
    if not code:
        return ""
    if code == -signal.SIGINT:
        return "it was interrupted"
    if code < 0:
        return f"it was killed by signal {-code}"
    return f"it failed with exit code {code} ({last[:_MOST_CHARACTERS]})"


def _join(worker: threading.Thread) -> None:
    """Wait for a thread. An interrupt is raised after the thread has ended."""
    interrupt: BaseException | None = None
    while worker.is_alive():
        try:
            worker.join()
        except KeyboardInterrupt as e:
            interrupt = e
    if interrupt is not None:
        raise interrupt
