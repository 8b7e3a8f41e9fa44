"""The model: from files to devices, its precision, adapters, and text encoders."""
