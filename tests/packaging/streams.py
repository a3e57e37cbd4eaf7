"""Reads what docs/stream.md reads, by the functions that stand there. Argument: an empty folder."""

import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

# Before datasets is imported: it must not ask anybody.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": sys.argv[1]}

import pyarrow as pa
import pyarrow.parquet as pq
import webdataset as wds

from elastic_etcd import ElasticIterable

PAGE = Path(__file__).parents[2] / "docs" / "stream.md"
SIZES = [30, 7, 55, 21]


def recipes(paths: list[str]) -> dict[str, Any]:
    """What the page's code defines, for these Parquet files."""
    blocks = re.findall(r"(?:^    .*\n|^\n)+", PAGE.read_text(), re.MULTILINE)
    names: dict[str, Any] = {"paths": paths}
    for block in blocks:
        if "import" in block:
            exec(re.sub("^    ", "", block, flags=re.MULTILINE), names)
    return names


def write(folder: Path) -> tuple[list[str], list[str]]:
    """Parquet files of several row groups, and tars, of the same samples."""
    tables, tars = [], []
    for shard, size in enumerate(SIZES):
        numbers = [shard * 100 + n for n in range(size)]
        tables.append(str(folder / f"{shard}.parquet"))
        pq.write_table(pa.table({"number": numbers}), tables[-1], row_group_size=8)
        tars.append(str(folder / f"{shard}.tar"))
        with wds.TarWriter(tars[-1]) as tar:
            for number in numbers:
                tar.write({"__key__": str(number), "number.cls": number})
    return tables, tars


def read(
    shards: Iterable[Any], opened: Callable[[Any, int], Any], name: str, lengths: list[int] | None
) -> list[int]:
    """One rank breaks off; three go on. All have two workers, which the libraries see, too."""
    arguments: dict[str, Any] = {"lengths": lengths, "tail": "uneven", "buffer": 5}
    data = ElasticIterable(list(shards), opened, **arguments, rank=0, world_size=1)
    used = []
    for batch in islice(data.loader(4, num_workers=2), 9):
        used += batch[name].tolist() if isinstance(batch, dict) else batch
        data.record()
    state = data.state_dict()
    for rank in range(3):
        data = ElasticIterable(list(shards), opened, **arguments, rank=rank, world_size=3)
        data.load_state_dict(state)
        for batch in data.loader(4, num_workers=2):
            used += batch[name].tolist()
    return sorted(used)


def main() -> None:
    """Print how many samples each of them gave, if each came once."""
    multiprocessing.set_start_method("fork")  # what was made by exec can't be pickled
    tables, tars = write(Path(sys.argv[1]))
    page = recipes(tables)
    everything = [shard * 100 + n for shard, size in enumerate(SIZES) for n in range(size)]
    assert page["lengths"] == SIZES
    shards = range(page["stream"].num_shards)
    found = [
        read(tables, page["open_parquet"], "number", page["lengths"]),
        read(tars, page["open_tar"], "number.cls", None),
        read(tars, page["open_tar"], "number.cls", SIZES),
        read(shards, page["open_stream"], "number", None),
    ]
    for used in found:
        assert used == everything, used
    print(*map(len, found))


main()
