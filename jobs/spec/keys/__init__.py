"""The keys of a job, one file for each heading. `jobs.spec` puts them together."""
