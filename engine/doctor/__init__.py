"""What `jobs.doctor` needs torch for: what it is built for, which GPUs it sees, an all-reduce."""
