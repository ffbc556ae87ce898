"""The image store: which store a new set of images starts from, and which ones go."""

from __future__ import annotations

import os
from pathlib import Path

from testcluster.images import Archive
from testcluster.store import RECORD, Content, Stores, best_base, clone, others, outdated


def content(**sizes: int) -> Content:
    return Content.of(Archive(Path(f"{n}.tar"), f"sha256:{n}", (f"test/{n}:1",), size) for n, size in sizes.items())


def test_a_set_has_one_key_whatever_the_order() -> None:
    assert content(a=1, b=2).key() == content(b=2, a=1).key()
    assert content(a=1).key() != content(b=1).key() != content(a=1, b=1).key()


def test_a_store_remembers_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "images-1").mkdir()
    (tmp_path / "images-cut-short").mkdir()
    content(a=1, b=2).write(tmp_path / "images-1")
    assert Stores.contents(tmp_path) == {tmp_path / "images-1": content(a=1, b=2)}
    assert content(a=1, b=2).names() == {"test/a:1", "test/b:1"}


def test_a_new_set_starts_from_the_store_that_saves_the_most_bytes() -> None:
    small, large, other = Path("images-small"), Path("images-large"), Path("images-other")
    stores = {small: content(a=1, b=1), large: content(engine=5000), other: content(c=9)}
    assert best_base(content(a=1, b=1, engine=5000), stores) == large
    assert best_base(content(a=1), stores) == small
    assert best_base(content(d=1), stores) is None
    crowded = Path("images-crowded")
    assert best_base(content(c=9, d=1), stores | {crowded: content(c=9, e=1, f=1)}) == other


def test_only_the_newest_stores_stay_and_always_the_one_in_use() -> None:
    used = {Path(f"images-{n}"): float(n) for n in range(1, 6)}
    assert outdated(used, Path("images-5")) == [Path("images-2"), Path("images-1")]
    assert outdated(used, Path("images-1")) == [Path("images-3"), Path("images-2")]
    assert outdated({Path("images-1"): 1.0}, Path("images-1")) == []


def test_a_clone_shares_files_but_not_databases_and_keeps_what_looks_like_one(tmp_path: Path) -> None:
    store = tmp_path / "store"
    image = store / "io.containerd.snapshotter.v1.overlayfs" / "snapshots" / "1" / "fs"
    image.mkdir(parents=True)
    files = {image / "word": 0o644, image / "passwords.db": 0o600, image.parents[2] / "metadata.db": 0o600}
    for path, mode in files.items():
        path.write_text(path.name)
        path.chmod(mode)
        os.utime(path, (1, 1))
    content(a=1).write(store)
    target = tmp_path / "containerd"
    clone(store, target)
    copies = {path: target / path.relative_to(store) for path in files}
    assert [copy.read_text() for copy in copies.values()] == [path.name for path in files]
    linked = {path.name: path.stat().st_ino == copy.stat().st_ino for path, copy in copies.items()}
    assert linked == {"word": True, "passwords.db": True, "metadata.db": False}
    assert not (target / RECORD).exists()
    assert (store / RECORD).exists()


def test_an_image_that_goes_takes_its_other_names_along() -> None:
    listing = (
        "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"
        "sha256:aa1 type sha256:a 1 MiB linux/amd64 -\n"
        "sha256:bb1 type sha256:b 1 MiB linux/amd64 -\n"
        "test/a:1 type sha256:a 1 MiB linux/amd64 -\n"
        "test/b:1 type sha256:b 1 MiB linux/amd64 -\n"
        "test/b:again type sha256:b 1 MiB linux/amd64 -\n"
    )
    assert others(listing, {"test/a:1"}) == ["sha256:bb1", "test/b:1", "test/b:again"]
    assert others(listing, {"test/a:1", "test/b:1"}) == []
    assert others("REF TYPE DIGEST\n", {"test/a:1"}) == []
