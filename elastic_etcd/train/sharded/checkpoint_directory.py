"""A durable checkpoint of a sharded state: a directory that torch.distributed.checkpoint reads.

Each rank writes its pieces into a file of its own, and beside it a record of them. Rank 0 writes
the replicated half, and when all records are there the metadata; then the directory gets its name.
So one that has its name is whole. Nothing here is collective but `read_newest`.
"""

import json
import logging
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar
from zlib import crc32

import torch
import xxhash
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.collectives import gather_json, rank_and_size
from elastic_etcd.train.state import files
from elastic_etcd.train.state.codecs import GROUPS, MODES
from elastic_etcd.train.state.encoding import decode
from elastic_etcd.train.state.snapshot_bytes import CHUNK
from elastic_etcd.train.state.snapshot_format import Version

REPLICATED = "state.safetensors"  # all values but the sharded tensors, as a state's file has them
_DIGESTS = "digests.json"  # of all others
_NAME = re.compile(r"commit-(\d+)")
_UNFINISHED = re.compile(r"commit-\d+\.[0-9a-f]+\.tmp")

Found = TypeVar("Found")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredPiece:
    """A rank's piece of a sharded tensor, as torch's planner asks for it."""

    offset: torch.Size
    local: torch.Tensor
    shape: torch.Size  # of the whole
    here: bool  # this rank is the one of its replicas that writes it

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        place = ChunkStorageMetadata(self.offset, self.local.shape)
        data = TensorWriteData(place, TensorProperties.create_from_tensor(self.local), self.shape)
        return [WriteItem(MetadataIndex(fqn, self.offset), WriteItemType.SHARD, tensor_data=data)]


class _PiecesPlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch is not followed
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.local if isinstance(found, StoredPiece) else found

    def is_written(self, item: WriteItem, rank: int) -> bool:
        """Whether this rank writes it: a piece that is here, or on rank 0 what all have alike."""
        found = self.state_dict[item.index.fqn]
        return found.here if isinstance(found, StoredPiece) else rank == 0


# --- names --------------------------------------------------------------------------------------


def keyed(
    parts: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Any],
    *,
    allow_pickle: bool,
) -> dict[str, Any]:
    """A commit's values as torch's get_state_dict gives them, an optimizer's by parameters' names.

    `shards` are what stands for the sharded tensors.
    """
    tree = {}
    for name, part in parts.items():
        value = decode(part, tensors, allow_pickle=allow_pickle, shards=shards)
        if isinstance(value, dict):
            value.pop(MODES, None)
            if groups := value.pop(GROUPS, None):
                value = _by_parameters(value, groups)
            value = {_plain(key): each for key, each in value.items()}
        tree[name] = value
    return tree


def _plain(key: Any) -> Any:
    return key.replace("_orig_mod.", "") if isinstance(key, str) else key


