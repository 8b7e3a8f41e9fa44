"""Predict the memory a job needs and compare it with the machine.

The engine predicts (`python -m engine.memory`) because that needs torch; nothing here imports it.

    predicted.py    the prediction as the jobs layer reads it: `Predicted`
    question.py     `predict`: from the cache on disk, or else from `Server`, the warm process
    fit.py          compare with GPUs: whether it fits, the fastest strategy, the fewest GPUs
    ladder.py       changes that make a job fit, cheapest first
    host_memory.py  check host memory
    cards.py        memory and rates of common GPUs
    seconds.py      the seconds of a step, from its work and those rates
    ranking.py      the setups that fit, the fastest first
    network.py      network traffic per step
    estimate.py     everything for one job on this machine, for the command line and the form
    calibration.py  the prediction stored with a run, and how accurate past predictions were

`jobs.service.dry_run` measures two real steps instead.
"""
