"""A job served by several processes, as `accelerate launch` or `torchrun` start them: each takes what it can.

Knows ranks, their common counters and their part files. Does not know models or how text is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import torch

from .errors import CommandError
from .records import RecordFile, each_record


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Item = TypeVar("Item")
_FOR_EVER = timedelta(days=365)


class Ranks:
    """
    The processes that serve one job together, and which of them this one is. Alone, it is the first of one.

    Prompts are not dealt out beforehand. Each rank takes the next one when it has a free row, from a counter that all
    of them share: how long completions become is known to nobody, and whoever had the long ones would be waited for.
    Each rank appends its records to a part file of its own. The last rank to end puts them together, once.

    Args:
        rank (`int`, *optional*, defaults to 0): This process, counted from 0.
        world_size (`int`, *optional*, defaults to 1): How many there are.
        store (`torch.distributed.Store`, *optional*): Where they meet; needed if there are several.

    Attributes:
        restarted (`bool`): Whether the launcher has started this job's processes again, after one of them died.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None):
        self.rank = rank
        self.world_size = world_size
        self.restarted = False
        self._store = store
        self._path = Path()

    @classmethod
    def of_environment(cls, device: str | None = None) -> Ranks:
        """
        What the launcher says: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`. With GPUs, the one
        of this process's number on its host becomes the current one.

        Args:
            device (`str`, *optional*): What was asked for; by default a GPU where there is one.

        Raises:
            `CommandError`: If `device` names one card for all processes, or there are fewer cards than processes.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls()
        if device not in (None, "cpu", "cuda"):
            raise CommandError(
                f"--device {device} would be the same for all processes: leave it out, and each takes a card."
            )
        if torch.cuda.is_available() and device != "cpu":
            local, cards = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= cards:
                raise CommandError(f"this host has {cards} GPUs for {local + 1} processes or more: start {cards}.")
            torch.cuda.set_device(local)
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        store, rank, world_size = next(rendezvous("env://"))
        # A launcher that starts processes again keeps the store, and counting begins anew.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ranks = cls(rank, world_size, PrefixStore(f"tetris-hf/{attempt}", store))
        ranks.restarted = attempt != "0"
        return ranks

    def open(self, path: str, resume: bool) -> RecordFile:
        """
        This rank's file of records. All ranks come here before any of them writes.

        Args:
            path (`str`): Where the records of all ranks belong in the end.
            resume (`bool`): Whether records that are there already count as done, whichever rank wrote them, and
                however many ranks there were.

        Returns:
            [`RecordFile`]: Its `done` holds what any rank has written before. Alone, the file at `path` itself,
            unless parts of an earlier job lie beside it.

        Raises:
            `CommandError`: If several ranks would have to share standard output, or there are records and they are
                not to be resumed.
        """
        self._path = Path(path)
        parts = [] if path == "-" else self._parts()
        if self.world_size == 1 and not parts:
            return RecordFile(path, resume)
        if path == "-":
            raise CommandError(f"{self.world_size} processes cannot share standard output: add --output FILE.")
        written = [file for file in (self._path, *parts) if file.exists() and file.stat().st_size]
        if written and not (resume or self.restarted):
            raise CommandError(f"`{written[0]}` has records already: add --resume to go on with it, or remove it.")
        done = {record["id"] for file in written for record, _ in each_record(file)}
        self._meet("read")
        output = RecordFile(str(self._part(self.rank)), resume=True)
        output.done |= done
        return output

    def take(self, items: Sequence[Item]) -> Iterator[Item]:
        """
        What this rank is to serve, each item when it is asked for.

        Args:
            items (`Sequence`): What is to be done, the same in the same order on all ranks.

        Returns:
            `Iterator`: Items that no other rank has taken.
        """
        if self._store is None:
            yield from items
            return
        while (place := self._store.add("taken", 1) - 1) < len(items):
            yield items[place]

    def count(self, number: int = 0) -> int:
        """Add to a number that all ranks share, of records written, say, and return it."""
        if self._store is None:
            return number
        return int(self._store.add("counted", number))

    def finish(self, ids: Sequence[str | int]) -> bool:
        """
        When this rank has served all it took: the last rank that comes here puts the parts together.

        Args:
            ids (`Sequence`): Of all prompts, in the order of the input, which becomes that of the records.

        Returns:
            `bool`: Whether this rank was the last. Files are written to disk before parts are removed, and a job that
            is interrupted in between can be resumed.

        Raises:
            `CommandError`: If a record is missing, which `--resume` would mend.
        """
        if self._store is None:
            self._merge(ids)
            return True
        last = self._store.add("finished", 1) == self.world_size
        try:
            if last:
                self._merge(ids)
        finally:
            if last:
                self._store.set("ended", "")
            elif self.rank == 0:  # the store may live in this process: it stays while others count
                self._store.wait(["ended"], _FOR_EVER)
        return last

    def _merge(self, ids: Sequence[str | int]) -> None:
        if not (parts := self._parts()):
            return
        with ExitStack() as closing:
            # Where each record is, not what it says: all of them together may be larger than memory.
            found: dict[str | int, tuple[BinaryIO, int, int]] = {}
            for path in [file for file in (self._path, *parts) if file.exists()]:
                file, start = closing.enter_context(open(path, "rb")), 0
                for record, end in each_record(path):
                    found[record["id"]] = file, start, end
                    start = end
            if missing := [name for name in ids if name not in found]:
                raise CommandError(
                    f"{len(missing)} of {len(ids)} prompts have no record, the first is {json.dumps(missing[0])}: run "
                    "the same command with --resume."
                )
            whole = self._path.with_name(self._path.name + ".merging")
            with open(whole, "wb") as output:
                for source, start, end in map(found.__getitem__, ids):
                    source.seek(start)
                    output.write(source.read(end - start))
                output.flush()
                os.fsync(output.fileno())
        os.replace(whole, self._path)
        for part in parts:
            part.unlink()

    def _meet(self, place: str) -> None:
        """Go on when all ranks have come here."""
        if self._store is None:
            return
        if self._store.add(f"met at {place}", 1) == self.world_size:
            self._store.set(f"all met at {place}", "")
        self._store.wait([f"all met at {place}"])

    def _part(self, rank: int) -> Path:
        return self._path.with_name(f"{self._path.name}.part{rank}")

    def _parts(self) -> list[Path]:
        """Parts of this job or of one that was interrupted, of however many ranks."""
        prefix = f"{self._path.name}.part"
        found = [
            file
            for file in self._path.parent.glob("*.part*")
            if file.name.startswith(prefix) and file.name[len(prefix) :].isdigit()
        ]
        return sorted(found, key=lambda file: int(file.name[len(prefix) :]))
