"""Ranks that prepare data: what `tests/engine/data/test_data_ranks.py` starts.

Preparing needs no process group, so most of these ranks have none and start in no time.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import psutil
import torch

from engine import families
from engine.data.encode import tensor_cache as cache_module
from engine.data.prepare import Prepared, prepare, view_number
from engine.ranks.team import FileBarrier, StoppedError
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import run_rank
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.run_context import run_context
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


HELD: Final = 3  # by number


class Counting:
    """A family that counts what it encodes.

    Args:
        holds: `texts` or `pictures`: the third of them is not done until a stop is asked for.
        asked: Whether it is.
        met: Whether the first of a kind may be done.
    """

    def __init__(
        self, holds: str | None, asked: Callable[[], bool], met: Callable[[str], bool]
    ) -> None:
        self._family = families.load("flux")
        self._holds = holds
        self._asked = asked
        self._met = met
        self.texts: list[str] = []
        self.pictures = 0
        self.loaded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def encode(
        self, pipeline: Any, text: str, length: int, **names: Any
    ) -> dict[str, torch.Tensor]:
        self.texts.append(text)
        self._wait("texts", len(self.texts))
        return self._family.encode(pipeline, text, length, **names)

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        self.pictures += 1
        self._wait("pictures", self.pictures)
        return self._family.encode_pictures(vae, pixels)

    def _wait(self, kind: str, number: int) -> None:
        while number == 1 and not self._met(kind):
            time.sleep(0.01)
        while number == HELD and self._holds == kind and not self._asked():
            time.sleep(0.01)

    def load_text_pipeline(self, *words: Any, **names: Any) -> Any:
        self.loaded.append("text")
        return self._family.load_text_pipeline(*words, **names)

    def load_vae(self, *words: Any) -> Any:
        self.loaded.append("vae")
        return self._family.load_vae(*words)


def fill(
    rank: int, ranks: int, values: dict[str, Any], root: Path, token: str, options: dict[str, Any]
) -> None:
    """Prepare, and write down what this rank did: `TOKEN-RANK.json`.

    Args:
        options: `holds`, as `Counting` has it, and `holder`, the one rank that does (default: all
            do); `together`, where each rank's first text and picture wait for those of the others;
            `dies` after so many files, by SIGKILL, with the next one half written; `sees`, the one
            rank that sees a wish to stop (default: all do).
    """
    torch.set_num_threads(1)
    run_dir = RunDir(root)
    run_dir.create()
    spec = load_spec(None, values)
    world = World(rank, ranks, torch.device("cpu"), "ddp", token)
    telemetry = Telemetry(run_dir, rank)
    holds = options.get("holds") if rank == options.get("holder", rank) else None

    def met(kind: str) -> bool:
        """Whether all ranks have begun with this kind of thing, as this one has."""
        (root / f"{token}-{kind}.{rank}").touch()
        return len(list(root.glob(f"{token}-{kind}.*"))) == ranks

    family = Counting(
        holds, lambda: run_dir.requested("stop"), met if "together" in options else lambda _: True
    )
    if "dies" in options and rank == ranks - 1:
        die_after(options["dies"])
    before = psutil.Process().memory_info().rss
    barrier = FileBarrier(run_dir, token, rank, ranks)
    sees = options.get("sees", rank) == rank
    facts: dict[str, Any] = {}
    try:
        data = prepare(
            run_context(
                spec,
                run_dir,
                world,
                telemetry,
                family=family,
                barrier=barrier,
                stop_requested=lambda: sees and run_dir.requested("stop"),
            )
        )
    except StoppedError as stopped:
        facts |= {"stopped": str(stopped)}
    else:
        facts["digest"] = digest(data)
    gc.collect()
    facts |= {
        "texts": family.texts,
        "pictures": family.pictures,
        "loaded": family.loaded,
        "left": left_in_memory(),
        "grown": psutil.Process().memory_info().rss - before,
    }
    (root / f"{token}-{rank}.json").write_text(json.dumps(facts))
    telemetry.close()


def left_in_memory() -> list[str]:
    """Every parameter, every module that has some, and every larger tensor that is alive."""
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.nn.Module) and any(True for _ in thing.parameters()):
            found.append(kind.__name__)
        elif issubclass(kind, torch.nn.Parameter):
            found.append(f"parameter {tuple(thing.shape)}")
        elif issubclass(kind, torch.Tensor) and thing.numel() >= 1000:
            found.append(f"tensor {tuple(thing.shape)}")
    return found


def digest(data: Prepared) -> str:
    """A text that depends on everything that was prepared, and on which picture is drawn when
    and with which caption.
    """
    order, total = hashlib.sha256(), 0.0
    for step in range(data.spec.max_train_steps):
        for draw in data.plan.draws(step):
            key = data.latent_keys(draw.sample, view_number(draw, data.spec))
            order.update(f"{key} {data.caption_of(draw)}\n".encode())
            total += float(data.latents_of(draw).double().abs().sum())
            for tensor in data.texts.encoded(data.caption_of(draw)).values():
                total += float(tensor.double().abs().sum())
    return f"{order.hexdigest()} {total!r}"


def die_after(files: int) -> None:
    """Kill this process when it is about to put one more file in place."""
    count = 0
    stock = os.replace

    class Deadly:
        """`os` with a `replace` that kills."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def replace(self, source: Any, target: Any) -> None:
            nonlocal count
            count += 1
            if count > files:
                os.kill(os.getpid(), signal.SIGKILL)
            stock(source, target)

    cache_module.os = Deadly()  # type: ignore[assignment]


def train(
    rank: int, ranks: int, values: dict[str, Any], root: Path, options: dict[str, Any]
) -> None:
    """Run a whole job among ranks with a process group.

    Args:
        options: `delay` seconds by which the last rank prepares late; `each` seconds that all
            ranks take for each text.
    """
    torch.set_num_threads(1)
    run_dir = RunDir(root)
    run_dir.create()
    from engine.data.encode import texts

    stock = texts._encode
    in_step = load_spec(None, values).shard_text_encoders
    begun, waits = root / "late", root / "waits"

    def late(*words: Any) -> dict[str, torch.Tensor]:
        texts._encode = stock
        begun.touch()
        if not in_step:
            eventually(waits.exists)
        time.sleep(options["delay"])
        return stock(*words)

    def leaves_one(*words: Any) -> dict[str, torch.Tensor]:
        """Of the texts, so that the one that is late has one to be late with."""
        texts._encode = stock
        waits.touch()
        eventually(begun.exists)
        return stock(*words)

    def slow(*words: Any) -> dict[str, torch.Tensor]:
        time.sleep(options["each"])
        return stock(*words)

    if "each" in options:
        texts._encode = slow
    elif rank == ranks - 1:
        texts._encode = late
    elif not in_step:
        texts._encode = leaves_one
    telemetry = Telemetry(run_dir, rank)
    run_rank(run_dir, telemetry)
    telemetry.close()
