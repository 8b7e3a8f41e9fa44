"""Will a job fit? What is predicted of its memory, held against the machine.

The engine predicts (`python -m engine.memory`), since that needs torch; nothing here imports it.

    predicted.py        one prediction as it is read here: `Predicted`
    client.py           `Server`: the one warm process that predicts, and what it refuses
    cache.py            predictions kept on disk
    question.py         `predict`: from the cache, else from the server; `recall`: from the cache
    fit.py              a prediction against a GPU: fits, tight, does not fit
    rungs.py            what can be changed when it does not fit, and what that costs
    ladder.py           which changes a job needs, the cheapest first
    candidates.py       the fastest strategy that fits, and the smallest number of GPUs
    cards.py            GPUs that people have, by their memory
    host_memory.py      whether host memory can hold what a job keeps there
    auto.py             what `strategy: auto` goes by
    estimate.py         all of it for one job on this machine: for the command line and the form
    kept_prediction.py  the prediction in a run's directory, and what was measured beside it
    calibration.py      how right predictions were on this machine

Two real steps, measured, are in `jobs.service.dry_run`.
"""
