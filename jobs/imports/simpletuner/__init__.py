"""SimpleTuner's configurations."""
