"""A server that speaks the protocol of the Hugging Face hub, on this machine."""
