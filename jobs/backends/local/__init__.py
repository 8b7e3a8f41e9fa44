"""Jobs of this machine: its queue places them on GPUs or CPU ranks, and supervises them."""
