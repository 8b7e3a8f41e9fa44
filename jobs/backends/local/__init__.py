"""Jobs on this machine: the queue places them on GPUs or CPU ranks and supervises them."""
