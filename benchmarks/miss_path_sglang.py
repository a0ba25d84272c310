"""Cost of cornplug in SGLang where nothing is shared: `miss_path.py` with that engine.

python benchmarks/miss_path_sglang.py [--quick] [--out DIR]
"""

import sys

from driver.stage import SGLANG
from miss_path import main

if __name__ == "__main__":
    sys.exit(main(SGLANG))
