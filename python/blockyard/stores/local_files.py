"""`LocalFiles`: obstore's functions over a `local://` directory. Only the user can read what they write.

obstore itself would create files with whatever mode the umask leaves, and write through symbolic links that others have
planted. So `put` and the lock are our own: files are 0600 in folders 0700, and no name in a path may be a link. Others
cannot plant a link in such a folder, so obstore reads and deletes.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from blockyard.errors import StoreError

__all__ = ["LocalFiles"]

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_TOP: Final = "blockyard"
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class LocalFiles:
    """obstore's functions over a directory.

    Args:
        obstore: the module.
        root: the directory of the URL, created if missing.

    Raises:
        StoreError: a folder is a link, belongs to another user, or others can write to it.
        OSError: the directory cannot be created or opened.
    """

    def __init__(self, obstore: Any, root: Path) -> None:
        self.exceptions = obstore.exceptions
        self.get, self.get_range, self.head, self.delete = (
            obstore.get,
            obstore.get_range,
            obstore.head,
            obstore.delete,
        )
        self._root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened([_TOP]):
            pass

    def put(self, _client: object, path: str, value: memoryview, *, mode: str = "overwrite", **_: Any) -> None:
        """Write a file whole, or not at all.

        Raises:
            AlreadyExistsError: `mode` is `"create"`, and the file exists.
            NotImplementedError: `mode` is `"create"`, and the file system has no hard links.
            StoreError: as for the class.
        """
        *folders, name = path.split("/")
        scratch = f"{name}#{secrets.token_hex(8)}"
        with self._opened(folders) as folder:
            file = os.open(scratch, os.O_WRONLY | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
            try:
                with open(file, "wb", buffering=0) as out:  # noqa: PTH123 (a descriptor)
                    left = memoryview(value).cast("B")
                    while left:
                        left = left[out.write(left) :]
                if mode == "create":
                    self._link(scratch, name, folder)
                else:
                    os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):  # it was renamed
                    os.unlink(scratch, dir_fd=folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the directory against other processes, since it has no conditional writes."""
        with self._opened([_TOP]) as folder:
            file = os.open("lock", os.O_RDWR | _FILE, 0o600, dir_fd=folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _link(self, scratch: str, name: str, folder: int) -> None:
        try:
            os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            raise self.exceptions.AlreadyExistsError(name) from None
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise NotImplementedError("the file system has no hard links") from None
            raise

    @contextmanager
    def _opened(self, folders: list[str]) -> Iterator[int]:
        """Open a folder below the root, and create what is missing of it."""
        path = self._root
        folder = _open_folder(path, None)
        try:
            for name in folders:
                path /= name
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
                inner = _open_folder(path, folder)
                os.close(folder)
                folder = inner
                found = os.fstat(folder)
                if found.st_uid != os.geteuid():
                    raise StoreError(f"{str(path)!r} belongs to user {found.st_uid}, must belong to {os.geteuid()}")
                if found.st_mode & 0o022:
                    raise StoreError(f"others can write to {str(path)!r}: chmod 700")
            yield folder
        finally:
            os.close(folder)


def _open_folder(path: Path, parent: int | None) -> int:
    try:
        return os.open(path if parent is None else path.name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENOTDIR}:
            raise
    what = "a symbolic link" if path.is_symlink() else "no directory"
    raise StoreError(f"{str(path)!r} is {what}, must be a directory")
