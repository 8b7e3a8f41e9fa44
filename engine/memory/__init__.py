"""Predict the peak memory of a job on each rank, without weights and without a GPU.

`trace_model` runs the real model, with the shapes that the job feeds it, on fake tensors: one block
of each kind for real, the others as its echo. What it writes down, a `Trace`, is the memory of
activations over one step, with a mark wherever an FSDP unit begins or ends. That takes seconds, and
is the same for any number of ranks. `predict` then does the arithmetic for a strategy, a number of
ranks, an optimizer and the rest of a job's settings, in milliseconds: it walks along the trace, and
adds what each unit holds, gathers and reduces at every mark, and what the optimizer keeps.

Torch's own `FSDPMemTracker` (2.13) counts the same, but only for the number of ranks it runs with:
4 s for FLUX.1 with one or two blocks of each kind, and two or three such runs for each row of a
comparison of strategies and ranks, which a person waits for.

    estimator.py  traces kept, predictions from them; `python -m engine.memory` serves it

    prediction.py what is answered: `Prediction`, `Phase`, `Parts`; JSON in and out, no torch
    walk.py       along a trace, with what units of FSDP2 hold, gather and reduce at each mark
    predict.py    `predict`: a trace, what optimizers keep, and what no model explains
    phases.py     loading, caching, sampling and saving; host memory and disk

`tracing`: a job's model on fake tensors.

    model.py      what of a job decides its trace, and the job's own model on fake tensors
    inputs.py     what the family's `predict` is fed
    live.py       counts the bytes of live storages while something runs
    fakes.py      what fake tensors cannot say: numbers, and what GPUs do otherwise than the CPU
    timeline.py   what happens to memory between marks, where units begin and end
    record.py     what one block does to memory, run once and repeated
    trace.py      `Trace`: one forward and one backward
"""
