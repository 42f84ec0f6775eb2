"""`python -m blockyard_build`: builds only the op library, for a maturin that builds the wheel without this backend."""

import os
from pathlib import Path

from blockyard_build.oplibrary import build_op_library

build_op_library(Path(), os.environ)
