"""Which sequences run in the next step, and what the step's tokens mean for them."""
