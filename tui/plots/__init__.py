"""What was measured in runs, as curves: looked into, compared, written out."""
