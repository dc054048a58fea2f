"""``python -m tests.cluster.lab up|down|prepare|kueue``: a cluster on this machine."""

import argparse
import sys

from tests.cluster.lab import images, parts, settings
from tests.cluster.lab.cluster import Lab
from tests.cluster.lab.shell import LabError


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.lab", description=__doc__)
    parser.add_argument("what", choices=("up", "down", "prepare", "kueue"))
    parser.add_argument("--name", default=settings.NAME, help="name of the cluster")
    parser.add_argument("--nodes", type=int, default=settings.NODES)
    parser.add_argument(
        "--images", action="store_true", help="up: build and load the images as well"
    )
    args = parser.parse_args()
    lab, say = Lab(args.name), parts.Say()
    try:
        if args.what == "down":
            lab.down()
            return 0
        if args.what == "kueue":
            print(parts.kueue(say))
            return 0
        return _prepare(say) if args.what == "prepare" else _up(lab, args.nodes, args.images, say)
    except (LabError, AssertionError) as error:
        say(str(error))
        return 1


def _prepare(say: parts.Say) -> int:
    """Build what the tests need, before their timeouts count."""
    if settings.KUBECONFIG or settings.KIND:
        return 0
    why = parts.obstacle(may_install=settings.REQUIRED)
    if why:
        say(why)
        return 1 if settings.REQUIRED else 0  # the tests will be skipped
    parts.install(say)
    parts.build(say)
    parts.linter(say)
    images.system(say)
    images.ours(say)
    return 0


def _up(lab: Lab, nodes: int, with_images: bool, say: parts.Say) -> int:
    if settings.KUBECONFIG and str(lab.kubeconfig) != settings.KUBECONFIG:
        say(f"KUBECONFIG={settings.KUBECONFIG} is a cluster already; the tests will use it")
        return 0
    why = parts.obstacle(may_install=True)
    if why:
        say(why)
        return 1
    parts.install(say)
    lab.up(nodes)
    if with_images:
        for image in lab.load_ours().values():
            say(f"on every node: {image.name}")
    print(f"export KUBECONFIG={lab.kubeconfig} PATH={lab.bin}:$PATH")
    return 0


if __name__ == "__main__":
    sys.exit(main())
