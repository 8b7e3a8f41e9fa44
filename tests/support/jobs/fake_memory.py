"""Answers like `python -m engine.memory`, from a formula instead of a model: fast, and no torch.

`python fake_memory.py [LOG]` writes every request to LOG. A job of the name `crash` ends it, `hang`
keeps it from answering, and `odd` is answered with what is no JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

GIB = 2**30
PARAMETERS = 4 * 10**9
CONTEXT = GIB // 2


def predict(job: dict[str, Any], ranks: int, strategy: str) -> dict[str, Any]:
    """A prediction whose every part moves as the real one does."""
    sharded = strategy in ("fsdp2", "hsdp")
    shards = ranks // (job["dp_replicate_size"] or 1) if strategy == "hsdp" else ranks
    lora, width = job["model_type"] == "lora", 2 if job["mixed_precision"] == "bf16" else 4
    trained = 10**7 * job["lora_rank"] // 16 if lora else PARAMETERS
    state = {"adamw": 8, "adamw_8bit": 2}.get(job["optimizer"], 4)
    whole = not sharded or (lora and job["lora_placement"] == "replicated")
    mine = trained if whole else trained // shards
    weights = PARAMETERS * (width if lora else 4) // (shards if sharded else 1) + mine * 4 * lora
    swaps = lora and not sharded  # of 60 blocks
    swapped = PARAMETERS * width * min(job.get("swap_blocks", 0), 60) // 60 if swaps else 0
    weights -= swapped
    offloaded = job["fsdp_cpu_offload"] and sharded
    tokens = (job["resolution"] / 1024) ** 2 * job["train_batch_size"] * width / 2
    kept = job["gradient_checkpointing"] or job["fsdp_activation_checkpointing"]
    share = 1 / job["gradient_checkpointing_interval"] if kept else 0  # of what is recomputed
    activations = int(30 * GIB * tokens * (1 - share * 5 / 6))
    gathered = 0
    if sharded:
        stays = job["fsdp_reshard_after_forward"] is not True
        gathered = PARAMETERS * width if stays else GIB
    fixed = {
        "parameters": 0 if offloaded else weights,
        "gathered": gathered,
        "gradients": 0,
        "optimizer": 0 if offloaded else mine * state,
        "activations": activations,
        "workspace": 0,
    }
    grown = fixed | {"gradients": 0 if offloaded else mine * 4}
    phases = [
        {"name": name, "peak": sum(parts.values()), "parts": parts, "note": ""}
        for name, parts in (
            ("forward", fixed),
            ("backward", grown),
            ("optimizer", grown | {"gathered": 0, "activations": 0}),
        )
    ]
    peak = max(phase["peak"] for phase in phases)
    gpu = job["device"] != "cpu"
    beside = {"cuda_context": CONTEXT} if gpu else {}
    reserved = [peak, int(peak * 1.1)]
    return {
        "schema": 1,
        "model": "FakeTransformer",
        "parameters": PARAMETERS,
        "trained": trained,
        "strategy": strategy,
        "ranks": ranks,
        "settings": {},
        "phases": phases,
        "peak": peak,
        "largest": "backward",
        "reserved": reserved,
        "device": [one + sum(beside.values()) for one in reserved],
        "overheads": beside,
        "host": {"rank": 2 * GIB + swapped, "machine": 2 * GIB * ranks + swapped},
        "notes": ["Texts are the longest."],
        "disk": {"checkpoint": 10**6, "checkpoints": 2 * 10**6, "export": 10**6},
        "work": work_of(
            job,
            ranks,
            sharded=sharded,
            trained=trained,
            tokens=tokens,
            share=share,
            swapped=swapped,
        ),
    }


def work_of(
    job: dict[str, Any],
    ranks: int,
    *,
    sharded: bool,
    trained: int,
    tokens: float,
    share: float,
    swapped: int,
) -> dict[str, Any]:
    """What a step computes and moves, of a model of 4,608 tokens at 1024 pixels."""
    forward = round(2 * PARAMETERS * 4608 * tokens)
    stored = {"none": 16, "nf4": 4}.get(job.get("base_precision", "none"), 8)  # bits of a weight
    gathered = PARAMETERS * stored // 8 * (ranks - 1) // ranks if sharded else 0
    unpacked = PARAMETERS * {"none": 0, "int8": 7, "nf4": 11}.get(job.get("base_precision"), 7)
    once = {"half": forward, "attention": forward // 4, "kernels": 1000}
    once |= {"bytes": 10**10 + unpacked}
    again = {name: round(number * (1 + share)) for name, number in once.items()}
    at_once = ranks * job["train_batch_size"]
    moved = {"linked": gathered, "copied": swapped}
    return {
        "schema": 1,
        "micro_batches": (job.get("global_batch_size") or at_once) // at_once,
        "forward": once | moved,
        "backward": again | moved,
        "step": {"linked": 8 * trained * (ranks - 1) // ranks, "bytes": 0, "host_bytes": 0},
    }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    job = request["job"]
    if job["name"] == "refuse":
        return {"id": request["id"], "error": "no such model", "hint": "name another"}
    predictions, failed = [], []
    for strategy in request["strategies"]:
        for ranks in request["ranks"]:
            if job["name"] == "whole" and strategy == "fsdp2":
                failed.append(
                    {
                        "strategy": strategy,
                        "ranks": ranks,
                        "error": "this model cannot be sharded",
                        "hint": None,
                    }
                )
            else:
                predictions.append(predict(job, ranks, strategy))
    return {"id": request["id"], "predictions": predictions, "failed": failed, "seconds": 0.0}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if len(sys.argv) > 1:
            with open(sys.argv[1], "a", encoding="utf-8") as log:
                log.write(json.dumps(request | {"pid": os.getpid()}) + "\n")
        name = request["job"]["name"]
        if name == "crash":
            sys.exit("out of luck")
        while name == "hang":
            time.sleep(3600)
        print("odd" if name == "odd" else json.dumps(answer(request)), flush=True)


if __name__ == "__main__":
    main()
