"""Reports steps until it is stopped; from step 10 on, it holds MIB megabytes of memory.

python report_and_allocate.py MIB
"""

import sys
import time

from dlrover_py.trainer import session

held = bytearray()
step = 0
while True:
    step += 1
    if step == 10:
        held = bytearray(b"x") * (int(sys.argv[1]) << 20)
    session.report_step(step)
    time.sleep(0.1)
