"""Prints its steps and now and then a complaint, and dies; it reports nothing."""

import os

for step in range(40):
    os.write(1, f"step {step}\n".encode())
    if step % 10 == 9:
        os.write(2, b"link 3 is slow: 12.5 s\n")
os._exit(7)
