"""What the ranks of `test_text_encoders.py` do; many things, as starting them is slow."""

from __future__ import annotations

import gc
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from engine.families import load
from engine.model.files.weights import local_part
from engine.model.packing import Packing
from engine.model.release import Watch
from engine.model.text_encoders import (
    encoder_group,
    load_sharded,
    load_whole,
    text_pipeline,
)
from engine.ranks.world import World
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from engine.model.release import Released

flux = load("flux")

PROMPTS = ("a red circle", "two blue squares on a green field", "")
WIDE = (2048, 512)  # the shape of a tensor that only the wide T5 has
EXACT = (torch.float32, torch.bfloat16)
DEFAULT_TIMEOUT, SLEEP = 2, 6  # seconds


def on_rank(rank: int, ranks: int, toy: Path, shared: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{shared}/meet{ranks}", rank=rank, world_size=ranks)
    world = World(rank, ranks, torch.device("cpu"), "ddp", "t")
    found: dict[str, Any] = {}
    with torch.no_grad():
        for dtype in EXACT if ranks == 2 else EXACT[:1]:
            check_prompts(toy / "model", dtype, world)
        if ranks == 2:
            for case in sorted((shared / "cases").iterdir()):
                found[case.name] = check_case(case, world)
            found["wide"] = check_wide(shared / "wide", world)
            found["kept"] = keep_a_block(toy / "model", world)
            found["late"] = come_late(toy / "model", world, shared / "rank 0 waits")
    (shared / f"found{ranks}-{rank}.json").write_text(json.dumps(found))
    if ranks == 4:
        dist.destroy_process_group()


def encode_prompts(root: Path, dtype: torch.dtype, world: World, *, sharded: bool) -> list[Any]:
    with text_pipeline(flux, root, dtype, world, sharded=sharded) as pipeline:
        assert pipeline._execution_device == pipeline.device == world.device
        assert all_sharded(pipeline.text_encoder) == sharded
        assert all_sharded(pipeline.text_encoder_2) == sharded
        encoded = [flux.encode(pipeline, prompt, 16) for prompt in PROMPTS]
    assert pipeline.text_encoder is pipeline.text_encoder_2 is None
    return encoded


def all_sharded(encoder: torch.nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in encoder.parameters())


def check_prompts(root: Path, dtype: torch.dtype, world: World) -> None:
    ours = encode_prompts(root, dtype, world, sharded=True)
    stock = encode_prompts(root, dtype, world, sharded=False)
    for mine, expected in zip(ours, stock, strict=True):
        assert mine.keys() == expected.keys()
        for name in mine:
            assert torch.equal(mine[name], expected[name]), (dtype, name)
    assert not torch.equal(ours[0]["prompt_embeds"], ours[1]["prompt_embeds"])


def check_case(root: Path, world: World) -> dict[str, Any]:
    """One encoder, sharded, against `from_pretrained`: all hidden states."""
    class_name = json.loads((root / "model_index.json").read_text())["text_encoder"][1]
    tokens = torch.tensor([[5, 7, 11, 13, 17, 2]])
    given = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "output_hidden_states": True,
    }
    lines: list[str] = []
    # T5 keeps a third of itself in fp32 under fp16 (transformers 5.0: under bf16 too).
    for dtype in (*EXACT, torch.float16) if "T5" in class_name else EXACT:
        stock = getattr(transformers, class_name).from_pretrained(
            root / "text_encoder", dtype=dtype
        )
        expected = stock(**given)
        with encoder_group(world) as mesh:
            ours = load_sharded(root, dtype, world, mesh, say=lines.append)["text_encoder"]
            here = [local_part(p).numel() for p in ours.parameters()]
            whole = sum(p.numel() for p in ours.parameters())
            assert 0.4 < sum(here) / whole < 0.6, class_name
            got, watch = ours(**given), Watch({class_name: ours})
            del ours
        assert len(got.hidden_states) == len(expected.hidden_states) > 2, class_name
        for mine, theirs in zip(tensors_of(got), tensors_of(expected), strict=True):
            if dtype is torch.float32:
                # Some processors round by where in memory a weight begins; in a file: anywhere.
                torch.testing.assert_close(mine, theirs)
            else:
                assert torch.equal(mine, theirs), (class_name, dtype)
    assert not watch.still_held()
    if "experts" not in str(root):
        packing = Packing("int8")
        whole = load_whole(root, torch.float32, world.device, packing=packing)["text_encoder"]
        with encoder_group(world) as mesh:
            shards = load_sharded(root, torch.float32, world, mesh, packing=packing)
            mine, theirs = shards["text_encoder"](**given), whole(**given)
            torch.testing.assert_close(mine.hidden_states, theirs.hidden_states)
            assert not torch.equal(mine.hidden_states[-1], expected.hidden_states[-1])
            del shards
    return {"lines": lines}


def tensors_of(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if not isinstance(output, (tuple, dict)):  # a cache
        return []
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in tensors_of(part)]


def check_wide(root: Path, world: World) -> dict[str, Any]:
    """What is read, held, and left of an encoder that is large beside its surroundings."""
    found: dict[str, Any] = {}
    with encoder_group(world) as mesh:
        before, moved = bytes_read(), list[int]()
        encoders = load_sharded(root, torch.float32, world, mesh, progress=moved.append)
        found["read"] = bytes_read() - before
        found["progress"] = moved == list(range(1, len(moved) + 1)) and len(moved) > 50
        parameters = [p for encoder in encoders.values() for p in encoder.parameters()]
        found["here"] = sum(local_part(p).numel() for p in parameters)
        found["whole"] = sum(p.numel() for p in parameters)
        del encoders, parameters
    for sharded in (True, False):
        memory: list[Released] = []
        with text_pipeline(
            flux, root, torch.float32, world, sharded=sharded, freed=memory.append
        ) as pipeline:
            flux.encode(pipeline, PROMPTS[0], 16)
            assert live_wide_tensors()
        assert not live_wide_tensors()
        found["sharded" if sharded else "alone"] = vars(memory[0])
    return found


def live_wide_tensors() -> int:
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum(thing.shape in (WIDE, WIDE[::-1]) for thing in things)


def bytes_read() -> int:
    """What this process has read from files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def keep_a_block(root: Path, world: World) -> str:
    kept, freed = [], []
    with text_pipeline(
        flux, root, torch.float32, world, sharded=True, freed=freed.append
    ) as pipeline:
        kept.append(pipeline.text_encoder_2.encoder.block[1])
    assert kept
    return str(freed[0].left)


def come_late(root: Path, world: World, waits: Path) -> dict[str, Any]:
    """Rank 1 is away for longer than the default group's timeout."""
    found: dict[str, Any] = {}
    dist.group.WORLD.set_timeout(timedelta(seconds=DEFAULT_TIMEOUT))
    with text_pipeline(flux, root, torch.float32, world, sharded=True) as pipeline:
        began = time.monotonic()
        if world.rank == 1:
            eventually(waits.exists)
            time.sleep(SLEEP)
        else:
            other = dist.all_reduce(torch.ones(1), async_op=True)
            waits.touch()
        flux.encode(pipeline, PROMPTS[0], 16)
        found["waited"] = time.monotonic() - began
    if world.rank == 0:
        try:
            other.wait()
        except RuntimeError as error:
            found["default group"] = str(error)
    return found
