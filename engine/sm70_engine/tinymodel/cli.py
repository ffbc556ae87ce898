"""`sm70-tiny-model`: makes a checkpoint whose right answers are known, with numpy alone and without a download."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sm70_engine.tinymodel.checkpoint import write_draft, write_target
from sm70_engine.tinymodel.draft import DraftKind
from sm70_engine.tinymodel.target import SIZES, build_target


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="sm70-tiny-model", description=__doc__)
    result.add_argument("--out", type=Path, help="folder for the target model")
    result.add_argument("--size", choices=sorted(SIZES), default="tiny")
    result.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    result.add_argument("--bad", action="store_true", help="a target that serves, and recites in a wrong order")
    result.add_argument(
        "--weights",
        choices=["nvfp4", "plain"],
        default="nvfp4",
        help="plain: the values of the NVFP4 weights in bfloat16, as a reference for any engine",
    )
    result.add_argument("--draft", choices=[str(kind) for kind in DraftKind], help="also write a draft model")
    result.add_argument("--draft-out", type=Path, help="folder for the draft model")
    result.add_argument("--mismatched", action="store_true", help="a draft for another vocabulary")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = parser().parse_args(arguments)
    if (options.draft is None) != (options.draft_out is None):
        parser().error("`--draft` and `--draft-out` must be given together")
    if options.out is None and options.draft is None:
        parser().error("nothing to write: give `--out`, or `--draft` and `--draft-out`")
    target = build_target(SIZES[options.size], options.seed, options.bad)
    if options.out is not None:
        write_target(options.out, target, options.size, quantized=options.weights == "nvfp4")
        print(f"target  {options.out}")
    if options.draft is not None:
        write_draft(options.draft_out, target, DraftKind(options.draft), options.mismatched)
        print(f"draft   {options.draft_out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
