"""Components of toys: text encoders, tokenizers, autoencoders, weights."""
