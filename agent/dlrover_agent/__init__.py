"""The agent: one per node; supervises the workers and speaks for them. No torch in here."""
