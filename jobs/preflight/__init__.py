"""What can be known to be wrong with a job before any rank starts."""
