"""Load models: weights from files to devices, precision, adapters, and text encoders."""
