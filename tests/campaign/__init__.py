"""Hours of random faults and random inputs: `python -m tests.campaign`. Not collected by pytest.

    python -m tests.campaign faults --trials 10000      fake ranks, the real supervisor
    python -m tests.campaign real --trials 200          real ranks of a toy model
    python -m tests.campaign slurm --trials 300         fake ranks in the Slurm of SLURM_CONF
    python -m tests.campaign fault-points --trials 9999   every file operation of commands, broken
    python -m tests.campaign fuzz --trials 200000       every file and flag that a person may damage

Trial N of a kind does the same whenever it is run with the same `--seed`; what was done is in the
journal, and a campaign that was broken off goes on after it. What is found is printed with the
words that repeat it.
"""
