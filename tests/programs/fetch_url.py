"""Fetches a URL, again and again for a minute: says the status of the first answer."""

import sys
import time
import urllib.request

for _ in range(300):
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=2).status)
        break
    except OSError:
        time.sleep(0.2)
