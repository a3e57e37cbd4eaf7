"""Runs the cells of stdin (JSON) in a Jupyter kernel, and prints what comes of each (JSON).

A cell after which "interrupt" stands is interrupted as soon as it has printed "now".
"""

import json
import sys
from queue import Empty
from typing import Any

from jupyter_client.manager import start_new_kernel

PATIENCE = 120.0  # seconds


def main() -> None:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=PATIENCE)
    try:
        told = [run(manager, client, *cell) for cell in json.load(sys.stdin)]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(json.dumps(told))


def run(manager: Any, client: Any, code: str, then: str) -> dict[str, str]:
    """What the cell prints, gives, and raises."""
    told = {"printed": "", "value": "", "error": ""}

    def take(message: Any) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                told["printed"] += content["text"]
                if then == "interrupt" and "now" in content["text"]:
                    manager.interrupt_kernel()
            case "execute_result":
                told["value"] = content["data"]["text/plain"]
            case "error":
                told["error"] = f"{content['ename']}: {content['evalue']}"

    try:
        client.execute_interactive(code, timeout=PATIENCE, output_hook=take, allow_stdin=False)
    except (Empty, TimeoutError) as error:
        told["error"] = f"no answer: {error!r}"
    return told


if __name__ == "__main__":
    main()
