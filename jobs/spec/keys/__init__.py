"""The keys of a job, one file for each heading. `jobs.spec.job_spec` puts them together."""
