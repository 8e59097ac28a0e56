"""The lock of a run directory: one process at a time writes to it, and `run.lock` names it.

The kernel holds it (flock), so it ends with the process however that ends, and no stale lock can remain. It
works between containers of one host, whatever their process ids. Between hosts it depends on the file system:
NFS and most cluster file systems share it; some keep it local to the host (Lustre's `localflock`), a few have
no locks. So the holder also rewrites its record every few seconds:

    run.lock is        what a newcomer does
    locked             refuses, and names the holder
    empty              takes the lock
    a record of this   takes the lock: this kernel would know a live holder, so that one was killed
      host's kernel
    any other record   watches it for a while: a live holder rewrites it

Without flock at all, the process that finds its own record unchanged a moment after writing it has the lock
(Fischer's algorithm). A holder whose record is gone or another's stops before its next write (`check`).
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shlex
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from paceline.config import ConfigError

LOCK_FILE = "run.lock"

# Seconds between two records of a holder, and how long a newcomer watches for one.
BEAT_SECONDS = 5.0
WATCH_SECONDS = 20.0

# Without flock: seconds after which a record that no other process has overwritten counts.
SETTLE_SECONDS = 2.0

# Longest record that is read; anything longer is not a record.
MAX_RECORD_BYTES = 1 << 16

NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)


class RunIsHeld(ConfigError):
    """Raised when another process holds the run directory."""


class LockLost(RuntimeError):
    """Raised when this process no longer holds the run directory."""


@dataclass(frozen=True)
class Holder:
    """The record of a lock's holder."""

    token: str  # unique to the process
    pid: int
    host: str
    boot: str  # of the kernel; containers of one host share it
    pid_namespace: str
    started: str
    command: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> "Holder":
        command = shlex.join(Path(word).name if i == 0 else word for i, word in enumerate(sys.argv))
        return cls(
            token=secrets.token_hex(8),
            pid=os.getpid(),
            host=socket.gethostname(),
            boot=_boot_id(),
            pid_namespace=_pid_namespace(),
            started=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            command=command[:200],
        )

    @classmethod
    def parse(cls, content: bytes) -> "Holder | None":
        """Parses a record; None where the content is not one."""
        try:
            record = json.loads(content)
            values = {field.name: record[field.name] for field in fields(cls)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if any(type(values[field.name]) is not field.type for field in fields(cls)):
            return None
        return cls(**values)

    def __str__(self) -> str:
        here = self.boot == _boot_id()
        container = " of another container" if here and self.pid_namespace != _pid_namespace() else ""
        where = f"{container} on this host" if here else f" on host {self.host}"
        text = f"process {self.pid}{where} (`{self.command}`, since {self.started})"
        return "".join(c if c.isprintable() else "?" for c in text)  # the record is untrusted


class RunLock:
    """This process's lock on a run directory, until `release` or the end of the process."""

    def __init__(self, folder: Path, warn: Callable[[str], None] = print) -> None:
        """Takes the lock; raises `RunIsHeld` where another process has it."""
        self.folder = folder
        self.path = folder / LOCK_FILE
        self.holder = Holder.this_process()
        self.lost = ""
        self._beat = 0
        self._writing = threading.Lock()  # between the thread that beats and `release`
        self._stopped = threading.Event()
        self._descriptor, has_flock = self._open()
        try:
            self._refuse_live_record(has_flock, warn)
            self._write_record()
            if not has_flock:
                warn(f"{self.path}: this file system has no locks; going by what is written there")
                self._settle()
        except BaseException:
            self._close()
            raise
        _held.add(self)
        threading.Thread(target=_keep_beating, args=(weakref.ref(self), self._stopped), daemon=True).start()

    def check(self) -> None:
        """Raises `LockLost` where the directory is gone, or another process holds it."""
        reason = self.lost or self._why_lost()
        if reason:
            raise LockLost(f"{self.folder}: {reason}; this process stops here and writes nothing more")

    def release(self) -> None:
        """Releases the lock; the file remains, empty."""
        self._stopped.set()
        with self._writing:
            if self._descriptor >= 0 and not self._why_lost():
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
            self._close()

    def beat(self) -> None:
        """Rewrites the record, to show other hosts that the holder lives."""
        with self._writing:
            if self._descriptor < 0:
                return
            self.lost = self.lost or self._why_lost()
            if not self.lost:
                self._beat += 1
                with contextlib.suppress(OSError):  # the run's own writes report a full disk
                    self._write_record()

    def _open(self) -> tuple[int, bool]:
        """Opens and locks the file; returns its descriptor and whether the file system has locks."""
        while True:
            # Without O_NOFOLLOW a link in a foreign directory could redirect the write to one of our files.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o666)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise ConfigError(f"{self.path} is not a plain file; remove it")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_flock = True
            except BlockingIOError:
                os.close(descriptor)
                raise self._held_by(self._patiently_read_record()) from None
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    os.close(descriptor)
                    raise
                has_flock = False
            if _same_file(descriptor, self.path):
                return descriptor, has_flock
            os.close(descriptor)  # removed between the two calls: the lock is on an unlinked file

    def _refuse_live_record(self, has_flock: bool, warn: Callable[[str], None]) -> None:
        found = self._read_record()
        if found is None or (has_flock and found.boot == _boot_id()):
            return
        warn(
            f"{self.folder} was left by {found} without a word; "
            f"watching for {WATCH_SECONDS:g} s whether that process still lives"
        )
        deadline = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(0.5, WATCH_SECONDS / 10))
            now = self._read_record()
            if now is not None and (now.token, now.beat) != (found.token, found.beat):
                raise self._held_by(now)

    def _settle(self) -> None:
        time.sleep(SETTLE_SECONDS)
        found = self._read_record()
        if found is None or found.token != self.holder.token:
            raise self._held_by(found)

    def _held_by(self, holder: Holder | None) -> RunIsHeld:
        who = str(holder) if holder is not None else "another process, which has not written its name yet"
        return RunIsHeld(
            f"{self.folder} is held by {who}. Two processes would write every step twice: "
            "wait for it, stop it, or start another run"
        )

    def _why_lost(self) -> str:
        try:
            if not _same_file(self._descriptor, self.path):
                return "its run.lock was removed or replaced"
        except OSError as error:
            return f"its run.lock cannot be seen any more ({error})"
        found = self._read_record()
        if found is not None and found.token != self.holder.token:
            return f"it was taken over by {found}"
        return ""

    def _patiently_read_record(self) -> Holder | None:
        """Returns the holder's record; one that has just taken the lock writes it in a moment."""
        for _ in range(20):
            found = self._read_record()
            if found is not None:
                return found
            time.sleep(0.05)
        return None

    def _read_record(self) -> Holder | None:
        """Reads through a new descriptor: on NFS only opening asks the server again."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return Holder.parse(os.read(descriptor, MAX_RECORD_BYTES))
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _write_record(self) -> None:
        record = json.dumps(asdict(self.holder) | {"beat": self._beat}).encode() + b"\n"
        os.pwrite(self._descriptor, record, 0)
        os.ftruncate(self._descriptor, len(record))
        os.fsync(self._descriptor)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


# A forked child shares its parent's flock, and would hold it after the parent's death.
_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in _held:
        lock._stopped = threading.Event()  # the thread that may hold the parent's lock does not exist here
        lock._close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _keep_beating(lock: "weakref.ref[RunLock]", stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_SECONDS):
        held = lock()
        if held is None:
            return
        held.beat()
        del held


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _boot_id() -> str:
    """Returns the boot id of this host's kernel; the host name where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
