"""Predict the peak memory of a job on each rank, without weights and without a GPU.

`trace_model` runs the real model, with the job's shapes, on fake tensors: one block of each kind is
executed, and the others replay it. The result, a `Trace`, is the activation memory over one step,
with a mark wherever an FSDP unit begins or ends. Tracing takes seconds and is independent of the
number of ranks. `predict` then does the arithmetic for a strategy, a number of ranks, an optimizer
and the job's other settings, in milliseconds: it walks along the trace, and adds the memory that
each unit holds, gathers and reduces at every mark, and the optimizer's state.

Torch's own `FSDPMemTracker` (2.13) gives the same counts, but only for the number of ranks it runs
with: 4 s for FLUX.1 with one or two blocks of each kind, and two or three such runs for each row of
a comparison of strategies and ranks, which is too slow for interactive use.

    estimator.py  caches traces and predicts from them; `python -m engine.memory` serves it

    walk.py       walks a trace, adding what FSDP2 units hold, gather and reduce at each mark; and
                  what a rank computes and moves in a step
    predict.py    `predict`: combines a trace with optimizer state and measured overheads
    phases.py     loading, caching, sampling and saving; host memory and disk

`tracing`: a job's model on fake tensors.

    model.py      the settings that a trace depends on, and the job's model on fake tensors
    inputs.py     shapes of the inputs of the family's `predict`
    live.py       counts the bytes of live storages during a run
    work.py       counts FLOPs, bytes and kernels during a run
    fakes.py      supplies values that fake tensors lack, and imitates a GPU on the CPU
    timeline.py   memory between marks, where units begin and end
    record.py     records one block's memory use, and replays it
    trace.py      `Trace`: one forward and one backward
"""
