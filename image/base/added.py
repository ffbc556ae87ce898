"""Copies what an installation added to a folder, so that it can be a layer of its own.

added.py list FOLDER                    prints the paths that are there now
added.py copy FOLDER LIST TARGET        copies the paths that are not in the file LIST to the same place below TARGET
"""

import shutil
import sys
from pathlib import Path


def main(command: str, folder: str, *rest: str) -> None:
    """Runs one of the two commands above."""
    paths = sorted(str(path) for path in Path(folder).rglob("*"))
    if command == "list":
        print("\n".join(paths))
        return
    known = set(Path(rest[0]).read_text().splitlines())
    for path in paths:
        if path not in known:
            target = Path(rest[1] + path)
            if Path(path).is_dir() and not Path(path).is_symlink():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target, follow_symlinks=False)


main(*sys.argv[1:])
