"""The queue: jobs in the database, which of them starts, and who looks after it."""
