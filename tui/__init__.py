"""The dashboard and the command line. Everything they do goes through `jobs.service`."""
