"""What toys are made of: text encoders, tokenizers, autoencoders, weights."""
