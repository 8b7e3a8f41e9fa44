"""Will a job fit? What is predicted of its memory, held against the machine.

The engine predicts (`python -m engine.memory`), since that needs torch; nothing here imports it.

    predicted.py    one prediction as it is read here: `Predicted`
    cache.py        predictions kept on disk
    question.py     `predict`: from the cache, else from one warm process, `Server`
    fit.py          against GPUs: what fits, the fastest strategy that does, and how few would do
    ladder.py       what can be changed when it does not fit, the cheapest change first
    host_memory.py  whether host memory can hold what a job keeps there
    network.py      what crosses the network in each step
    estimate.py     all of it for one job on this machine: for the command line and the form
    calibration.py  the prediction in a run's directory, and how right predictions were here

Two real steps, measured, are in `jobs.service.dry_run`.
"""
