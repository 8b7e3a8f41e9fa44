"""Which classes of a model become FSDP units: shown, and chosen, over the form of a new job."""
