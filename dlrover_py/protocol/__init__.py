"""The floor: the types that two programs share. No I/O, no clock, no torch."""
