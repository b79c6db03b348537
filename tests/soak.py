"""Random training loops without end: `python tests/soak.py --seeds 0:5000`, which `make soak` calls.

Stops at the first loop that fails, and says how to run it again.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator

from loop_runner import run_loops
from loops import by_layout
from ranks import Ranks, RanksFailed

BATCH = 200  # consecutive seeds; those of one layout share a process group

logger = logging.getLogger("soak")


def batches(seeds: range) -> Iterator[tuple[int, list[int]]]:
    """World sizes and seeds, each batch of one layout, so that torch's caches stay warm."""
    for start in range(seeds.start, seeds.stop, BATCH):
        yield from by_layout(range(start, min(start + BATCH, seeds.stop)))


def seed_range(text: str) -> range:
    """`FIRST:LAST`, without the last; one number is that seed alone."""
    first, colon, last = text.partition(":")
    return range(int(first), int(last) if colon else int(first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=seed_range, default=range(5000), help="FIRST:LAST (default 0:5000)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the loops of one layout")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    ranks, began, done, actions = Ranks(), time.monotonic(), 0, 0
    try:
        for world_size, seeds in batches(options.seeds):
            actions += ranks(world_size, run_loops, seeds, timeout=options.timeout)[0]
            done += len(seeds)
            spent = time.monotonic() - began
            logger.info(
                "%d of %d loops, %d actions, %.2f s each", done, len(options.seeds), actions, spent / done
            )
    except RanksFailed as error:
        logger.error("%s", error)
        logger.error(
            'A loop has failed (or, after a hang, one of the seeds %s). Again: make soak ARGS="--seeds SEED"',
            seeds,
        )
        return 1
    finally:
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
