"""Several machines, no scheduler: what each says of itself over ssh. Nothing new runs on any."""
