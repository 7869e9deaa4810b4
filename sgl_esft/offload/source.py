"""Where each expert's bytes lie: the base's and the adapters', found by reading headers only.

    base folder, packed file --headers--> [ExpertSource] --place--> ExpertPlace -> reader.py
    AdapterManifest --register/forget----------'

A file is opened once, past the page cache where its filesystem can do that, and its descriptor
belongs to the places that name it: it is closed when the last of them is gone. So an adapter may
be forgotten while one of its experts is being read, and a file that was replaced by another of its
name goes on answering with the bytes that were checked.
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from sgl_esft.errors import (
    AdapterFormatError,
    ConfigError,
    ExpertReadError,
    InvariantError,
    UnsupportedModelError,
    UserError,
)
from sgl_esft.formats.checkpoint import Checkpoint, all_experts
from sgl_esft.formats.manifest import AdapterManifest, TensorLocation
from sgl_esft.formats.model_spec import PROJS, ExpertTensorKey, MoeSpec, Proj, expert_keys
from sgl_esft.formats.safetensors_header import ITEM_BYTES, read_header
from sgl_esft.formats.strict_json import open_regular
from sgl_esft.offload.pack import PACKED_NAME, open_base, read_layout

logger = logging.getLogger(__name__)

_Places = dict[tuple[int, int], "ExpertPlace"]  # by layer id, expert id
_Start = tuple[Path, int]  # file, offset
_Starts = dict[ExpertTensorKey, tuple[_Start, ...]]  # of a projection's parts, in their order


@dataclass(frozen=True)
class FileId:
    """Which file, and as of when: another inode or another time is not what was checked.

    Not its ctime: that changes too when the file is renamed, or loses a name.
    """

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileId:
        """As `os.stat` or `os.fstat` say."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A file that stays open for as long as this object is held.

    `name` is without its folder: clients may read it in messages. `is_direct`: reads go past the
    page cache, and offsets, lengths and addresses must be multiples of pack.ALIGNMENT.
    """

    name: str
    fd: int
    id: FileId
    is_direct: bool

    @classmethod
    def take(cls, stream: BinaryIO, name: str) -> OpenFile:
        """Become the owner of an open stream, which nobody else may use from now on."""
        fd = stream.fileno()
        is_direct = _leave_page_cache(fd)
        if not is_direct:  # reading ahead would leave in the cache what nobody drops
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        file = cls(name, fd, FileId.of(os.fstat(fd)), is_direct)
        weakref.finalize(file, stream.close).atexit = False
        return file

    def check_unchanged(self) -> None:
        """Raises ExpertReadError if the file is no longer what it was when it was opened."""
        try:
            now = FileId.of(os.fstat(self.fd))
        except OSError as error:
            raise ExpertReadError(f"{self.name} cannot be read: {error.strerror}.") from error
        if now != self.id:
            raise ExpertReadError(
                f"{self.name} changed while it was served: {_difference(self.id, now)}. "
                "Start the server again, or replace the adapter; a new version of a file belongs "
                "into a new file that is renamed to its name."
            )


def _difference(before: FileId, now: FileId) -> str:
    if before.num_bytes != now.num_bytes:
        return f"it had {before.num_bytes} bytes, now {now.num_bytes}"
    return "it was written to"


def drop_page_cache(path: Path) -> None:
    """A file's pages leave it, but for those that somebody has mapped."""
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _leave_page_cache(fd: int) -> bool:
    """Whether reads of this descriptor go past the page cache from now on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # EINVAL: the filesystem has only the page cache
        return False
    return True


@dataclass(frozen=True)
class ByteRange:
    """One projection: `shape` [rows, columns], row after row, `row_bytes` each, from byte `start`.

    The shape is the checkpoint's [out, in]: (I, H) of gate and up, (H, I) of down, not TP-sliced;
    of scales [out, 1].
    """

    file: OpenFile
    start: int
    row_bytes: int
    shape: tuple[int, int]

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.start + self.shape[0] * self.row_bytes


@dataclass(frozen=True)
class ExpertPlace:
    """Where one expert's three projections lie. Holding it keeps their files open.

    `owner`: the adapter's name; None = the base. `dtype` in torch's words ("bfloat16"); "int8" is
    that of numbers, which `scales` belong to, float32, those of gate, up and down. Without
    quantisation there are none.
    """

    owner: str | None
    layer_id: int
    expert_id: int
    dtype: str
    gate: ByteRange
    up: ByteRange
    down: ByteRange
    scales: tuple[ByteRange, ByteRange, ByteRange] | None = None

    @property
    def files(self) -> frozenset[OpenFile]:
        """The one to six files that they lie in."""
        every = (self.gate, self.up, self.down, *(self.scales or ()))
        return frozenset(part.file for part in every)


class ExpertSource:
    """The places of a base's experts, and of those of registered adapters.

    `place` may be called by any thread; `register` and `forget` by one at a time.
    """

    def __init__(self, base_dir: Path, packed: Path | None = None) -> None:
        """Read config.json and the headers; of a base that is packed, also a page of each expert.

        packed: what `sgl-esft pack` made of this base; without it, the file of PACKED_NAME in the
        base's folder, if there is one. Raises UnsupportedModelError for the base, and ConfigError
        for a packed file that is damaged or of another base: it is never passed over in silence.
        """
        beside = base_dir / PACKED_NAME
        packed = packed or (beside if beside.exists() else None)
        before = _identities([*_files_in(base_dir), *([packed] if packed else [])])
        checkpoint = open_base(base_dir, "--expert-cache")
        self.spec: Final[MoeSpec] = checkpoint.spec
        self.packed: Final[Path | None] = packed
        """The packed file, if that is what is read."""
        self._shards = checkpoint.shards
        self._told_devices: set[int] = set()
        self._adapters: dict[str, _Places] = {}
        if packed is None:
            files = self._open(checkpoint.shards, before, UnsupportedModelError)
            starts = _checkpoint_starts(checkpoint)
        else:
            starts = _packed_starts(packed, checkpoint)
            files = self._open([packed], before, ConfigError)
        self._base: Final = self._places(None, starts, files)

    def place(self, owner: str | None, layer_id: int, expert_id: int) -> ExpertPlace:
        """Where the expert lies; `owner` None = the base. Raises InvariantError for one unknown."""
        places = self._base if owner is None else self._adapters.get(owner, {})
        place = places.get((layer_id, expert_id))
        if place is None:
            whose = "the base" if owner is None else f"adapter {owner!r}"
            raise InvariantError(f"{whose} has no expert {expert_id} in layer {layer_id} to read")
        return place

    def register(self, owner: str, manifest: AdapterManifest) -> None:
        """Know the experts of a validated adapter, stored as the base is; reads headers only.

        Raises AdapterFormatError if a file changed since it was validated; nothing is known then.
        """
        if owner in self._adapters:
            raise InvariantError(f"the experts of adapter {owner!r} are registered already")
        if manifest.scheme != self.spec.scheme:
            raise InvariantError(f"adapter {owner!r} is not quantised as the base is")
        before = _identities(manifest.files)
        starts = _adapter_starts(manifest)
        files = self._open(manifest.files, before, AdapterFormatError)
        self._adapters[owner] = self._places(owner, starts, files)

    def drop_page_cache(self) -> None:
        """What loading the rest of the base has left in the page cache is in nobody's account.

        Pages that somebody has mapped stay.
        """
        for path in self._shards:
            drop_page_cache(path)

    def forget(self, owner: str) -> None:
        """The reverse of `register`. A place that is still held can still be read."""
        if self._adapters.pop(owner, None) is None:
            raise InvariantError(f"the experts of adapter {owner!r} are not registered")

    def _open(
        self, paths: Iterable[Path], before: Mapping[Path, FileId], error: type[UserError]
    ) -> dict[Path, OpenFile]:
        files: dict[Path, OpenFile] = {}
        for path in paths:
            file = OpenFile.take(open_regular(path, error), path.name)
            # Its header was read by its name. Another file of that name has other offsets.
            if before.get(path) != file.id:
                raise error(f"{path.name} changed while it was opened: try again.")
            self._tell_if_cached(file)
            files[path] = file
        return files

    def _tell_if_cached(self, file: OpenFile) -> None:
        """Once for each filesystem."""
        if file.is_direct or file.id.device in self._told_devices:
            return
        self._told_devices.add(file.id.device)
        logger.warning(
            "The filesystem of %s refuses O_DIRECT: experts are read through the page cache, which "
            "is asked to drop them again.",
            file.name,
        )

    def _places(
        self, owner: str | None, starts: _Starts, files: Mapping[Path, OpenFile]
    ) -> _Places:
        parts = {proj: self.spec.expert_parts(proj) for proj in PROJS}
        dtype = parts["gate"][0].dtype

        def range_of(layer: int, expert: int, proj: Proj, number: int) -> ByteRange:
            path, start = starts[layer, expert, proj][number]
            num_rows, num_columns = parts[proj][number].shape
            row_bytes = num_columns * ITEM_BYTES[parts[proj][number].dtype]
            return ByteRange(files[path], start, row_bytes, (num_rows, num_columns))

        def place(layer: int, expert: int) -> ExpertPlace:
            gate, up, down = (range_of(layer, expert, proj, 0) for proj in PROJS)
            found = ExpertPlace(owner, layer, expert, dtype, gate, up, down)
            if self.spec.scheme is None:
                return found
            first, second, third = (range_of(layer, expert, proj, 1) for proj in PROJS)
            return replace(found, scales=(first, second, third))

        return {key: place(*key) for key in {(layer, expert) for layer, expert, _ in starts}}


def _files_in(folder: Path) -> list[Path]:
    """Nothing for what is no folder: `open_checkpoint` says what is wrong with it."""
    return list(folder.iterdir()) if folder.is_dir() else []


def _identities(paths: Iterable[Path]) -> dict[Path, FileId]:
    """Of those that are there."""
    found = {}
    for path in paths:
        with suppress(OSError):
            found[path] = FileId.of(path.stat())
    return found


def _checkpoint_starts(checkpoint: Checkpoint) -> _Starts:
    starts: _Starts = {}
    spec = checkpoint.spec
    for key in expert_keys(all_experts(spec)):
        names = (spec.expert_part_name(key, part) for part in spec.expert_parts(key[2]))
        tensors = [checkpoint.tensors[name] for name in names]
        starts[key] = tuple((tensor.file, tensor.info.start) for tensor in tensors)
    return starts


def _packed_starts(packed: Path, checkpoint: Checkpoint) -> _Starts:
    layout = read_layout(packed, checkpoint)
    return {
        (layer, expert, proj): tuple((packed, start) for start in starts)
        for layer, experts in all_experts(layout.spec).items()
        for expert in experts
        for proj, starts in layout.starts_of(layer, expert).items()
    }


def _adapter_starts(manifest: AdapterManifest) -> _Starts:
    headers = {file: read_header(file) for file in manifest.files}

    def start(location: TensorLocation) -> _Start:
        return location.file, location.info_in(headers[location.file]).start

    return {
        key: tuple(start(part[key]) for part in (manifest.tensors, manifest.scales) if part)
        for key in manifest.tensors
    }