def _by_parameters(saved: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state dict, with the name within its module instead of each number."""
    own = [[_plain(name.partition(".")[2]) for name in names] for names in groups]
    names = {
        number: name
        for group, known in zip(saved["param_groups"], own, strict=True)
        for number, name in zip(group["params"], known, strict=True)
    }
    return {
        "state": {names[number]: moments for number, moments in saved["state"].items()},
        "param_groups": [
            {**group, "params": known}
            for group, known in zip(saved["param_groups"], own, strict=True)
        ],
    }


# --- writing ------------------------------------------------------------------------------------


def is_written_here(name: str, tensor: DTensor) -> bool:
    """Whether this rank, of those that have the same piece, is the one that writes it."""
    if not tensor.to_local().numel() and tensor.numel():  # a part of an uneven one: nothing
        return False
    mesh, turn = tensor.device_mesh, crc32(name.encode())
    return all(
        mesh.get_local_rank(dimension) == turn % mesh.size(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def unfinished(version: Version, token: int) -> str:
    """The name of a directory that is being written; it is no other's."""
    return f"{name_of(version)}.{token:x}.tmp"


def name_of(version: Version) -> str:
    """The name of a whole one."""
    return f"commit-{version.counter}"


def write_part(folder: Path, rank: int, tree: dict[str, Any]) -> None:
    """Write this rank's part of the values, and then the record of it. Raises OSError."""
    planner = _PiecesPlanner()
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # nothing is on a GPU
    planner.set_up_planner(tree)
    plan = planner.create_local_plan()
    plan = replace(plan, items=[each for each in plan.items if planner.is_written(each, rank)])
    plan = writer.prepare_global_plan([plan] * (rank + 1))[rank]  # its file has that number
    results = writer.write_data(plan, planner).value()
    record = folder / f"{rank}.record"
    digest = _digest(folder / f"__{rank}_0.distcp")
    record.with_suffix(".new").write_bytes(pickle.dumps((plan, results, digest)))
    record.with_suffix(".new").replace(record)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:  # a disk that fails is an error, and no SIGBUS
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def finish(folder: Path, size: int) -> None:
    """Write the metadata of a checkpoint of so many ranks, whose parts are there.

    Raises OSError, and ValueError if the parts do not make a whole.
    """
    records = [folder / f"{rank}.record" for rank in range(size)]
    found = [pickle.loads(record.read_bytes()) for record in records]  # noqa: S301 - as .metadata
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan([plan for plan, _, _ in found])
    writer.finish(metadata, [results for _, results, _ in found])
    digests = {f"__{rank}_0.distcp": digest for rank, (_, _, digest) in enumerate(found)}
    digests[".metadata"] = _digest(folder / ".metadata")
    (folder / _DIGESTS).write_text(json.dumps(digests))
    files.flush(folder / _DIGESTS)
    for record in records:
        record.unlink()
    files.flush(folder)


def publish(folder: Path, version: Version, keep: int) -> None:
    """Give a finished directory its name, and remove what is older than the `keep` newest.

    Those of another training are kept aside, as files are. Raises OSError.
    """
    root = folder.parent
    for path in whole_in(root):
        other = files.version_of(path / REPLICATED)
        if other and other.lineage != version.lineage:
            aside = path.with_name(f"{path.name}.{other.lineage:x}")
            path.replace(aside)
            log.warning("%s was of another training: it is kept as %s", path, aside)
    target = root / name_of(version)
    if target.exists():  # by an earlier world: training came back to the same commit
        rmtree(folder, ignore_errors=True)
    else:
        folder.replace(target)
    files.flush(root)
    for path in whole_in(root)[keep:]:
        older = path.with_name(unfinished(version, 0))
        path.replace(older)  # half of it must not be taken for a whole
        rmtree(older, ignore_errors=True)


def remove_unfinished(but: Path) -> None:
    """Remove what saves beside this one left that came to no end."""
    for path in but.parent.iterdir():
        if _UNFINISHED.fullmatch(path.name) and path != but:
            rmtree(path, ignore_errors=True)  # the next save tries again


# --- reading ------------------------------------------------------------------------------------


def whole_in(root: Path) -> list[Path]:
    """The checkpoints in a directory, the newest first; none where there is no directory."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = {path: match for path in root.iterdir() if (match := _NAME.fullmatch(path.name))}
        return sorted(found, key=lambda path: int(found[path][1]), reverse=True)
    return []


def read_newest(root: Path, read: Callable[[Path], Found]) -> tuple[Path, Found] | None:
    """The newest that all ranks can `read`; None if there is none at all. Collective.

    Raises MalformedState on all ranks if there are some and none is whole, because to begin anew
    would lose the training, and UsageError for values that the state does not have.
    """
    rank, _ = rank_and_size(launched=False)
    mine = [path.name for path in whole_in(root)] if rank == 0 else None
    names = gather_json(mine)[0]
    for name in names:
        found, why = None, ""
        try:
            found = read(root / name)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a damaged file makes of torch
            why = f"{type(error).__name__}: {error}"
        whys = dict(enumerate(gather_json(why)))
        if found is not None and not any(whys.values()):
            return root / name, found
        if rank == 0:
            reader, why = next((reader, why) for reader, why in whys.items() if why)
            log.warning("%s is left out: rank %d can't read it: %s", root / name, reader, why)
    if names:
        raise MalformedState(
            f"no checkpoint in {root} could be read whole ({', '.join(names)}). Remove them to "
            "begin anew"
        )
    return None


def read_tensors(folder: Path, tree: dict[str, Any]) -> None:
    """Read this rank's parts of the sharded tensors among these values, into them."""
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    digests = json.loads((folder / _DIGESTS).read_bytes())
    _check(folder / ".metadata", digests)
    metadata = reader.read_metadata()
    planner.set_up_planner(tree, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    there = planner.state_dict
    items = [each for each in plan.items if isinstance(there[each.dest_index.fqn], DTensor)]
    for name in {metadata.storage_data[each.storage_index].relative_path for each in items}:
        _check(folder / name, digests)
    reader.read_data(replace(plan, items=items), planner).wait()


def _check(path: Path, digests: Mapping[str, str]) -> None:
    """Raises MalformedState for a file that is not as it was written: torch reads it as it is."""
    if digests[path.name] != _digest(path):
        raise MalformedState(f"{path} is damaged: it does not have the bytes that were saved")
