"""Makes a file, for --preemption-watch, 30 s before Google takes this spot VM away.

    python gcp.py /run/notice & elastic-etcd launch --preemption-watch file:/run/notice ...

The metadata server answers when the value changes, or after a minute.
"""

import os
import sys
import time
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

SERVICE = os.environ.get("METADATA", "http://169.254.169.254")
PREEMPTED = f"{SERVICE}/computeMetadata/v1/instance/preempted"
ask = build_opener(ProxyHandler({})).open  # the service is on this machine's own link

query = ""
while True:
    try:
        with ask(
            Request(PREEMPTED + query, headers={"Metadata-Flavor": "Google"}), timeout=70
        ) as answer:
            if answer.read() == b"TRUE":
                break
            query = f"?wait_for_change=true&timeout_sec=60&last_etag={answer.headers['ETag']}"
    except OSError as error:
        print(f"{PREEMPTED}: {error}", file=sys.stderr)
        time.sleep(5)
Path(sys.argv[1]).write_text("25")
