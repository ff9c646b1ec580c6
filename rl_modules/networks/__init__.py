"""Networks of the control algorithms."""
