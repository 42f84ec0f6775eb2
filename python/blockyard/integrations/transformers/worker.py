"""`python -m blockyard.integrations.transformers.worker FD`: one rank of a `RankGroup`, started by it."""

import sys

from blockyard.integrations.transformers.ranks import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(int(sys.argv[1])))
