"""The queue: jobs in the database, their order, and changes of their state."""
