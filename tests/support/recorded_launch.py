"""`python -m elastic_etcd.launch`, whose agent writes its flight record to $RECORD at its end."""

import os
import sys
from pathlib import Path

from elastic_etcd import launch
from elastic_etcd.agent import agent


class Recorded(agent.Agent):
    """An agent that leaves the record of its whole life."""

    async def live(self) -> int:
        try:
            return await super().live()
        finally:
            record = Path(os.environ["RECORD"])
            self._recorder.write(str(record.parent)).rename(record)


if __name__ == "__main__":
    agent.Agent = Recorded  # type: ignore[misc]
    sys.exit(launch.main())
