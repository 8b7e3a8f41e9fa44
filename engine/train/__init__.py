"""Training: steps, gradients, optimizer, averages, validation loss."""
