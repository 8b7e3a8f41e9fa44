"""Will a job fit? What is predicted of its memory, held against the machine.

The engine predicts (`python -m engine.memory`), since that needs torch; nothing here imports it.

    predicted.py    one prediction as it is read here: `Predicted`
    client.py       `Server`: the one warm process that predicts, and what it refuses
    cache.py        predictions kept on disk
    question.py     `ask_all`: from the cache, else from the server; `recall`: from the cache alone
    fit.py          a prediction against a GPU: fits, tight, does not fit
    ladder.py       what can be changed when it does not fit, the cheapest first
    advice.py       the fastest strategy that fits, and the smallest number of GPUs
    cards.py        GPUs that people have, by their memory
    estimate.py     all of it for one job on this machine: what the command line and the form show
    kept.py         the prediction in a run's directory, and what was measured beside it
    calibration.py  how right predictions were on this machine
    dry_run.py      two real steps, measured
"""
