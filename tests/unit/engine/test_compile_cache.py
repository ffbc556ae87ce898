"""The compile cache's store and use: atomic entries, damaged and foreign ones, volumes that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm70_engine.cache import store
from sm70_engine.cache.key import complete, cpu_product, cuda_of, source_digest
from sm70_engine.cache.store import EntryError, StoreError, publish, restore
from sm70_engine.cache.use import FOLDER, PARTS, CacheUse, prepared
from sm70_profiles.catalog import load_profile
from sm70_profiles.identity import CompileCacheIdentity
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.report import CacheState, DeviceFacts
from sm70_profiles.resolver import Resolution, ServeRequest, resolve

IDENTITY = CompileCacheIdentity(
    engine_build="sm70 1, vllm 2",
    torch="3",
    cuda="cu128",
    driver_branch="580",
    gpu_product="Tesla V100-SXM2-16GB",
    tensor_parallel_size=4,
    pipeline_parallel_size=1,
    model_shape="m",
    configuration="c",
)
KEY = IDENTITY.key or ""
FILES = {"vllm/torch_compile_cache/a/b.py": "code", "triton/k.cubin": "kernel", "inductor/x": "graph"}


def written(folder: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    publish(tmp_path / "volume", IDENTITY, written(tmp_path / "first"), PARTS)
    return tmp_path / "volume"


def generations(volume: Path) -> list[str]:
    return sorted(path.name for path in (volume / KEY).iterdir())


def empty(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_an_entry_is_found_whole(volume: Path, tmp_path: Path) -> None:
    work = empty(tmp_path)
    assert restore(volume, KEY, work) == len(FILES)
    assert content(work) == FILES
    assert restore(volume, "another key", work) == 0


def test_what_belongs_to_this_start_alone_is_not_published(tmp_path: Path) -> None:
    more = {"vllm/gpu_p2p_access_cache_for_0.json": "devices", "triton/k.lock": "", "inductor/y.tmp": ""}
    work = written(tmp_path / "work", FILES | more)
    (work / "triton/link").symlink_to("/etc/passwd")
    assert publish(tmp_path / "volume", IDENTITY, work, PARTS) == len(FILES)


def test_a_later_entry_replaces_the_one_before(volume: Path, tmp_path: Path) -> None:
    publish(volume, IDENTITY, written(tmp_path / "second", FILES | {"triton/more": "!"}), PARTS)
    assert generations(volume) == ["2"]
    assert restore(volume, KEY, empty(tmp_path)) == len(FILES) + 1


def test_an_entry_that_is_being_written_is_not_seen(volume: Path, tmp_path: Path) -> None:
    written(volume / KEY / ".new-crashed/files")
    assert restore(volume, KEY, empty(tmp_path)) == len(FILES)


def test_a_crash_at_any_write_leaves_the_entry_before(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = written(tmp_path / "second", {"triton/1": "new", "triton/2": "newer"})
    copy = store._copy
    for fails_at in ("1", "2"):

        def failing(source: Path, target: Path, name: str = fails_at) -> store.StoredFile:
            if source.name == name:
                raise OSError(28, "No space left on device")
            return copy(source, target)

        monkeypatch.setattr(store, "_copy", failing)
        with pytest.raises(StoreError, match="No space left on device"):
            publish(volume, IDENTITY, work, PARTS)
        monkeypatch.setattr(store, "_copy", copy)
        assert generations(volume) == ["1"]
    assert restore(volume, KEY, empty(tmp_path)) == len(FILES)


def damage_content(entry: Path) -> None:
    (entry / "files/triton/k.cubin").write_text("KERNEL")


def damage_missing(entry: Path) -> None:
    (entry / "files/triton/k.cubin").unlink()


def damage_link(entry: Path) -> None:
    damage_missing(entry)
    (entry / "files/triton/k.cubin").symlink_to("/etc/hostname")


def damage_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{")


def damage_no_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def change(entry: Path, **members: object) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps({**manifest, **members}))


def damage_version(entry: Path) -> None:
    change(entry, schemaVersion=2)


def damage_identity(entry: Path) -> None:
    change(entry, identity={**IDENTITY.model_dump(by_alias=True), "torch": "4"})


def damage_place(entry: Path) -> None:
    change(entry, files={"../../../outside": {"sha256": "0" * 64, "size": 1}})


DAMAGES = [
    (damage_content, "another checksum"),
    (damage_missing, "missing"),
    (damage_link, "missing"),
    (damage_manifest, "damaged or of another version"),
    (damage_no_manifest, "cannot be copied"),
    (damage_version, "damaged or of another version"),
    (damage_identity, "of another version"),
    (damage_place, "no name of a file"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_a_damaged_or_foreign_entry_is_not_used(volume: Path, tmp_path: Path, damage: object, why: str) -> None:
    assert callable(damage)
    damage(volume / KEY / "1")
    work = empty(tmp_path)
    with pytest.raises(EntryError, match=why):
        restore(volume, KEY, work)
    assert list(work.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def resolution(**overrides: object) -> Resolution:
    profile = load_profile("tiny_hybrid_reference_release")
    document = {"profile": profile, "modelPath": "/m", "draftPath": "/d", "servedName": "m", "overrides": overrides}
    return resolve(ServeRequest.model_validate(document))


def start(tmp_path: Path, files: dict[str, str], **variables: str) -> tuple[CacheUse, CacheState | None, str]:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), **variables}
    with prepared(resolution(), IDENTITY, environment) as use:
        if use.work is not None:
            assert set(use.variables()) == {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
            written(Path(use.work), files)
        report = use.finish()
    assert use.work is None or not Path(use.work).exists()
    return use, report.state, report.message


def test_starts_are_cold_then_warm_by_measure(tmp_path: Path) -> None:
    assert start(tmp_path, FILES)[1] is CacheState.COLD
    use, state, _ = start(tmp_path, {})
    assert (state, use.files_before) == (CacheState.WARM, len(FILES))
    # A start that compiles more is not warm, and the next one finds that too.
    _, state, message = start(tmp_path, {"triton/more": "!"})
    assert (state, message.startswith("1 files were added to 3")) == (CacheState.COLD, True)
    assert start(tmp_path, {})[1] is CacheState.WARM


def test_what_requests_compile_is_published_at_the_end(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    with prepared(resolution(), IDENTITY, environment) as use:
        assert use.work is not None
        written(Path(use.work))
        assert use.extend() == 0  # a start that has published nothing is not extended
        use.finish()
        written(Path(use.work), {"triton/first_call": "kernel"})
        assert use.extend() == 1
        assert use.extend() == 0
    use, state, _ = start(tmp_path, {})
    assert (state, use.files_before) == (CacheState.WARM, len(FILES) + 1)


def test_compiled_code_lies_at_the_same_place_at_every_start(tmp_path: Path) -> None:
    first, second = (start(tmp_path, FILES)[0].work for _ in range(2))
    assert first == second
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    with prepared(resolution(), IDENTITY, environment) as one, prepared(resolution(), IDENTITY, environment) as two:
        assert one.work == first
        assert two.work != first


def test_a_volume_that_cannot_be_written_costs_a_cold_start_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / FOLDER).write_text("a file is in the way of the folder")
    _, state, message = start(tmp_path, FILES)
    assert state is CacheState.UNWRITABLE
    assert "cannot be written" in message


def test_a_warm_start_needs_no_writable_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, FILES)

    def read_only(*_: object) -> int:
        raise AssertionError("nothing was to be published")

    monkeypatch.setattr(store, "publish", read_only)
    assert start(tmp_path, {})[1] is CacheState.WARM


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"VLLM_DISABLE_COMPILE_CACHE": "1"}, "VLLM_DISABLE_COMPILE_CACHE"),
        ({"VLLM_CACHE_ROOT": "/theirs"}, "VLLM_CACHE_ROOT"),
        ({"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}, "TORCHINDUCTOR_FORCE_DISABLE_CACHES"),
    ],
)
def test_the_user_can_switch_it_off(tmp_path: Path, variables: dict[str, str], why: str) -> None:
    use, state, message = start(tmp_path, FILES, **variables)
    assert (use.variables(), state) == ({}, CacheState.OFF)
    assert why in message


def test_without_a_folder_for_compiled_code_the_server_starts_cold(tmp_path: Path) -> None:
    use, state, message = start(tmp_path, {}, TMPDIR=str(tmp_path / "none"))
    assert (use.variables(), state) == ({}, CacheState.COLD)
    assert "no folder" in message


def test_the_key_is_complete_on_this_machine_and_names_what_it_depends_on(tmp_path: Path) -> None:
    base = resolution().cache
    assert base is not None
    base = base.model_copy(update={"model_shape": "shape"})
    installed = {"sm70": "1", "vllm": "0.32.0+empty", "torch": "2.10.0+cu128"}
    gpu = DeviceFacts(name="Tesla V100-SXM2-16GB", count=4, driver="580.159.04")
    keys = {
        complete(base, EngineFlavour.CPU, {}, installed.get).key,
        complete(base, EngineFlavour.SM70, {}, installed.get, lambda: gpu).key,
        complete(base, EngineFlavour.SM70, {}, {**installed, "vllm": "0.33"}.get, lambda: gpu).key,
        complete(base, EngineFlavour.SM70, {"SM70_PRUNE_AUTOTUNE": "0"}, installed.get, lambda: gpu).key,
        complete(base, EngineFlavour.SM70, {}, installed.get, lambda: gpu.model_copy(update={"driver": "590.1"})).key,
    }
    assert None not in keys
    assert len(keys) == 5
    same = gpu.model_copy(update={"driver": "580.200.01", "uuids": ("GPU-1",)})
    assert complete(base, EngineFlavour.SM70, {}, installed.get, lambda: same).key in keys
    assert complete(base, EngineFlavour.SM70, {}, installed.get, lambda: None).missing == (
        "driver_branch",
        "gpu_product",
    )
    assert cuda_of("2.10.0", {"nvidia-cuda-runtime-cu12": "12.8.90"}.get) == "12.8.90"
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/one.py").write_text("a")
    before = source_digest(tmp_path)
    (tmp_path / "ops/one.py").write_text("b")
    assert source_digest(tmp_path) != before
    (tmp_path / "cpuinfo").write_text("flags : avx512f sse\n")
    (tmp_path / "other").write_text("flags : sse\n")
    assert cpu_product(tmp_path / "cpuinfo") != cpu_product(tmp_path / "other")
