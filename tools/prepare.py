"""Builds what the tests run on, before pytest takes the screen: each part once per content, with its progress shown.

`python -m prepare`: the cluster's programs, the CPU lane's environment, the images, the kernels' machine code.
"""

from __future__ import annotations

import images
import lane
from sm70_engine.kernels import build, toolchain
from testcluster.cluster import build_all
from toolbox import step


def main() -> None:
    build_all()
    lane.main(["cpu"])
    images.image_archives(["operator", "engine-cpu"])
    if toolchain.installed() is None:
        with step("Kernels: compiler and disassembler from package wheels (240 MB to download)"):
            toolchain.install()
    with step("Kernels: sm_70 machine code of every family"):
        build.build()


if __name__ == "__main__":
    main()
