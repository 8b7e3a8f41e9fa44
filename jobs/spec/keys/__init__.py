"""The keys of a job, one file per heading. `jobs.spec.job_spec` combines them."""
