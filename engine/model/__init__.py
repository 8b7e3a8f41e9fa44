"""The model: weights from files to devices, its precision, adapters, and text encoders."""
