"""buildah and skopeo with a storage of their own, without a daemon and without traces outside of one folder."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagekit import machine, oci
from imagekit.recipes import BASE_OPTIONS, BASE_SUITE
from toolbox import ToolError, clean_environment, run, uv

PROGRAMS = {"buildah": "buildah", "skopeo": "skopeo", "mmdebstrap": "mmdebstrap", "unshare": "util-linux"}


def check_programs() -> None:
    """Raises `ToolError` that names the Debian packages to install."""
    if missing := sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)}):
        raise ToolError(f"images need {', '.join(PROGRAMS)}; install: apt-get install {' '.join(missing)}")


@functools.cache
def _propagation() -> str:
    """How mounts are kept to the process that makes them: they go with it, even if it is killed.

    Inside a chroot the root is no mount, so it cannot be made private there; who made the chroot has to see to it.
    """
    private = ["unshare", "--mount", "--propagation", "private", "true"]
    return "private" if subprocess.run(private, capture_output=True, check=False).returncode == 0 else "unchanged"


@dataclass(frozen=True)
class Storage:
    """Images as buildah keeps them, below `folder`. One process at a time may use it."""

    folder: Path

    @property
    def layers(self) -> Path:
        return self.folder / "storage"

    def _run(self, command: Sequence[str | Path], log: Path | None = None) -> str:
        scratch = self.folder / "scratch"  # on the storage's disk: /tmp may be small
        scratch.mkdir(parents=True, exist_ok=True)
        variables = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay", "TMPDIR": str(scratch)}
        words = ["unshare", "--mount", "--propagation", _propagation(), *command]
        if log is None:
            return run(words, env=clean_environment(variables))
        with log.open("a") as file:
            result = subprocess.run(
                words, env=clean_environment(variables), stdout=file, stderr=subprocess.STDOUT, check=False
            )
        if result.returncode != 0:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise ToolError(f"the build failed; the end of {log}:\n{end}")
        return ""

    def _buildah(self, *words: str | Path, log: Path | None = None) -> str:
        return self._run(["buildah", "--root", self.layers, "--runroot", self.folder / "run", *words], log)

    def tidy(self) -> None:
        """Forgets what interrupted runs left. Raises `ToolError` where the storage cannot work."""
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        try:
            self._buildah("rm", "--all")
        except ToolError as error:
            raise ToolError(
                f"buildah must be able to keep layers with overlayfs in {self.folder}, and cannot; set SM70_CACHE to"
                f" a folder on a plain disk (ext4, xfs), and be root. It says:\n{error}"
            ) from None

    def has(self, image: str) -> bool:
        return image in self.tags()

    def tags(self) -> list[str]:
        """The names of all images that have one."""
        listing = self._buildah("images", "--format", "{{.Name}}:{{.Tag}}", "--noheading")
        return [line for line in listing.split() if not line.startswith("<none>")]

    def make_base(self, image: str, dockerfile: Path) -> None:
        """A Debian with apt, from this machine's mirror."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            archive = Path(folder) / "base.tar"
            sources = Path(folder) / "sources"
            sources.write_text(machine.sources_of_debian(BASE_SUITE))
            # Without own sources mmdebstrap takes Debian's public mirror.
            chosen = [str(sources)] if sources.stat().st_size else []
            run(["mmdebstrap", "-q", *BASE_OPTIONS, BASE_SUITE, str(archive), *chosen], env=clean_environment())
            self._buildah("bud", "-q", "--timestamp", "0", "-t", image, "-f", dockerfile, folder)

    def build(
        self, image: str, root: Path, dockerfile: str, *, base: str, log: Path, target: str | None = None,
        contexts: Mapping[str, str] | None = None, share_downloads: bool = True,
    ) -> None:  # fmt: skip
        """Builds a stage (by default the last) of a Dockerfile. `contexts` are ready images in place of stages.

        Downloads come from uv's cache and go there, except that without `share_downloads` they are not kept.
        """
        words: list[str | Path] = ["bud", "--layers", "--timestamp", "0", "--build-arg", f"BASE={base}"]
        words += ["-t", image, "-f", root / dockerfile]
        if target:
            words += ["--target", target]
        for stage, ready in (contexts or {}).items():
            words += ["--build-context", f"{stage}=container-image://{ready}"]
        with tempfile.TemporaryDirectory(dir=self.folder) as settings:
            machine.write(Path(settings), BASE_SUITE, share_downloads)
            words += ["--volume", f"{settings}:{machine.MOUNTED}:ro"]
            if share_downloads:
                cache = Path(uv("cache", "dir").strip())
                cache.mkdir(parents=True, exist_ok=True)
                words += ["--volume", f"{cache}:{machine.MOUNTED}/{machine.CACHE}"]
            self._buildah(*words, root, log=log)

    def _name(self, image: str) -> str:
        return f"containers-storage:[overlay@{self.layers}+{self.folder / 'run'}]{image}"

    def manifest(self, image: str) -> oci.Manifest:
        text = self._run(["skopeo", "--insecure-policy", "inspect", "--raw", self._name(image)])
        return oci.parse_manifest(text.encode())

    def export(self, image: str, layout: Path) -> None:
        """Writes an image as an OCI layout folder; layers that are there already are not copied."""
        options = ["-q", "--dest-oci-accept-uncompressed-layers"]
        target = f"oci:{layout}:{oci.TAG}"
        self._run(["skopeo", "--insecure-policy", "copy", *options, self._name(image), target])

    def run_in(self, image: str, command: Sequence[str], mounts: Mapping[Path, str]) -> str:
        """Runs a command in a throwaway container of an image, without a network; its output."""
        container = self._buildah("from", "--pull-never", image).strip().splitlines()[-1]
        words: list[str | Path] = ["run", "--network", "none", "--user", "65532:65532"]
        for path, inside in mounts.items():
            words += ["--volume", f"{path}:{inside}:ro"]
        try:
            return self._buildah(*words, container, "--", *command)
        finally:
            self._buildah("rm", container)

    def remove(self, images: Sequence[str]) -> None:
        """Removes images by name, and every layer that no named image needs."""
        for image in images:
            self._buildah("rmi", image)
        self._buildah("rmi", "--prune")
