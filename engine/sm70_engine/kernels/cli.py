"""`sm70-kernels`: lists, builds, reports, checks and times the kernels.

Exit status: 0 when all is well, 1 when a check failed, 2 when the command could not do its work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import build, checks, grid, report, toolchain
from .backend import Backend
from .emulator import Emulator
from .errors import KernelError
from .loader import objects_folder

DOCUMENT = "docs/engine/kernels.md"
DOCUMENTS = {
    "routes": "every route with contract, kernels and lane results",
    "round": "the predicted time of one speculative round on four V100s",
}
DEVICE_RESULTS = "docs/engine/device"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sm70-kernels", description="The kernel workshop.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="families, contracts and kernels")
    make = commands.add_parser("build", help="compile what is missing; installs the toolchain on first use")
    make.add_argument("--output", type=Path, help="copy all objects into this folder")
    make.add_argument("--timing", action="store_true", help="with the timing builds of the V100 proxy")
    make.add_argument("--racecheck", action="store_true", help="with the build for compute-sanitizer's racecheck")
    make.add_argument("--jobs", type=int, help="compilations at a time; by default one per core")
    show = commands.add_parser("report", help="what the sm_70 machine code is")
    show.add_argument("--json", action="store_true", help="the manifests instead of tables")
    show.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT}")
    test = commands.add_parser("check", help="every kernel against its reference")
    test.add_argument("--on", choices=("emulator", "device"), default="emulator")
    test.add_argument("--size", type=checks.Size, choices=list(checks.Size), default=checks.Size.SMALL)
    test.add_argument("--all", action="store_true", help="the whole grid on this machine's GPU")
    test.add_argument("--families", default="", help="comma-separated prefixes; by default all")
    test.add_argument("--order", type=int, default=0, help="of threads and blocks on the emulator: 0, 1 or a seed")
    test.add_argument(
        "--races", action="store_true", help="on the emulator: also find races in shared memory (several times slower)"
    )
    test.add_argument("--racecheck", action="store_true", help="on the device: the build of `build --racecheck`")
    time = commands.add_parser("bench", help="time the kernels on this machine's GPU")
    time.add_argument("--families", default="", help="comma-separated prefixes; by default all")
    time.add_argument(
        "--proxy", action="store_true", help="on a card newer than Volta: predict a V100 (80 SMs, s2t, s3t)"
    )
    time.add_argument(
        "--peers",
        action="store_true",
        help="also torch, Triton, and FlashInfer and flash-attn where they are installed, on the same data",
    )
    time.add_argument("--only-peers", action="store_true", help="the peers and our kernels beside them, nothing else")
    time.add_argument(
        "--peer-seconds", type=float, default=float("inf"), help="a limit for the peers; what it cuts off is named"
    )
    time.add_argument("--all", action="store_true", help="everything: peers, and on a card newer than Volta --proxy")
    time.add_argument(
        "--submit-file", "--json", type=Path, dest="submit_file", help="write the run here as one JSON document"
    )
    time.add_argument("--plots", type=Path, help="a folder for pictures of the figures (needs matplotlib)")
    draw = commands.add_parser("plots", help="pictures of runs that `bench --submit-file` wrote (needs matplotlib)")
    draw.add_argument("folder", type=Path, help="for the pictures")
    draw.add_argument("files", type=Path, nargs="+", help="of one card; rows of later ones replace those before")
    for name, what in DOCUMENTS.items():
        page = commands.add_parser(name, help=f"{what}, from the device lane's results")
        page.add_argument("--write", action="store_true", help=f"write docs/engine/{name}.md instead of printing it")
    for command in (test, time):
        command.add_argument("--objects", type=Path, help="built objects; by default the ones that were installed")
    return parser


def _facts(jobs: int | None = None) -> dict[str, build.FamilyFacts]:
    return {name: build.read_facts(path) for (name, _), path in build.build(jobs=jobs).items()}


def _build(options: argparse.Namespace) -> int:
    variants = [build.PLAIN, *(build.TIMING if options.timing else ())]
    variants += [build.RACECHECK] if options.racecheck else []
    for name, facts in _facts(options.jobs).items():
        spills = sum(kernel.spills for kernel in facts.kernels.values())
        print(f"{name}: {len(facts.kernels)} kernels, {spills} bytes of spills")
    if options.output:
        print(f"objects in {build.export(options.output, variants)}")
    return 0


def _report(options: argparse.Namespace) -> int:
    facts = _facts()
    if options.json:
        text = {name: json.loads((path / build.MANIFEST).read_text()) for (name, _), path in build.build().items()}
        print(json.dumps(text, indent=1, sort_keys=True))
    elif options.write:
        report.write(toolchain.REPOSITORY / DOCUMENT, facts.values())
    else:
        print(report.table(facts.values()))
    return 0


def _families(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(x for x in options.families.split(",") if x)


def _check(options: argparse.Namespace) -> int:
    backend: Backend = Emulator(options.order, options.races)
    size = checks.Size.DEVICE if options.all else options.size
    if options.all or options.on == "device":
        from .device import Device  # only here is a driver needed

        backend = Device(options.objects or objects_folder(), build.RACECHECK.name if options.racecheck else "")
    failed = total = 0
    for result in grid.run_all(backend, size, _families(options)):
        total += 1
        failed += not result.passed
        verdict = "ok  " if result.passed else "FAIL"
        note = f"  {result.note}" if result.note else ""
        print(
            f"{verdict} {result.name}: error/tolerance {result.ratio:.3f}, relative L2 {result.relative_l2:.1e}{note}"
        )
    print(f"{backend.name}: {total - failed} of {total} checks passed")
    return 1 if failed else 0


def _bench(options: argparse.Namespace) -> int:
    from . import plots, submission
    from .device import Device

    objects = options.objects or objects_folder()
    if options.proxy and Device(objects).kernels.capability[0] == 7:
        raise KernelError("--proxy predicts a V100 on a newer card; this is one: leave it out and measure")

    def write(document: Mapping[str, Any]) -> None:
        """Puts what there is into the file, whole or not at all: a run that is cut off leaves its figures."""
        if options.submit_file:
            beside = options.submit_file.with_name(options.submit_file.name + ".part")
            beside.write_text(json.dumps(document, indent=1) + "\n")
            beside.replace(options.submit_file)

    found = submission.collect(
        objects,
        _families(options),
        options.proxy or options.all,
        options.peers or options.only_peers or options.all,
        "sm70-kernels bench",
        alone=options.only_peers,
        keep=write,
        peer_seconds=options.peer_seconds,
    )
    for run in found["runs"]:
        print(run["table"])
    if found["peers_table"]:
        print(found["peers_table"])
    if found["many_rows_table"]:
        print(found["many_rows_table"])
    if options.submit_file:
        write(found)
        print(f"written to {options.submit_file}")
    if options.plots:
        for path in plots.write(found, options.plots):
            print(f"written to {path}")
    return 0


def _plots(options: argparse.Namespace) -> int:
    from . import plots

    try:
        documents = [json.loads(path.read_text()) for path in options.files]
    except (OSError, ValueError) as error:
        raise KernelError(f"the files must be what `bench --submit-file` wrote: {error}") from error
    for path in plots.write(plots.merge(documents), options.folder):
        print(f"written to {path}")
    return 0


def document(name: str) -> str:
    """A page of docs/engine that is generated as a whole."""
    from . import results, round_model, routes_doc

    found = results.read(toolchain.REPOSITORY / DEVICE_RESULTS)
    return routes_doc.document(found) if name == "routes" else round_model.document(found)


def _document(options: argparse.Namespace) -> int:
    text = document(options.command)
    if options.write:
        (toolchain.REPOSITORY / f"docs/engine/{options.command}.md").write_text(text)
    else:
        print(text, end="")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "list":
        print(report.listing())
        return 0
    work = {"build": _build, "report": _report, "check": _check, "bench": _bench, "plots": _plots}
    work |= dict.fromkeys(DOCUMENTS, _document)
    try:
        return work[options.command](options)
    except KernelError as error:
        print(f"sm70-kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
