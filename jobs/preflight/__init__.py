"""Find problems of a job before any rank starts."""
