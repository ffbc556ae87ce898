"""Builds what the tests run on, before pytest takes the screen: each part once per content, with its progress shown.

`python -m prepare`: the cluster's programs, the CPU lane's environment, the images.
"""

from __future__ import annotations

import images
import lane
from testcluster.cluster import build_all


def main() -> None:
    build_all()
    lane.main(["cpu"])
    images.image_archives(["operator", "engine-cpu"])


if __name__ == "__main__":
    main()
