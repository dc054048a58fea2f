"""Tries in a Pod what it gets of its own master and of another job's, and says so in JSON.

    python try_other_doors.py HOST

HOST is the address of the other master's Pod.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from dlrover_py.protocol.names import HEALTH_PORT, MASTER_PORT, NODE_MOUNT, SECRET_CA, SECRET_TOKEN

token = Path(NODE_MOUNT, SECRET_TOKEN).read_text().strip()
believing = ssl.create_default_context(cafile=f"{NODE_MOUNT}/{SECRET_CA}")
believing.check_hostname = False  # agents expect a name that is no host's
blind = ssl.create_default_context()
blind.check_hostname = False
blind.verify_mode = ssl.CERT_NONE


def ask(url: str, headers: dict[str, str], context: ssl.SSLContext | None = None) -> int | str:
    """Return the status of the answer, or the name of the error."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as page:
            return int(page.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        return type(error.reason).__name__


own, other = os.environ["DLROVER_MASTER_ADDR"], sys.argv[1]
bearer = {"Authorization": f"Bearer {token}"}
said = {
    "own": ask(f"https://{own}/v1/job", bearer, believing),
    "without a token": ask(f"https://{own}/v1/job", {}, believing),
    "other, believing": ask(f"https://{other}:{MASTER_PORT}/v1/job", bearer, believing),
    "other": ask(f"https://{other}:{MASTER_PORT}/v1/job", bearer, blind),
    "health": ask(f"http://{other}:{HEALTH_PORT}/healthz", {}),
    "more of health": ask(f"http://{other}:{HEALTH_PORT}/v1/job", bearer),
    "account": os.path.exists("/var/run/secrets/kubernetes.io"),
}
print(json.dumps(said))
